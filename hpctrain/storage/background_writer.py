"""A thread that does one piece of work at a time, such as writing a checkpoint, while the program goes on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

#: the program's own threads come first where there is one core for both
_NICENESS = 10


class BackgroundWriter:
    """Does work in a thread of its own, a new one for each. Its methods are called from one thread.

    The thread ends with the process, whatever it does then: who wants its work waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: tuple[Any, Exception | None] = (None, None)
        self._begin_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Work is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def seconds(self) -> float:
        """Since the latest start."""
        return time.monotonic() - self._begin_seconds

    def start(self, work: Callable[[], Any]) -> None:
        """Begin `work`, of which nothing is under way."""
        assert not self.busy, "one piece of work at a time"
        self._outcome, self._begin_seconds = (None, None), time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(work,), name="hpctrain-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the work, so long at most; True where none is under way."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy

    def result(self) -> Any:
        """The result of the latest work, once it is done.

        Raises:
            Exception: the one with which it ended.
        """
        assert not self.busy, "the work is not done"
        result, error = self._outcome
        if error is not None:
            raise error
        return result

    def _run(self, work: Callable[[], Any]) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        try:
            self._outcome = work(), None
        except Exception as error:  # it is the caller's
            self._outcome = None, error
