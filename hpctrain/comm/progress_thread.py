"""A thread that lets messages move while kernels run. It tests, and does nothing else: no operation begins, completes or computes
in it. One of two stages may come to its second.

So no averager ever runs on it, and the process's own thread sees a change only when it polls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

#: between two passes. Shorter ones take time from the kernels, longer ones leave the wire idle between a message's parts.
INTERVAL_SECONDS = 200e-6


class ProgressThread:
    """Calls `progress_once` again and again inside of its `with` block, and never outside of it.

    A block does not nest. An exception of `progress_once` is raised at the end of the block.

    Args:
        progress_once: one pass over what is in flight.
        lock: held during each pass; every other thread that talks to the transport holds it, too.
    """

    def __init__(
        self, progress_once: Callable[[], None], lock: AbstractContextManager[Any], interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._progress_once = progress_once
        self._lock = lock
        self._interval_seconds = interval_seconds
        self._open = threading.Event()
        self._inside = False
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hpctrain-progress", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        assert not self._inside, "the block of a progress thread does not nest"
        self._inside = True
        self._open.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.clear()
        with self._lock:  # a pass under way ends first; the next one finds the block closed
            self._inside = False
        if self._failure is not None and error is None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """End the thread; outside of the block."""
        assert not self._inside
        self._ended = True
        self._open.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._open.wait()
            if self._ended:
                return
            try:
                with self._lock:
                    if self._inside:
                        self._progress_once()
            except BaseException as failure:  # the block's owner gets it
                self._failure = failure
                self._open.clear()
            time.sleep(self._interval_seconds)
