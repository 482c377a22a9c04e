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
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import NoReturn

from hpctrain.launch.exit_codes import BUG, DEADLINE, FINISHED, SIGNALLED, STOPPED, USER_ERROR, End
from hpctrain.launch.launcher import may_overlook_exit_codes, place_of, started_by
from hpctrain.launch.memory_group import MemoryGroup
from hpctrain.launch.processes import WatchedProcess, launchers, status_of
from hpctrain.launch.pulse import Pulse
from hpctrain.launch.signals import HELD
from hpctrain.plain_text import escaped

#: 0 in the environment: no keeper, as for a debugger that follows the process it has started
SWITCH = "HPCTRAIN_KEEPER"

# A rank that leaves with these has said why. A run that a signal has stopped says that it has finished, too: STOPPED promises a
# checkpoint, and jobs are queued again on it.
_EXPLAINED = (BUG, USER_ERROR, DEADLINE)
_FINISHED = b"."
_MOST_SAID = 1 << 14
_PR_SET_PDEATHSIG = 1
_STOPPED = "T"
# A launcher that ends a whole job kills rank and keeper, in either order; only of a rank that was killed alone is there news.
_ALONE_SECONDS = 0.1
_LOOK_SECONDS = 1.0
_STACKS_SECONDS = 2.0
# Of a rank whose configuration has not been read, which has the deadline.
_UNKNOWN_DEADLINE_SECONDS = 300.0
# A suspended job may wake a rank before its keeper.
_WAKE_SECONDS = 5.0
# Where nobody reads standard error.
_SAY_SECONDS = 1.0

#: writes into a flight record how its process ended, unless that has written it itself: the record, the number of a signal or an
#: exit code, and the kind of end; True where it has written
Mark = Callable[[Path, int, End, int], bool]


@dataclass(frozen=True)
class Keeper:
    """The keeper, as its rank sees it.

    said: where the rank writes to; None: there is no keeper. pulse: by which the keeper sees that the rank lives.
    """

    said: int | None = None
    pulse: Pulse = field(default_factory=Pulse)

    def record(self, path: Path | None) -> None:
        """Say where the rank keeps its flight record: the keeper writes into it how the rank was ended. None: nowhere."""
        if self.said is not None:
            with contextlib.suppress(OSError):  # a program may close all descriptors
                os.write(self.said, (b"" if path is None else os.fsencode(path.absolute())) + b"\n")

    def finished(self) -> None:
        """Say that the end of the rank needs no explanation. A keeper that stays stopped is ended, and this process with it."""
        if self.said is not None:
            with contextlib.suppress(OSError):
                os.write(self.said, _FINISHED)
                os.close(self.said)
            if self.stays_stopped():
                self.end()

    def stays_stopped(self) -> bool:
        """Whether the keeper is stopped, and not woken within seconds, as after the suspension of a whole job."""
        end = time.monotonic() + _WAKE_SECONDS
        while self.said is not None and (status := status_of(os.getppid())) is not None and status.state == _STOPPED:
            if time.monotonic() > end:
                return True
            time.sleep(_ALONE_SECONDS)
        return False

    def end(self) -> None:
        """End the keeper, and with it this process: the launcher learns of that, and ends the job."""
        if self.said is not None:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(_WAKE_SECONDS)


_OF_PROCESS: list[Keeper] = []


def own() -> Keeper:
    """The keeper of this process; where it has none, one that hears nothing."""
    return _OF_PROCESS[-1] if _OF_PROCESS else Keeper()


def _mark_nothing(path: Path, number: int, end: End, process: int) -> bool:
    return False


