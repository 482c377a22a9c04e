"""A child process that becomes the rank, and a parent that watches it and reports if MPI hangs or ends the rank.

Fork before MPI, NumPy and any thread: a forked child has only the thread that forked, and MPI does not survive a fork. The system
ends the child together with its parent, so no rank outlives the process that the launcher watches.

`hpctrain.launch.keeper` keeps the rank of a training. `run_watched` runs a short job in a child: the child leaves notes on its
progress; the parent forwards the child's standard error, keeps the end of it, and kills the child after a time limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import Signals
from typing import Any

from hpctrain.launch.process_end import BUG, FINISHED, USER_ERROR, flush_to_reader

#: environment variable; 0 disables the fork, for example for a debugger that follows the process it started
SWITCH = "HPCTRAIN_KEEPER"

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: a child between its fork and its program must not load libraries

_LOOK_SECONDS = 0.1
_MOST_WORDS = 1 << 14
_SIZE_BYTES = 8


def may_fork() -> bool:
    """Return whether this process may fork a rank: MPI has not started in it, it has no threads, and SWITCH is not 0."""
    if os.environ.get(SWITCH) == "0" or "mpi4py.MPI" in sys.modules or sys.platform != "linux":
        return False
    return len(os.listdir("/proc/self/task")) == 1


def fork_child() -> int:
    """Fork; return the process ID of the child, or 0 in the child. The system kills the child when this process ends."""
    flush_to_reader(0.0)
    parent = os.getpid()
    child = os.fork()
    if not child:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(BUG)
    return child


def end_with_parent(number: Signals) -> None:
    """Make the system send this signal to the calling process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


@dataclass(frozen=True)
class RankEnd:
    """End of a rank that did not finish its work.

    Attributes:
        code: exit code or negative signal number, as `Popen.returncode`; None: the time limit passed.
        words: end of the text that the rank wrote to standard error.
        note: last note of the rank; None if there is none.
    """

    code: int | None
    words: str
    note: Any

    @property
    def in_words(self) -> str:
        """Predicate that describes the end, such as "exited with code 3"."""
        if self.code is None:
            return "did not end"
        if self.code < 0:
            return f"was ended by {Signals(-self.code).name}"
        return f"exited with code {self.code}"


class Notebook:
    """Writer of notes in the child. Each note replaces the previous one. Without a descriptor, notes are dropped.

    Args:
        descriptor: descriptor of a pipe to the parent; None: no parent.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def write(self, note: object) -> None:
        """Write a picklable note."""
        if self._descriptor is None:
            return
        text = pickle.dumps(note)
        view = memoryview(len(text).to_bytes(_SIZE_BYTES, "little") + text)
        while view:
            view = view[os.write(self._descriptor, view) :]


def run_watched(work: Callable[[Notebook], int], explain: Callable[[RankEnd], int], seconds: float) -> int:
    """Run `work` in a child; return its exit code, or the result of `explain` if the child does not finish its work.

    Returns in both processes. The child returns the exit code of `work` instead of exiting here, so that MPI notifies the
    launcher at its normal exit; otherwise the launcher would kill the other ranks. If the process may not fork (`may_fork`),
    `work` runs in this process and is not watched.

    Args:
        work: function from the notebook to the exit code.
        explain: function from the end of the child to the exit code; called in the parent.
    """
    if not may_fork():
        return work(Notebook())
    notes_out, notes_in = os.pipe()
    errors_out, errors_in = os.pipe()
    child = fork_child()
    if not child:
        os.close(notes_out)
        os.close(errors_out)
        os.dup2(errors_in, 2)
        os.close(errors_in)
        return work(Notebook(notes_in))
    os.close(notes_in)
    os.close(errors_in)
    end = _Watch(child, notes_out, errors_out).until_end(seconds)
    return end.code if end.code in (FINISHED, USER_ERROR) else explain(end)


class _Watch:
    """The parent's view of the child."""

    def __init__(self, child: int, notes: int, errors: int) -> None:
        self._child, self._notes_out, self._errors_out = child, notes, errors
        self._notes = b""
        self._words = b""

    def until_end(self, seconds: float) -> RankEnd:
        """Forward the child's output until it ends, or kill it after the time limit; return how it ended."""
        end = time.monotonic() + seconds
        code: int | None = None
        while True:
            ended, status = os.waitpid(self._child, os.WNOHANG)
            self._listen(0 if ended else _LOOK_SECONDS)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() >= end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
                break
        return RankEnd(code, self._words.decode(errors="replace"), self._last_note())

    def _listen(self, seconds: float) -> None:
        """Read all available notes and output; forward the child's standard error."""
        waiting = seconds
        while ready := select.select([self._notes_out, self._errors_out], [], [], waiting)[0]:
            texts = {descriptor: os.read(descriptor, _MOST_WORDS) for descriptor in ready}
            self._notes += texts.get(self._notes_out, b"")
            words = texts.get(self._errors_out, b"")
            self._words = (self._words + words)[-_MOST_WORDS:]
            if words:
                os.write(2, words)
            if not any(texts.values()):  # the child has closed both
                time.sleep(seconds)
                return
            waiting = 0

    def _last_note(self) -> Any:
        """Return the last complete note; None if there is none."""
        rest, note = self._notes, None
        while len(rest) >= _SIZE_BYTES:
            size = int.from_bytes(rest[:_SIZE_BYTES], "little")
            text, rest = rest[_SIZE_BYTES : _SIZE_BYTES + size], rest[_SIZE_BYTES + size :]
            if len(text) == size:
                note = pickle.loads(text)
        return note
