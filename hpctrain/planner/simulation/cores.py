"""The cores of a node: ranks that compute at the same time share them where there are more ranks than cores."""

from __future__ import annotations

from hpctrain.planner.simulation.event_loop import Act, EventLoop
from hpctrain.planner.simulation.resources import SharedResource

#: of a core, taken by a rank that waits: it offers its core to others after each poll, and soon sleeps between polls
_POLLING_SHARE = 0.05
# Linux lets a rank that computes go on until a tick of its clock, of which there are 250 a second: half of the time between them.
_SLICE_SECONDS = 2e-3


class Cores:
    """All cores of a node, on which the operating system runs whatever wants to run, fairly.

    Args:
        count: cores. ranks: of the node; where each has a core of its own, nothing is shared.

    Attributes:
        slice_seconds: until a rank that has offered its core to another one gets it back, a mean; 0 where nothing is shared.
    """

    def __init__(self, loop: EventLoop, count: float, ranks: int) -> None:
        self._loop = loop
        self._shared = SharedResource(loop, count) if count < ranks else None
        self.slice_seconds = 0.0 if self._shared is None else _SLICE_SECONDS

    def run(self, seconds: float, ranks: float, action: Act) -> None:
        """Compute so many seconds of a core on each of `ranks` ranks, then act."""
        if self._shared is None:
            self._loop.at(self._loop.now + seconds, action)
        else:
            self._shared.start(seconds, ranks, action)

    def charge(self, seconds: float, ranks: float) -> None:
        """Work that ranks did while they waited: others on these cores have so much less."""
        if self._shared is not None and seconds > 0:
            self._shared.start(seconds, ranks, None)

    def begin_wait(self, ranks: float) -> None:
        """So many ranks begin to poll."""
        if self._shared is not None:
            self._shared.load(_POLLING_SHARE * ranks)

    def end_wait(self, ranks: float) -> None:
        """They have stopped."""
        if self._shared is not None:
            self._shared.load(-_POLLING_SHARE * ranks)
