"""The account of the processor's time that messages take from a program: posting, tests, and work of starts that is no update.

Waits are not in it, as they are counted by themselves, and an update stays an update wherever it runs. Two readings of a clock
for each call of the engine that has something to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident

from hpctrain.trace.tracer import HOOKS, Category, Tracer


class _Stretch:
    """The calls of one thread, of which the outermost counts."""

    __slots__ = ("begin_ns", "depth", "total_ns", "update_ns")

    def __init__(self) -> None:
        self.depth = 0
        self.begin_ns = self.update_ns = self.total_ns = 0


class MessageAccount:
    """Adds up a process's time for messages, that of its program and that of a second thread, if any, apart.

    Args:
        trace: records each stretch; None: none is recorded. clock_ns: nanoseconds since any start; a tracer's own counts.

    Attributes:
        last_update_ns: when the last update inside a call of the engine ended.
    """

    def __init__(self, trace: Tracer | None = None, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._trace = trace
        self.clock_ns = clock_ns if trace is None else trace.clock_ns
        self.last_update_ns = 0
        self._program, self._beside = _Stretch(), _Stretch()
        self._second: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the program so far."""
        return self._program.total_ns * 1e-9

    @property
    def beside_seconds(self) -> float:
        """Seconds of the second thread so far, which the program did not spend."""
        return self._beside.total_ns * 1e-9

    def second_thread(self, identifier: int | None) -> None:
        """Calls of the thread with this identifier are not the program's from now on; None: there is no second one."""
        self._second = identifier
        if self._trace is not None:
            self._trace.second_thread(identifier)

    def begin(self) -> None:
        """A call of the engine begins, in which something may move."""
        stretch = self._of_caller()
        stretch.depth += 1
        if stretch.depth == 1:
            stretch.update_ns = 0
            stretch.begin_ns = self.clock_ns()

    def end(self, *, recorded: bool = True) -> None:
        """The call ends, well or not. recorded: in the trace, if any."""
        stretch = self._of_caller()
        stretch.depth -= 1
        if stretch.depth == 0:
            now = self.clock_ns()
            stretch.total_ns += now - stretch.begin_ns - stretch.update_ns
            if recorded and self._trace is not None:
                self._trace.add(Category.MESSAGES, HOOKS, stretch.begin_ns, now)

    def begin_wait(self) -> None:
        """Until `end_wait` nothing counts: the program waits, and that is counted as a wait."""
        self._of_caller().depth += 1

    def end_wait(self) -> None:
        """The wait is over."""
        self._of_caller().depth -= 1

    def updated(self, begin_ns: int, stop_ns: int) -> None:
        """An update has run; one inside of a call of the engine is no message's time."""
        stretch = self._of_caller()
        if stretch.depth:
            stretch.update_ns += stop_ns - begin_ns
            self.last_update_ns = stop_ns

    def _of_caller(self) -> _Stretch:
        return self._beside if self._second is not None and get_ident() == self._second else self._program
