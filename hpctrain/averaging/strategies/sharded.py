"""Sharded averaging, the default: reduce-scatter, update of 1/P per rank, allgather of parameters in the next forward.

Lee, Agrawal, Balaprakash, Choudhary and Liao, "Communication-efficient parallelization strategy for deep convolutional neural
network training", MLHPC 2018. It moves as much data as an allreduce, half of it during the next forward. The update on each rank
costs 1/P of a full update.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.averaging.base import check_at_least_one
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.sixteen_bits import check_wire
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.comm.sums import Wire


@dataclass(frozen=True)
class ShardedOptions:
    """Options of `sharded`.

    Args:
        fc_exchange: Whether linear layers exchange inputs and errors instead of gradients: "auto" (on CPUs, if that moves less
            data), "always" or "never".
        bucket_bytes: Minimum bytes of a slice of fused small layers. Null computes them from the numbers of parameters and ranks.
        two_level: Whether nodes with several ranks each sum gradients within the node before they sum them across nodes, and
            gather parameters in the reverse order.
        replan: Whether to plan the order of the allgathers again after a few steps, from measured times.
        window: Maximum number of operations in flight on each communicator; null: no limit.
        wire: Number format in which gradients travel: "float32" sends them unchanged; "bfloat16" rounds them to 16 bits,
            and sums are still computed in full precision.
        wire_parameters: Number format in which updated parameters travel. Every rank computes with the rounded parameters; the
            owner of a part adds its rounding errors back before the next update.

    Raises:
        OptionError: a size or window is below 1, or a wire is unknown.
    """

    fc_exchange: FcExchange = "auto"
    bucket_bytes: int | None = None
    two_level: bool = True
    replan: bool = True
    window: int | None = None
    wire: Wire = "float32"
    wire_parameters: Wire = "float32"

    def __post_init__(self) -> None:
        check_at_least_one(bucket_bytes=self.bucket_bytes, window=self.window)
        check_wire(wire=self.wire, wire_parameters=self.wire_parameters)


class Sharded(ReduceScatterStrategy):
    """Averaging by a reduce-scatter of gradients in backward, and an allgather of updated parameters in the next forward.

    Reduce-scatters run in the order of backward on one communicator, allgathers on another, so that each may overtake the other.
    Small layers are fused, large ones cut. Allgathers run front layers first. Those of late layers run during backward if the
    link would otherwise idle, according to times measured in the first steps.
    """

    Options = ShardedOptions
    options: ShardedOptions

    def words(self) -> str:
        options = self.options
        return f"sharded, bucket_bytes {options.bucket_bytes}, replan {options.replan}, window {options.window}"
