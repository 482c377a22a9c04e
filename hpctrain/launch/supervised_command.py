"""A command that a supervisor runs: it is told of requests to stop once, and leaves no process behind.

The command is in a process group of its own, so that Ctrl-C at a terminal reaches the supervisor alone: launchers that get it
twice kill their ranks. Processes whose parent ends before them become children of the supervisor, which ends those that stay.
Where the supervisor is killed, the system sends the command SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals

from hpctrain.core.errors import LaunchError
from hpctrain.launch.exit_codes import SIGNALLED
from hpctrain.launch.signal_mask import HELD, STOPS, release
from hpctrain.launch.signals import AGAIN_SECONDS

#: the request that every launcher passes on to its ranks, and none takes for its own
PASSED_ON = Signals.SIGUSR1

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 1.0
# That a command may take to end at an interrupt, and those whose parent is gone to end by themselves.
_INTERRUPTED_SECONDS = 10.0
_ORPHAN_SECONDS = 20.0


class SupervisedCommand:
    """Runs one command after another. One per process, on the main thread, which has no others when it is made.

    Args:
        say: tells a person a sentence.

    Attributes:
        request: the signal that has asked for the end; None: none has.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.request: Signals | None = None
        self._say = say
        self._asked_at = self._kill_at = float("inf")
        self._libc = ctypes.CDLL(None)
        self._waited = frozenset(HELD)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def close(self) -> None:
        """Let signals do again what they did before."""
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        release()

    def run(self, words: Sequence[str]) -> int:
        """Run a command to its end; give its exit code, 128 + n where signal n has ended it.

        Raises:
            LaunchError: it cannot be started.
        """
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=self._prepare)
        except OSError as error:
            raise LaunchError(f"{words[0]} cannot be started: {error.strerror}.") from error
        try:
            while process.poll() is None:
                self._take(self._next(_LOOK_SECONDS), process.pid)
                if time.monotonic() >= self._kill_at:
                    self._kill_group(process.pid)
        finally:
            if process.poll() is None:
                self._kill_group(process.pid)
                process.wait()
            self._end_left_behind()
        return process.returncode if process.returncode >= 0 else SIGNALLED - process.returncode

    def pause(self, seconds: float) -> None:
        """Wait, until somebody asks for the end."""
        end = time.monotonic() + seconds
        while self.request is None and (left := end - time.monotonic()) > 0:
            self._take(self._next(min(left, _LOOK_SECONDS)), None)

    def _prepare(self) -> None:
        """In the command's process, before its program."""
        release()
        self._libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

    def _next(self, seconds: float) -> Signals | None:
        received = signal.sigtimedwait(self._waited, seconds)
        return None if received is None else Signals(received.si_signo)

    def _take(self, number: Signals | None, process: int | None) -> None:
        if number not in STOPS:
            return
        now = time.monotonic()
        if self.request is None:
            self.request, self._asked_at = number, now
            self._say(f"{number.name} received: the training saves and ends, and is not started again")
            self._send(process, PASSED_ON)
        elif number == Signals.SIGINT and now - self._asked_at >= AGAIN_SECONDS:
            self._say(f"{number.name} received again: the training ends at once")
            self._send(process, Signals.SIGINT)
            self._kill_at = min(self._kill_at, now + _INTERRUPTED_SECONDS)

    @staticmethod
    def _send(process: int | None, number: Signals) -> None:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    @staticmethod
    def _kill_group(process: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    def _end_left_behind(self) -> None:
        """Wait for processes of the command that have outlived it, and end those that stay for too long."""
        patience = 0.0 if time.monotonic() >= self._kill_at else _ORPHAN_SECONDS
        end = time.monotonic() + patience
        while children := _children():
            for child in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
            if time.monotonic() >= end:
                for child in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            self._take(self._next(0.05), None)


def _children() -> list[int]:
    """The processes whose parent this one is, zombies among them."""
    this, children = os.getpid(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == this:
                    children.append(int(entry.name))
    return children
