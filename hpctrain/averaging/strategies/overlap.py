"""Overlapped averaging: a nonblocking allreduce a parameter, posted in backward. What other strategies are measured against."""

from __future__ import annotations

from hpctrain.averaging.reduction import AllreduceAverager
from hpctrain.averaging.slices import Slice, per_parameter
from hpctrain.comm.link import LinkModel


class Overlap(AllreduceAverager):
    """One allreduce for each parameter, posted when its gradient is ready and waited for in the next forward of its layer."""

    _cuts_large = False

    def _request(self) -> str:
        return "overlap"

    def _slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return per_parameter(self.group)
