"""Gates: something that happens on this rank alone, which queued operations come after."""

from __future__ import annotations

from typing import NoReturn

from hpctrain.comm.progress import Ticket


class LocalEvent(Ticket):
    """Done once opened. Never posted; stands in the dependencies of operations that are."""

    __slots__ = ()

    def __init__(self, what: str) -> None:
        super().__init__(_never, what, (), "this rank", 0)

    def open(self) -> None:
        """What operations wait for has happened; the caller polls the engine, so that they start."""
        self.done = True


def _never() -> NoReturn:
    raise AssertionError("a gate is no operation")
