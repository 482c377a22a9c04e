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
        attends: the rank waits, and so polls all the time. debt_seconds: of the core, for what has moved and is not paid.
    """

    def __init__(self, held_up: Callable[[], None]) -> None:
        self._held_up = held_up
        self.attends = False
        self.debt_seconds = 0.0
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

    def look(self, tests: int = 1) -> None:
        """A poll. tests: operations in flight, each of which is tested."""
        if self._restricted and not self.attends:
            self._mark(tests)
            blocked, self._blocked = self._blocked, []
            for transfer in blocked:
                transfer.look(tests)

    def begin_wait(self) -> None:
        """Poll all the time from now on."""
        self.attends = True
        self._blocked.clear()
        for transfer in tuple(self._restricted):
            transfer.attend()

    def end_wait(self, tests: int = 1) -> None:
        """Poll no more; the last poll had so many tests."""
        self.attends = False
        self._mark(tests)
        for transfer in tuple(self._restricted):
            transfer.leave()

    def blocked(self, transfer: StageTransfer) -> None:
        """The transfer goes on at the next poll."""
        self._blocked.append(transfer)
        self._held_up()

    def owes(self, seconds: float) -> None:
        """Messages that moved while the rank did not wait take so much of its core, to be paid at a poll."""
        self.debt_seconds += seconds

    def pay(self) -> float:
        """All that is owed; nothing is any more."""
        debt, self.debt_seconds = self.debt_seconds, 0.0
        return debt

    def _mark(self, tests: int) -> None:
        for lane in self._lanes:
            lane.look(tests)
