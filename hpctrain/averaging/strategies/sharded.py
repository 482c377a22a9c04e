"""Sharded averaging, the default: reduce-scatter, an own 1/P of the update, allgather of parameters under the next forward.

Lee, Agrawal, Balaprakash, Choudhary and Liao, "Communication-efficient parallelization strategy for deep convolutional neural
network training", MLHPC 2018. Moves what an allreduce moves, half of it under the next forward; the update costs 1/P.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.averaging.base import check_at_least_one, check_sizes, words_of_sizes
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.sixteen_bits import check_wire
from hpctrain.averaging.slicing import Sizes
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.comm.sums import Wire


@dataclass(frozen=True)
class ShardedOptions:
    """Options of `sharded`.

    Args:
        fc_exchange: Linear layers exchange inputs and errors instead of gradients: "auto" (on CPUs, where that moves less),
            "always" or "never".
        bucket_bytes: Least size of a slice of fused small layers, in bytes; null: by `sizes`.
        sizes: Rule for sizes that are not given: "rule" takes the same ones in every run on the same number of ranks, so that
            runs repeat bit by bit; "measured" follows the link, which is measured at the start.
        two_level: On nodes with several ranks each, make sums within a node first, and gather parameters across nodes first.
        replan: Plan the order of the allgathers again after a few steps, by measured times.
        window: Largest number of operations in flight on each communicator; null: no limit.
        wire: How gradients travel: "float32" as they are computed; "bfloat16" and "float16" rounded to 16 bits, and added up in
            full precision.
        wire_parameters: How updated parameters travel. Every rank computes with the rounded ones; their owner keeps the
            rounding errors for the next update.

    Raises:
        OptionError: a size or window below 1, sizes given and to be measured, or an unknown value of a wire.
    """

    fc_exchange: FcExchange = "auto"
    bucket_bytes: int | None = None
    sizes: Sizes = "rule"
    two_level: bool = True
    replan: bool = True
    window: int | None = None
    wire: Wire = "float32"
    wire_parameters: Wire = "float32"

    def __post_init__(self) -> None:
        check_at_least_one(bucket_bytes=self.bucket_bytes, window=self.window)
        check_sizes(self.sizes, bucket_bytes=self.bucket_bytes)
        check_wire(wire=self.wire, wire_parameters=self.wire_parameters)


class Sharded(ReduceScatterStrategy):
    """Reduce-scatter gradients under backward, update own parts, allgather parameters under the next forward.

    Reduce-scatters go in backward's order on one communicator, allgathers on another; these may overtake those. Small layers
    are fused, large ones cut. Allgathers go front layers first; those of late layers go under backward where the link would
    otherwise idle (by times measured in the first steps).
    """

    Options = ShardedOptions
    options: ShardedOptions

    def words(self) -> str:
        options = self.options
        sizes = words_of_sizes(options.sizes)
        return f"sharded, bucket_bytes {options.bucket_bytes}, replan {options.replan}, window {options.window}{sizes}"