def keep(rank: int | None, held: frozenset[Signals], mark: Mark = _mark_nothing, record: Path | None = None) -> Keeper:
    """Fork; in the child, return its keeper. The parent does not return.

    Without effect where the process has threads (a child would lack them), or MPI has started, or SWITCH is 0.

    Args:
        rank: of this process, None: unknown. held: signals that are blocked; the parent passes them on.
        mark: writes the end of the child into its flight record, as far as the child has not.
        record: where the child keeps it until it says another place.
    """
    if not may_fork():
        return Keeper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    heard, said = os.pipe()
    pulse = Pulse()
    pulse.keep()
    sys.stdout.flush()
    sys.stderr.flush()
    keeper = os.getpid()
    child = os.fork()
    if child:
        os.close(said)
        watched = launchers(started_by(os.environ).rank_variable)
        _watch(_Rank(child, rank, heard, pulse, mark, record, MemoryGroup.own(), watched), held)
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

    process: its number. heard: what it says. mark, record: as `keep` takes them. memory: of the group that it runs in.
    launchers: processes of the launcher on this node.
    """

    process: int
    rank: int | None
    heard: int
    pulse: Pulse
    mark: Mark
    record: Path | None
    memory: MemoryGroup
    launchers: Sequence[WatchedProcess]

    def words(self) -> tuple[Path | None, bool]:
        """Its latest flight record, and whether its end needs no explanation."""
        os.set_blocking(self.heard, False)
        try:
            said = os.read(self.heard, _MOST_SAID)
        except BlockingIOError:  # a process that the rank has forked still holds the other end
            said = b""
        *records, last = said.split(b"\n")
        latest = self.record if not records else Path(os.fsdecode(records[-1])) if records[-1] else None
        return latest, last == _FINISHED

    def mark_end(self, record: Path | None, number: int, end: End) -> bool | None:
        """Write its end into its record; False where it had done so itself, None where there is no record."""
        with contextlib.suppress(OSError):
            return None if record is None else self.mark(record, number, end, self.process)
        return None

    def lost_launcher(self) -> WatchedProcess | None:
        """Look at the processes of the launcher; the one that has ended, or has been stopped for the deadline."""
        deadline_seconds = self.pulse.deadline_seconds or _UNKNOWN_DEADLINE_SECONDS
        for process in self.launchers:
            process.look(_LOOK_SECONDS)
        lost = (each for each in self.launchers if each.gone or each.stopped_seconds >= deadline_seconds)
        return next(lost, None)

    def place(self, record: Path | None) -> str:
        """A sentence on where its record lies, as long as it has no run directory."""
        return f" `hpctrain autopsy {record.parent}` has the record." if record is not None and record == self.record else ""


def _watch(child: _Rank, held: frozenset[Signals]) -> NoReturn:
    """Pass signals on until the child ends; then leave as it did, or with an error where it left without a word."""
    # Not by `sigtimedwait`: CPython returns a number that no signal has where a stop interrupts it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    while True:
        received = signal.sigwaitinfo(held | {signal.SIGCHLD, signal.SIGALRM})
        looks = received.si_signo == signal.SIGALRM and received.si_code > 0  # of the timer, not of another process
        if not looks and received.si_signo != signal.SIGCHLD:
            os.kill(child.process, received.si_signo)
        ended, status = os.waitpid(child.process, os.WNOHANG)
        if ended:
            _leave_as(child, os.waitstatus_to_exitcode(status))
        if looks:
            child.pulse.keep()
            if child.pulse.look(_LOOK_SECONDS):
                _end_still(child)
            lost = child.lost_launcher()
            if lost is not None:
                _end_without_launcher(child, lost)


def _leave_as(child: _Rank, code: int) -> NoReturn:
    """Leave as the child has left, with an exit code or, negative, by a signal."""
    record, finished = child.words()
    if code == BUG and child.pulse.guarded:
        _say(child.rank, f"the process was ended at its deadline, in a call that holds Python's lock.{child.place(record)}")
        code = DEADLINE
    if code < 0:
        child.mark_end(record, -code, End.SIGNAL)
        _leave_by(Signals(-code), child, record)
    if code == DEADLINE or code > SIGNALLED:
        number, end = (0, End.DEADLINE) if code == DEADLINE else (code - SIGNALLED, End.SIGNAL)
        child.mark_end(record, number, end)
        finished = True
    marked = None if finished else child.mark_end(record, code, End.LEFT)
    # One that has met no other rank, and told none by MPI, must end as these learn of it, instead of at their deadline.
    alone = not child.pulse.deadline_seconds and not child.pulse.told
    overlooked = alone and code not in (FINISHED, USER_ERROR, STOPPED, DEADLINE) and code < SIGNALLED
    if not finished and (code not in _EXPLAINED if marked is None else marked):
        cause = f"something called exit() in it.{child.place(record)}"
        _say(child.rank, f"the process left with exit code {code} before the run was over: {cause}")
        code, overlooked = BUG if code in (FINISHED, STOPPED) else code, True
    _await_launcher(child, record)
    if overlooked and may_overlook_exit_codes(os.environ):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


def _end_still(child: _Rank) -> NoReturn:
    """End a child that can do nothing itself: it prints its stacks where it can, which an abort asks for."""
    record, _ = child.words()
    place = child.place(record)
    _say(
        child.rank,
        f"the process is stopped, or hangs without letting go of Python's lock: it is ended, as its time is over.{place}",
    )
    os.kill(child.process, signal.SIGABRT)
    end = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < end and not os.waitpid(child.process, os.WNOHANG)[0]:
        time.sleep(_ALONE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.process, signal.SIGKILL)
    _await_launcher(child, record)
    os._exit(DEADLINE)


def _end_without_launcher(child: _Rank, lost: WatchedProcess) -> NoReturn:
    """End a child of which no launcher would learn: neither its output nor its end, nor the end of other ranks."""
    record, _ = child.words()
    os.kill(child.process, signal.SIGKILL)
    os.waitpid(child.process, 0)
    child.mark_end(record, 0 if lost.gone else signal.SIGSTOP, End.LAUNCHER)
    how = "has ended" if lost.gone else f"was stopped for {lost.stopped_seconds:.0f} s"
    _say(child.rank, f"the launcher's process {lost.name} ({lost.number}) {how}: this rank is ended, too.{child.place(record)}")
    if not lost.gone:
        _kill(lost)
    os._exit(DEADLINE)


def _await_launcher(child: _Rank, record: Path | None) -> None:
    """Before this process ends: end a launcher's process that stays stopped for the deadline, and would never learn of it."""
    while (lost := child.lost_launcher()) is None and any(process.stopped_seconds for process in child.launchers):
        time.sleep(_LOOK_SECONDS)
    if lost is not None and not lost.gone:
        child.mark_end(record, signal.SIGSTOP, End.LAUNCHER)
        _say(
            child.rank,
            f"the launcher's process {lost.name} ({lost.number}) was stopped for {lost.stopped_seconds:.0f} s: it is ended.",
        )
        _kill(lost)


def _kill(process: WatchedProcess) -> None:
    with contextlib.suppress(OSError):  # another user's, or gone
        os.kill(process.number, signal.SIGKILL)


def _leave_by(number: Signals, child: _Rank, record: Path | None) -> NoReturn:
    """End as the child did, so that launchers and shells see the signal; the child has dumped core, if anybody should."""
    if number == signal.SIGKILL:
        time.sleep(_ALONE_SECONDS)
    hint = child.memory.hint() if number == signal.SIGKILL else ""
    _say(child.rank, f"the process was ended by {number.name}{hint} before the run was over.{child.place(record)}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _await_launcher(child, record)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    os.kill(os.getpid(), number)
    os._exit(SIGNALLED + number)


def _say(rank: int | None, sentence: str) -> None:
    """Write a line on standard error, unless nobody reads it: a launcher that is stopped leaves its pipes full."""
    with contextlib.suppress(OSError):
        writable = select.poll()
        writable.register(2, select.POLLOUT)
        if writable.poll(_SAY_SECONDS * 1e3):
            os.write(2, f"hpctrain: {place_of(rank)}{escaped(sentence)}\n".encode(errors="backslashreplace"))
