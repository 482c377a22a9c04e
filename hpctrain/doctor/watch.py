"""A parent of the doctor's rank: where MPI hangs, or ends the process, it is there to say so.

It forks before MPI, NumPy and any thread exist. The child becomes the rank, and tells by notes how far it has got; the parent
passes on what the child writes to standard error, and remembers its last words.
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
from typing import Any

from hpctrain.launch.keeper import may_fork
from hpctrain.launch.process_end import BUG, FINISHED, USER_ERROR

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.1
_MOST_WORDS = 1 << 14
_SIZE_BYTES = 8


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank that came to no conclusion.

    Attributes:
        code: as `Popen.returncode` has it; None: it was still there when its time was over. words: the last that it wrote to
            standard error. note: its last one; None: it has left none.
    """

    code: int | None
    words: str
    note: Any

    @property
    def in_words(self) -> str:
        """The end, as the verb of a sentence."""
        if self.code is None:
            return "did not end"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"left with exit code {self.code}"


class Notebook:
    """The rank's side: each note replaces the one before."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def write(self, note: object) -> None:
        """Leave a picklable note."""
        if self._descriptor is None:
            return
        text = pickle.dumps(note)
        view = memoryview(len(text).to_bytes(_SIZE_BYTES, "little") + text)
        while view:
            view = view[os.write(self._descriptor, view) :]


def watched(work: Callable[[Notebook], int], explain: Callable[[RankEnd], int], seconds: float) -> int:
    """Do the work in a child; the exit code that it ends with, or that of `explain` where it comes to none.

    Returns in both: in the child, which leaves as any process does, with its work's code. MPI takes leave of the launcher when a
    process exits; a launcher kills the ranks beside one that is gone without that.

    Where no process may be forked (see `keeper.may_fork`), the work is done in this one, and nobody watches.

    Args:
        seconds: after which the child is ended.
    """
    if not may_fork():
        return work(Notebook())
    heard, said = os.pipe()
    errors_out, errors_in = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(heard)
        os.close(errors_out)
        _be_rank(parent, errors_in)
        return work(Notebook(said))
    os.close(said)
    os.close(errors_in)
    end = _Watch(child, heard, errors_out).until_end(seconds)
    return end.code if end.code is not None and end.code in (FINISHED, USER_ERROR) else explain(end)


def _be_rank(parent: int, errors: int) -> None:
    """In the child: end with the parent, and write to where it listens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(BUG)
    os.dup2(errors, 2)
    os.close(errors)


class _Watch:
    """The parent's side."""

    def __init__(self, child: int, heard: int, errors: int) -> None:
        self._child, self._heard, self._errors = child, heard, errors
        self._notes = b""
        self._words = b""

    def until_end(self, seconds: float) -> RankEnd:
        """Listen until the child has ended, or is ended."""
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
        """Take all that is there to be read."""
        waiting = seconds
        while ready := select.select([self._heard, self._errors], [], [], waiting)[0]:
            texts = {descriptor: os.read(descriptor, _MOST_WORDS) for descriptor in ready}
            self._notes += texts.get(self._heard, b"")
            words = texts.get(self._errors, b"")
            self._words = (self._words + words)[-_MOST_WORDS:]
            if words:
                os.write(2, words)
            if not any(texts.values()):  # the child has closed both
                time.sleep(seconds)
                return
            waiting = 0

    def _last_note(self) -> Any:
        """The last note that is complete."""
        rest, note = self._notes, None
        while len(rest) >= _SIZE_BYTES:
            size = int.from_bytes(rest[:_SIZE_BYTES], "little")
            text, rest = rest[_SIZE_BYTES : _SIZE_BYTES + size], rest[_SIZE_BYTES + size :]
            if len(text) == size:
                note = pickle.loads(text)
        return note
