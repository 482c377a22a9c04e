"""A rank's attention to what it has in flight: at polls, and all the time while it waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpctrain.planner.simulation.shared_resource import SharedResource
from hpctrain.planner.simulation.transfers import StageTransfer


class Attention:
    """Polls let transfers go on that were held up.

    Args:
        resources: that its transfers use. held_up: called where a transfer needs a poll to go on.

    Attributes:
        attends: the rank waits, and so polls all the time.
    """

    def __init__(self, resources: Sequence[SharedResource], held_up: Callable[[], None]) -> None:
        self._resources, self._held_up = resources, held_up
        self.attends = False
        self._blocked: list[StageTransfer] = []
        self._restricted: dict[StageTransfer, None] = {}
        self._looked_at = dict.fromkeys(resources, 0.0)

    @property
    def needed(self) -> bool:
        """Whether a poll matters to anything in flight."""
        return bool(self._restricted)

    def add(self, transfer: StageTransfer) -> None:
        """A transfer is in flight from now on."""
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

    def looked_at(self, resource: SharedResource) -> float:
        """The resource's position at the last poll."""
        return self._looked_at[resource]

    def blocked(self, transfer: StageTransfer) -> None:
        """The transfer goes on at the next poll."""
        self._blocked.append(transfer)
        self._held_up()

    def _mark(self) -> None:
        for resource in self._resources:
            self._looked_at[resource] = resource.position
