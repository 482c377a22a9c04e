"""Overlapped averaging: a nonblocking allreduce per parameter, posted in backward. A baseline for comparisons."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.averaging.allreduce import AllreduceStrategy
from hpctrain.averaging.base import StrategyCosts, WireOptions
from hpctrain.averaging.slicing import Slice, per_parameter, uncut_bytes
from hpctrain.comm.link import LinkModel


class Overlap(AllreduceStrategy):
    """One allreduce for each parameter, posted when its gradient is ready and waited for in the next forward of its layer.

    It is a baseline for comparisons; `bucketed` sends the same data in fewer messages. Most parameters of a network with batch
    norm have a few hundred elements, and each message costs its latency and several polls by sender and receiver.
    """

    Options = WireOptions
    cuts_large = False

    @classmethod
    def costs(cls, options: WireOptions) -> StrategyCosts:
        return replace(super().costs(options), slice_bytes=uncut_bytes, per_parameter=True)

    def words(self) -> str:
        return "overlap"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return per_parameter(self.group.layout)
