"""Overlapped averaging: a nonblocking allreduce per parameter, posted in backward. Others are measured against it."""

from __future__ import annotations

from hpctrain.averaging.allreduce import AllreduceStrategy
from hpctrain.averaging.base import WireOptions
from hpctrain.averaging.slicing import Slice, per_parameter
from hpctrain.comm.link import LinkModel


class Overlap(AllreduceStrategy):
    """One allreduce for each parameter, posted when its gradient is ready and waited for in the next forward of its layer.

    It is there to be compared with: `bucketed` sends the same in fewer messages. Most parameters of a network with batch norm
    hold a few hundred numbers, and each message costs its latency and several polls on either side.
    """

    Options = WireOptions
    cuts_large = False

    def words(self) -> str:
        return "overlap"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return per_parameter(self.group.layout)
