"""Local events: something that happens on this rank alone, which queued operations come after."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NoReturn

from hpctrain.comm.posting_queue import Ticket


class LocalEvent(Ticket):
    """A ticket that is done once the event has happened. Never posted; stands in the dependencies of operations that are."""

    __slots__ = ()

    def __init__(self, text: str) -> None:
        super().__init__(_never, text, (), "this rank", 0)

    def happen(self) -> None:
        """Let go what waits for it; the caller polls the engine, so that it starts."""
        self.possible_ns = perf_counter_ns()
        self.done = True


def _never() -> NoReturn:
    raise AssertionError("a local event is no operation")
