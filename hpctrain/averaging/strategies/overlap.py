"""Overlapped averaging: a nonblocking allreduce per parameter, posted in backward. Others are measured against it."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.averaging.allreduce_strategy import AllreduceStrategy
from hpctrain.averaging.rounding import check_wire
from hpctrain.averaging.slices import Slice, per_parameter
from hpctrain.comm.link import LinkModel
from hpctrain.comm.sixteen_bit import Wire


@dataclass(frozen=True)
class OverlapOptions:
    """Options of `overlap`.

    Args:
        wire: How gradients travel: "float32" as they are computed; "bfloat16" and "float16" rounded to 16 bits, and added up in
            full precision.

    Raises:
        OptionError: an unknown value of wire.
    """

    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(wire=self.wire)


class Overlap(AllreduceStrategy):
    """One allreduce for each parameter, posted when its gradient is ready and waited for in the next forward of its layer.

    It is there to be compared with: `bucketed` sends the same in fewer messages. Most parameters of a network with batch norm
    hold a few hundred numbers, and each message costs its latency and several polls on either side.
    """

    Options = OverlapOptions
    cuts_large = False

    def words(self) -> str:
        return "overlap"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return per_parameter(self.group.layout)
