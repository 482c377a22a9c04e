"""Bucketed averaging: nonblocking allreduces of fused gradients in the order of backward, in buckets sized for the link."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.averaging.allreduce import AllreduceStrategy
from hpctrain.averaging.base import check_at_least_one
from hpctrain.averaging.sixteen_bits import check_wire
from hpctrain.averaging.slicing import Slice, fused
from hpctrain.comm.link import LinkModel
from hpctrain.comm.sums import Wire


@dataclass(frozen=True)
class BucketedOptions:
    """Options of `bucketed`.

    Args:
        bucket_bytes: Minimum bytes of a bucket. Null computes them from the numbers of parameters and ranks.
        wire: Number format in which gradients travel: "float32" sends them unchanged; "bfloat16" rounds them to 16 bits,
            and sums are still computed in full precision.
        two_level: Whether nodes with several ranks each first sum gradients within the node in full precision, and round them to
            16 bits only for messages across nodes. With float32 messages, MPI's allreduce chooses its own levels.

    Raises:
        OptionError: bucket_bytes is below 1, or wire is unknown.
    """

    bucket_bytes: int | None = None
    wire: Wire = "float32"
    two_level: bool = True

    def __post_init__(self) -> None:
        check_at_least_one(bucket_bytes=self.bucket_bytes)
        check_wire(wire=self.wire)


class Bucketed(AllreduceStrategy):
    """One allreduce for each bucket of neighbouring parameters, posted when the last of their gradients is ready."""

    Options = BucketedOptions
    options: BucketedOptions

    def words(self) -> str:
        return f"bucketed, bucket_bytes {self.options.bucket_bytes}"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return fused(self.group.layout, self.least_elements(link))
