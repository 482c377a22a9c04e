"""Notes of a program for the flight record, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hpctrain.flight.recorder import FlightRecorder

_NOTHING: AbstractContextManager[Any] = nullcontext()


class FlightNotes:
    """Tells a recorder what the program does; costs next to nothing where there is none.

    Args:
        recorder: None: nobody is told.
    """

    __slots__ = ("_recorder",)

    def __init__(self, recorder: FlightRecorder | None) -> None:
        self._recorder = recorder

    def alive(self) -> None:
        """The process gets on, as the heartbeat is to know. Waits do, too: they have a deadline of their own."""
        if self._recorder is not None:
            self._recorder.beats += 1

    def phase(self, name: str) -> None:
        """The program does something else from now on."""
        if self._recorder is not None:
            self._recorder.phase(name)

    @contextmanager
    def meanwhile(self, name: str) -> Iterator[None]:
        """The program does something else while this lasts, and then again what it did before."""
        before = None if self._recorder is None else self._recorder.phase_name
        self.phase(name)
        try:
            yield
        finally:
            if before is not None:
                self.phase(before)

    def step(self, epoch: int, step: int) -> None:
        """A training step begins. epoch, step: from 1 on; of the whole training."""
        if self._recorder is not None:
            self._recorder.step(epoch, step)
            self._recorder.phase("a training step")

    def waiting(self, purpose: str, number: int) -> AbstractContextManager[Any]:
        """While this lasts, the program waits. number: of the operation in the record; 0: of none that was queued."""
        return _NOTHING if self._recorder is None else self._recorder.waiting(purpose, number)
