"""Bucketed averaging: nonblocking allreduces of fused gradients in backward's order, as large as the link asks for."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.averaging.allreduce import AllreduceStrategy
from hpctrain.averaging.base import check_at_least_one, check_sizes, words_of_sizes
from hpctrain.averaging.sixteen_bits import check_wire
from hpctrain.averaging.slicing import Sizes, Slice, fused
from hpctrain.comm.link import LinkModel
from hpctrain.comm.sums import Wire


@dataclass(frozen=True)
class BucketedOptions:
    """Options of `bucketed`.

    Args:
        bucket_bytes: Least size of a bucket, in bytes; null: by `sizes`.
        sizes: Rule for sizes that are not given: "rule" takes the same ones in every run on the same number of ranks, so that
            runs repeat bit by bit; "measured" follows the link, which is measured at the start.
        wire: How gradients travel: "float32" as they are computed; "bfloat16" and "float16" rounded to 16 bits, and added up in
            full precision.
        two_level: Where nodes have several ranks each, sums that travel in 16 bits are made in full precision within a node
            first, and rounded to cross nodes only; the MPI's own allreduce does float32.

    Raises:
        OptionError: bucket_bytes below 1, or given though sizes are to be measured; an unknown value of wire.
    """

    bucket_bytes: int | None = None
    sizes: Sizes = "rule"
    wire: Wire = "float32"
    two_level: bool = True

    def __post_init__(self) -> None:
        check_at_least_one(bucket_bytes=self.bucket_bytes)
        check_sizes(self.sizes, bucket_bytes=self.bucket_bytes)
        check_wire(wire=self.wire)


class Bucketed(AllreduceStrategy):
    """One allreduce for each bucket of neighbouring parameters, posted when the last of their gradients is ready."""

    Options = BucketedOptions
    options: BucketedOptions

    def words(self) -> str:
        return f"bucketed, bucket_bytes {self.options.bucket_bytes}{words_of_sizes(self.options.sizes)}"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return fused(self.group.layout, self.least_elements(link))
