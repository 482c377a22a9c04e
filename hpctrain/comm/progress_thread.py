"""A thread that works on messages while kernels run: the engine says what one pass of it does.

In mode `thread` a pass tests, and does nothing else: no operation begins, completes or computes in it (one of two stages may come
to its second), so no averager ever runs on it, and the process's own thread sees a change only when it polls. In mode `posting` a
pass is a poll: what completes is seen, and what may start is started, with what that computes, in the order of its queue.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

#: between two passes. Shorter ones take time from the kernels, longer ones leave the wire idle between a message's parts.
INTERVAL_SECONDS = 200e-6


class ProgressThread:
    """Calls `one_pass` again and again inside of its `with` block, and never outside of it.

    A block does not nest. A pass runs in the context of its owner, such as the handling of floating-point errors there. After an
    exception the thread makes no more passes in that block; its owner gets it from `raise_failure`, or at the block's end.

    Args:
        one_pass: over all queues. lock: held during each pass; every other thread that talks to the transport holds it, too.
        interval_seconds: between two passes, unless somebody calls `wake`.

    Attributes:
        inside: the block is open; changed under the lock.
    """

    def __init__(
        self, one_pass: Callable[[], None], lock: AbstractContextManager[Any], interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._one_pass = one_pass
        self._lock = lock
        self._interval_seconds = interval_seconds
        self._open, self._called = threading.Event(), threading.Event()
        self.inside = False
        self._context = contextvars.copy_context()
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hpctrain-progress", daemon=True)
        self._thread.start()

    @property
    def identifier(self) -> int | None:
        """The thread's number, as `threading.get_ident` gives it."""
        return self._thread.ident

    def wake(self) -> None:
        """Make the next pass at once, if a block is open."""
        self._called.set()

    def raise_failure(self) -> None:
        """Raise here, once, what a pass has raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> None:
        assert not self.inside, "the block of a progress thread does not nest"
        self._context = contextvars.copy_context()
        self.inside = True
        self._open.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.clear()
        with self._lock:  # a pass under way ends first; the next one finds the block closed
            self.inside = False
        if error is None:
            self.raise_failure()

    def close(self) -> None:
        """End the thread; outside of the block."""
        assert not self.inside
        self._ended = True
        self._open.set()
        self._called.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._open.wait()
            if self._ended:
                return
            self._called.clear()  # a call from here on is for the pass after this one
            try:
                with self._lock:
                    if self.inside:
                        self._context.run(self._one_pass)
            except BaseException as failure:  # the block's owner gets it
                self._failure = failure
                self._open.clear()
            self._called.wait(self._interval_seconds)
