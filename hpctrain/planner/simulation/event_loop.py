"""Simulated time: actions in the order of their instants, those of one instant in the order in which they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Act = Callable[[], object]


class EventLoop:
    """A heap of actions.

    Attributes:
        now: seconds since the simulation's begin.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._actions: list[tuple[float, int, Act]] = []
        self._count = 0
        self._running = True

    def at(self, seconds: float, action: Act) -> None:
        """Act at an instant, now or later."""
        self._count += 1
        heapq.heappush(self._actions, (seconds, self._count, action))

    def soon(self, action: Act) -> None:
        """Act now, after what is under way."""
        self.at(self.now, action)

    def stop(self) -> None:
        """Let `run` end after the action that is under way."""
        self._running = False

    def run(self) -> bool:
        """Act until `stop` is called: True; or until nothing is left to do: False."""
        actions, pop = self._actions, heapq.heappop
        while self._running:
            if not actions:
                return False
            self.now, _, action = pop(actions)
            action()
        return True
