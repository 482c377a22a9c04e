"""A rank's attention to what it has in flight: at polls, and all the time while it waits."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.planner.simulation.lanes import Lane
from hpctrain.planner.simulation.transfers import StageTransfer


class Attention:
    """Polls let transfers go on that were held up.

    Args:
        held_up: called where a transfer needs a poll to go on.

    Attributes:
        attends: the rank waits, and so polls all the time.
    """

    def __init__(self, held_up: Callable[[], None]) -> None:
        self._held_up = held_up
        self.attends = False
        self._lanes: dict[Lane, None] = {}
        self._blocked: list[StageTransfer] = []
        self._restricted: dict[StageTransfer, None] = {}

    @property
    def needed(self) -> bool:
        """Whether a poll matters to anything in flight."""
        return bool(self._restricted)

    def add(self, transfer: StageTransfer, lane: Lane) -> None:
        """A transfer is in flight from now on."""
        self._lanes[lane] = None
        if transfer.restricted:
            self._restricted[transfer] = None

    def remove(self, transfer: StageTransfer) -> None:
        """It is complete."""
        self._restricted.pop(transfer, None)

    def look(self) -> None:
        """A poll."""
        if self._restricted and not self.attends:
            self._mark()
            blocked, self._blocked = self._blocked, []
            for transfer in blocked:
                transfer.look()

    def begin_wait(self) -> None:
        """Poll all the time from now on."""
        self.attends = True
        self._blocked.clear()
        for transfer in tuple(self._restricted):
            transfer.attend()

    def end_wait(self) -> None:
        """Poll no more."""
        self.attends = False
        self._mark()
        for transfer in tuple(self._restricted):
            transfer.leave()

    def blocked(self, transfer: StageTransfer) -> None:
        """The transfer goes on at the next poll."""
        self._blocked.append(transfer)
        self._held_up()

    def _mark(self) -> None:
        for lane in self._lanes:
            lane.look()
