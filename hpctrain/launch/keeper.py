"""A small parent process that says how its rank ended, and turns an end without a word into a failure.

A rank that some library ends by `_exit(0)` inside a step leaves nothing behind: MPICH's launcher kills the other ranks and
reports success. Launchers count only the process that they have started, so that one becomes the keeper: it forks before MPI,
NumPy and any thread exist, the child becomes the rank, and the keeper sleeps until the child ends. As it inherits the launcher's
descriptors, the launcher takes the rank for alive until the keeper has spoken. docs/adr/0005 weighs it against other ways.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import NoReturn

from hpctrain.launch.exit_codes import BUG, DEADLINE, FINISHED, SIGNALLED, STOPPED, USER_ERROR
from hpctrain.launch.launcher import may_overlook_exit_codes, place_of
from hpctrain.launch.memory_group import MemoryGroup
from hpctrain.launch.pulse import Pulse
from hpctrain.launch.signals import HELD

#: 0 in the environment: no keeper, as for a debugger that follows the process it has started
SWITCH = "HPCTRAIN_KEEPER"

# A rank that leaves with these has said why. A run that a signal has stopped says that it has finished, too: STOPPED promises a
# checkpoint, and jobs are queued again on it.
_EXPLAINED = (BUG, USER_ERROR, DEADLINE)
_FINISHED = b"."
_MOST_SAID = 1 << 14
_PR_SET_PDEATHSIG = 1
# A launcher that ends a whole job kills rank and keeper, in either order; only of a rank that was killed alone is there news.
_ALONE_SECONDS = 0.1
_LOOK_SECONDS = 1.0
_STACKS_SECONDS = 2.0


@dataclass(frozen=True)
class Keeper:
    """The keeper, as its rank sees it.

    said: where the rank writes to; None: there is no keeper. pulse: by which the keeper sees that the rank lives.
    """

    said: int | None = None
    pulse: Pulse = field(default_factory=Pulse)

    def record(self, path: Path) -> None:
        """Say where the rank keeps its flight record: the keeper writes into it how the rank was ended."""
        if self.said is not None:
            os.write(self.said, os.fsencode(path.absolute()) + b"\n")

    def finished(self) -> None:
        """Say that the end of the rank needs no explanation."""
        if self.said is not None:
            os.write(self.said, _FINISHED)
            os.close(self.said)


_OF_PROCESS: list[Keeper] = []


def own() -> Keeper:
    """The keeper of this process; where it has none, one that hears nothing."""
    return _OF_PROCESS[-1] if _OF_PROCESS else Keeper()


def keep(
    rank: int | None,
    held: frozenset[Signals],
    mark: Callable[[Path, int], None] = lambda path, number: None,
    mark_left: Callable[[Path, int], None] = lambda path, code: None,
) -> Keeper:
    """Fork; in the child, return its keeper. The parent does not return.

    Without effect where the process has threads (a child would lack them), or MPI has started, or SWITCH is 0.

    Args:
        rank: of this process, None: unknown. held: signals that are blocked; the parent passes them on.
        mark: writes the signal that has ended the child into its flight record. mark_left: the exit code of one that has left
            without a word.
    """
    if not may_fork():
        return Keeper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    heard, said = os.pipe()
    pulse = Pulse()
    sys.stdout.flush()
    sys.stderr.flush()
    keeper = os.getpid()
    child = os.fork()
    if child:
        os.close(said)
        _watch(_Rank(child, rank, heard, pulse, mark, mark_left, MemoryGroup.own()), held)
    os.close(heard)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # no rank outlives its keeper
    if os.getppid() != keeper:
        os._exit(BUG)
    _OF_PROCESS.append(Keeper(said, pulse))
    return own()


def may_fork() -> bool:
    """True where a parent may be put before this process: MPI has not started in it, it has no threads, and SWITCH is not 0."""
    if os.environ.get(SWITCH) == "0" or "mpi4py.MPI" in sys.modules or sys.platform != "linux":
        return False
    return len(os.listdir("/proc/self/task")) == 1


@dataclass(frozen=True)
class _Rank:
    """The rank, as its keeper sees it.

    process: its number. heard: what it says. mark, mark_left: as `keep` takes them. memory: of the group that it runs in.
    """

    process: int
    rank: int | None
    heard: int
    pulse: Pulse
    mark: Callable[[Path, int], None]
    mark_left: Callable[[Path, int], None]
    memory: MemoryGroup

    def words(self) -> tuple[list[Path], bool]:
        """The flight records that it has told of, and whether its end needs no explanation."""
        os.set_blocking(self.heard, False)
        try:
            said = os.read(self.heard, _MOST_SAID)
        except BlockingIOError:  # a process that the rank has forked still holds the other end
            said = b""
        *records, last = said.split(b"\n")
        return [Path(os.fsdecode(path)) for path in records], last == _FINISHED


def _watch(child: _Rank, held: frozenset[Signals]) -> NoReturn:
    """Pass signals on until the child ends; then leave as it did, or with an error where it left without a word."""
    while True:
        received = signal.sigtimedwait(held | {signal.SIGCHLD}, _LOOK_SECONDS)
        if received is None:
            if child.pulse.look(_LOOK_SECONDS):
                _end_still(child)
        elif received.si_signo != signal.SIGCHLD:
            os.kill(child.process, received.si_signo)
        ended, status = os.waitpid(child.process, os.WNOHANG)
        if ended:
            break
    records, finished = child.words()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        for path in records[-1:]:
            with contextlib.suppress(OSError):
                child.mark(path, -code)
        _leave_by(Signals(-code), child)
    if not finished and code not in _EXPLAINED and code < SIGNALLED:
        for path in records[-1:]:
            with contextlib.suppress(OSError):
                child.mark_left(path, code)
        _say(child.rank, f"the process left with exit code {code} before the run was over: something called exit() in it.")
        code = BUG if code in (FINISHED, STOPPED) else code
        if may_overlook_exit_codes(os.environ):  # else the other ranks would wait for this one until their deadline
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


def _end_still(child: _Rank) -> NoReturn:
    """End a child that can do nothing itself: it prints its stacks where it can, which an abort asks for."""
    _say(child.rank, "the process is stopped, or hangs without letting go of Python's lock: it is ended, as its time is over.")
    os.kill(child.process, signal.SIGABRT)
    end = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < end and not os.waitpid(child.process, os.WNOHANG)[0]:
        time.sleep(_ALONE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.process, signal.SIGKILL)
    os._exit(DEADLINE)


def _leave_by(number: Signals, child: _Rank) -> NoReturn:
    """End as the child did, so that launchers and shells see the signal; the child has dumped core, if anybody should."""
    if number == signal.SIGKILL:
        time.sleep(_ALONE_SECONDS)
    hint = child.memory.hint() if number == signal.SIGKILL else ""
    _say(child.rank, f"the process was ended by {number.name}{hint} before the run was over.")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    os.kill(os.getpid(), number)
    os._exit(SIGNALLED + number)


def _say(rank: int | None, sentence: str) -> None:
    os.write(2, f"hpctrain: {place_of(rank)}{sentence}\n".encode())
