"""A second thread of a progress engine, played by the first one: passes lie between lines of the program, drawn by a seed.

A pass holds the engine's lock from begin to end, so what a real thread does there comes before or after whatever the program does
under the lock. What is left is where, between two lines of code that holds no lock, a pass lies. Played on one thread every such
choice repeats, and virtual ranks, which run one at a time on threads of their own, never notice.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any

from hpctrain.comm.waiting import ProgressThread

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "hpctrain")
#: code between whose lines a pass may lie: all that runs between kernels and knows of messages
_FOLDERS = tuple(os.path.join(_PACKAGE, *path) for path in (("averaging",), ("parallel",), ("train", "step"), ("nn", "program")))


class InterleavedThread(ProgressThread):
    """Makes passes on its owner's thread.

    Args:
        share: of the lines before which a pass is made; a pass in vain costs virtual ranks much time.

    Attributes:
        passes: made so far.
    """

    def __init__(
        self, one_pass: Callable[[], None], lock: AbstractContextManager[Any], *, seed: int = 0, share: float = 0.01
    ) -> None:
        # No thread is made: all of the base that would need one is replaced here.
        self._one_pass, self._lock = one_pass, lock
        self._random, self._share = random.Random(seed), share
        self._before: Any = None
        self._busy = False
        self._failure: BaseException | None = None
        self.inside = False
        self.passes = 0

    @property
    def identifier(self) -> int | None:
        """No thread has this number, so its passes count as the program's."""
        return -1

    def wake(self) -> None:
        """Whether a thread that is woken runs at once is a matter of chance."""
        self._step(0.5)

    def __enter__(self) -> None:
        assert not self.inside
        self.inside, self._before = True, sys.gettrace()
        sys.settrace(self._enter_frame)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.settrace(self._before)
        self.inside = False
        if error is None:
            self.raise_failure()

    def close(self) -> None:
        """Nothing is left to end."""
        assert not self.inside

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_FOLDERS) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._step(self._share)
        return self._line

    def _step(self, share: float) -> None:
        lock: Any = self._lock
        assert isinstance(lock, type(threading.RLock()))
        if self._busy or not self.inside or lock._is_owned() or self._failure is not None:  # type: ignore[attr-defined]
            return
        if self._random.random() >= share:
            return
        self._busy = True
        try:
            with self._lock:
                self._one_pass()
            self.passes += 1
        except Exception as failure:
            self._failure = failure
        finally:
            self._busy = False
