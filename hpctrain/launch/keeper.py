"""The keeper, a small parent process that reports how its rank ended, and turns an unexplained end into a failure.

If a library ends a rank by `_exit(0)` inside a step, MPICH's launcher kills the other ranks and reports success. Launchers watch
only the process that they started, so that process becomes the keeper: it forks before MPI, NumPy and any thread exist, the child
becomes the rank, and the keeper sleeps until the child ends. The keeper inherits the launcher's descriptors, so the launcher
considers the rank alive until the keeper has reported. docs/adr/0005 compares this with alternatives.

Rank and keeper share counters in memory (`Pulse`): one counts the rank's heartbeats, the other the keeper's checks. A rank that
is stopped, or in which a library never releases the interpreter's lock, cannot notice anything itself; its keeper sees that the
rank's counter does not change. A stopped keeper can neither end the rank nor report its end; the rank's heartbeat sees that. Each
side counts its own checks instead of time, so the time for which a whole job including its keepers was suspended does not count.

`run_watched` runs a short job in a child instead, which leaves notes on its progress. The parent forwards the child's standard
error, keeps the end of it, and kills the child after a time limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

from hpctrain.core.text import escaped
from hpctrain.launch import shared_segments
from hpctrain.launch.control_groups import MemoryGroup
from hpctrain.launch.launcher import may_overlook_exit_codes, place_of, started_by
from hpctrain.launch.process_end import BUG, DEADLINE, FINISHED, SIGNALLED, STOPPED, USER_ERROR, End, flush_to_reader
from hpctrain.launch.processes import WatchedProcess, launchers, status_of

#: environment variable; 0 disables the fork, for example for a debugger that follows the process it started
SWITCH = "HPCTRAIN_KEEPER"

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: a child between its fork and its program must not load libraries

_LISTEN_SECONDS = 0.1
_MOST_WORDS = 1 << 14
_SIZE_BYTES = 8


def may_fork() -> bool:
    """Return whether this process may fork a rank: on Linux, before MPI starts, without threads, and unless SWITCH is 0.

    MPI does not survive a fork, and a forked child has only the thread that forked.
    """
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


_BEATS, _DEADLINE, _WATCHED, _KEEPER, _GUARDED, _ANNOUNCED = range(6)


class Pulse:
    """Counters shared by rank and keeper, and the deadline for which they may remain unchanged.

    It is created before the fork, and both processes write it.
    """

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._seen = self._keeper_seen = 0
        self._still_seconds = self._keeper_still_seconds = 0.0

    @property
    def deadline_seconds(self) -> float:
        """Deadline of the latest `watch`, also while the watch is paused; 0 before the first one."""
        return self._words[_DEADLINE] * 1e-9

    def watch(self, deadline_seconds: float) -> None:
        """Start the watch of the rank, whose counter must change within the deadline. Call this in the rank."""
        self._words[_BEATS] += 1
        self._words[_DEADLINE] = max(1, int(deadline_seconds * 1e9))
        self._words[_WATCHED] = 1

    def beat(self) -> None:
        """Count a beat of the heartbeat. Call this in the rank."""
        self._words[_BEATS] += 1

    def rest(self) -> None:
        """Pause the watch of the rank. Call this in the rank."""
        self._words[_WATCHED] = 0

    def guard(self, guarded: bool) -> None:
        """Note whether a timer, which needs no interpreter lock, will end the rank with exit code 1. Call this in the rank."""
        self._words[_GUARDED] = guarded

    @property
    def guarded(self) -> bool:
        """Whether the timer noted by `guard` is running, or has ended the rank."""
        return self._words[_GUARDED] != 0

    def announce_end(self) -> None:
        """Note that the rank is about to announce its end to the other ranks. Call this in the rank."""
        self._words[_ANNOUNCED] = 1

    @property
    def announced_end(self) -> bool:
        """Whether the rank has called `announce_end`."""
        return self._words[_ANNOUNCED] != 0

    def look(self, seconds: float) -> bool:
        """Return whether the rank's counter has not changed for the deadline; False while the watch is paused.

        Call this in the keeper, every `seconds`.
        """
        beats = self._words[_BEATS]
        if not self._words[_WATCHED] or beats != self._seen:
            self._seen, self._still_seconds = beats, 0.0
            return False
        self._still_seconds += seconds
        return self._still_seconds >= self.deadline_seconds

    def keep(self) -> None:
        """Count a check of the keeper. Call this in the keeper."""
        self._words[_KEEPER] += 1

    def look_at_keeper(self, seconds: float) -> bool:
        """Return whether the keeper's counter has not changed for the deadline; False without a keeper.

        Call this in the rank, every `seconds`.
        """
        beats = self._words[_KEEPER]
        if beats != self._keeper_seen or not beats:
            self._keeper_seen, self._keeper_still_seconds = beats, 0.0
            return False
        self._keeper_still_seconds += seconds
        return self._keeper_still_seconds >= self.deadline_seconds


# A rank that exits with one of these codes has printed the reason. A run stopped by a signal must also report that it finished:
# STOPPED promises a checkpoint, and jobs are requeued on it.
_EXPLAINED = (BUG, USER_ERROR, DEADLINE)
_FINISHED = b"."
_MESSAGE_BYTES = 1 << 14
_STOPPED = "T"
# A launcher that ends a whole job kills rank and keeper, in either order. Only a rank that was killed alone is reported.
_ALONE_SECONDS = 0.1
_LOOK_SECONDS = 1.0
_STACKS_SECONDS = 2.0
# Deadline of a rank that has not read its configuration yet.
_UNKNOWN_DEADLINE_SECONDS = 300.0
# After a whole job was suspended, a rank may wake at most this long before its keeper.
_WAKE_SECONDS = 5.0
# Maximum wait for a reader of standard error.
_SAY_SECONDS = 1.0

#: function that writes the end of a process into its flight record, unless the process did so itself, and returns whether it
#: wrote. Arguments: path of the record, number of the signal or exit code, kind of end, process ID.
Mark = Callable[[Path, int, End, int], bool]


@dataclass(frozen=True)
class Keeper:
    """The keeper from the rank's view.

    Attributes:
        sender: descriptor of a pipe to the keeper; None without a keeper.
        pulse: counters that show the keeper that the rank is alive.
    """

    sender: int | None = None
    pulse: Pulse = field(default_factory=Pulse)

    def record(self, path: Path | None) -> None:
        """Send the keeper the path of the rank's flight record, in which it marks the rank's end; None: there is no record."""
        if self.sender is not None:
            with contextlib.suppress(OSError):  # a program may have closed all descriptors
                os.write(self.sender, (b"" if path is None else os.fsencode(path.absolute())) + b"\n")

    def finished(self) -> None:
        """Notify the keeper that the rank's end needs no explanation.

        A keeper that stays stopped is killed, and this process with it.
        """
        if self.sender is not None:
            with contextlib.suppress(OSError):
                os.write(self.sender, _FINISHED)
                os.close(self.sender)
            if self.stays_stopped():
                self.end()

    def stays_stopped(self) -> bool:
        """Return whether the keeper remains stopped for a few seconds.

        If the whole job was suspended, the keeper resumes sooner.
        """
        end = time.monotonic() + _WAKE_SECONDS
        while self.sender is not None and (status := status_of(os.getppid())) is not None and status.state == _STOPPED:
            if time.monotonic() > end:
                return True
            time.sleep(_ALONE_SECONDS)
        return False

    def end(self) -> None:
        """Kill the keeper, and with it this process; the launcher then ends the job."""
        if self.sender is not None:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(_WAKE_SECONDS)


_OF_PROCESS: list[Keeper] = []


def current_keeper() -> Keeper:
    """Return the keeper of this process; without one, a keeper that ignores all calls."""
    return _OF_PROCESS[-1] if _OF_PROCESS else Keeper()


def keep(
    rank: int | None, held: frozenset[Signals], mark: Mark = lambda path, number, end, process: False, record: Path | None = None
) -> Keeper:
    """Fork; return the keeper in the child. The parent does not return.

    The process does not fork if it has threads, which the child would lack, if MPI has started, or if `SWITCH` is 0.

    Args:
        held: blocked signals, which the parent forwards.
        mark: function that writes the end of the child into its flight record, unless the child wrote it.
        record: path of the flight record until the child reports another one.
    """
    if not may_fork():
        return Keeper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    receiver, sender = os.pipe()
    pulse = Pulse()
    pulse.keep()
    # Before the fork: if the launcher ends meanwhile, the keeper has another parent, and would watch nothing.
    watched = launchers(started_by(os.environ).rank_variable)
    child = fork_child()
    if child:
        os.close(sender)
        _watch(_Rank(child, rank, receiver, pulse, mark, record, MemoryGroup.own(), watched), held)
    os.close(receiver)
    _OF_PROCESS.append(Keeper(sender, pulse))
    return current_keeper()


@dataclass(frozen=True)
class _Rank:
    """The rank from the keeper's view.

    Attributes:
        mark, record: those of `keep`.
        receiver: descriptor of the pipe from the rank.
    """

    process: int
    rank: int | None
    receiver: int
    pulse: Pulse
    mark: Mark
    record: Path | None
    memory: MemoryGroup
    launchers: Sequence[WatchedProcess]

    def words(self) -> tuple[Path | None, bool]:
        """Return the path of the rank's latest flight record, and whether the rank's end needs no explanation."""
        os.set_blocking(self.receiver, False)
        try:
            messages = os.read(self.receiver, _MESSAGE_BYTES)
        except BlockingIOError:  # a process forked by the rank still has the other end open
            messages = b""
        *records, last = messages.split(b"\n")
        latest = self.record if not records else Path(os.fsdecode(records[-1])) if records[-1] else None
        return latest, last == _FINISHED

    def mark_end(self, record: Path | None, number: int, end: End) -> bool | None:
        """Write the rank's end into its record. Return False if the rank had written it; None without a writable record."""
        with contextlib.suppress(OSError):
            return None if record is None else self.mark(record, number, end, self.process)
        return None

    def lost_launcher(self) -> WatchedProcess | None:
        """Check the launcher's processes; return one that has ended or was stopped for the deadline, otherwise None."""
        deadline_seconds = self.pulse.deadline_seconds or _UNKNOWN_DEADLINE_SECONDS
        for process in self.launchers:
            process.look(_LOOK_SECONDS)
        lost = (each for each in self.launchers if each.gone or each.stopped_seconds >= deadline_seconds)
        return next(lost, None)

    def place(self, record: Path | None) -> str:
        """Return a sentence with the path of the rank's record if no run directory contains it; otherwise ""."""
        return f" `hpctrain autopsy {record.parent}` has the record." if record is not None and record == self.record else ""


def _watch(child: _Rank, held: frozenset[Signals]) -> NoReturn:
    """Forward signals until the child ends. Then exit as it did, or with an error if its end is unexplained."""
    # `sigtimedwait` is unusable: if a stop interrupts it, CPython returns an invalid signal number.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    while True:
        received = signal.sigwaitinfo(held | {signal.SIGCHLD, signal.SIGALRM})
        looks = received.si_signo == signal.SIGALRM and received.si_code > 0  # sent by the timer, not by another process
        if not looks and received.si_signo != signal.SIGCHLD:
            os.kill(child.process, received.si_signo)
        ended, status = os.waitpid(child.process, os.WNOHANG)
        if ended:
            _leave_as(child, os.waitstatus_to_exitcode(status))
        if looks:
            child.pulse.keep()
            if child.pulse.look(_LOOK_SECONDS):
                _end_hung(child)
            lost = child.lost_launcher()
            if lost is not None:  # the launcher would neither forward the rank's output nor react to the end of any rank
                record, _ = child.words()
                os.kill(child.process, signal.SIGKILL)
                os.waitpid(child.process, 0)
                _leave_without_launcher(child, record, lost)


def _leave_as(child: _Rank, code: int) -> NoReturn:
    """Exit as the child did. `code` is its exit code or, if negative, the number of the signal that ended it."""
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
    if not finished and code not in _EXPLAINED and (lost := child.lost_launcher()) is not None and lost.gone:
        _leave_without_launcher(child, record, lost)  # MPI may notice first and call exit()
    marked = None if finished else child.mark_end(record, code, End.EXITED)
    # A rank that has neither joined the others nor announced its end by MPI must end in a way that they notice at once.
    alone = not child.pulse.deadline_seconds and not child.pulse.announced_end
    overlooked = alone and code not in (FINISHED, USER_ERROR, STOPPED, DEADLINE) and code < SIGNALLED
    if not finished and (code not in _EXPLAINED if marked is None else marked):
        cause = f"something called exit() in it.{child.place(record)}"
        _say(child.rank, f"the process exited with code {code} before the run was over: {cause}")
        code, overlooked = BUG if code in (FINISHED, STOPPED) else code, True
    _await_launcher(child, record)
    if overlooked and may_overlook_exit_codes(os.environ):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


def _end_hung(child: _Rank) -> NoReturn:
    """Kill a child that no longer responds. SIGABRT comes first: it prints the child's stacks if that is still possible."""
    record, _ = child.words()
    place = child.place(record)
    _say(child.rank, f"the process is stopped, or hangs without releasing Python's lock: it is killed at its deadline.{place}")
    os.kill(child.process, signal.SIGABRT)
    end = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < end and not os.waitpid(child.process, os.WNOHANG)[0]:
        time.sleep(_ALONE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.process, signal.SIGKILL)
    _await_launcher(child, record)
    os._exit(DEADLINE)


def _leave_without_launcher(child: _Rank, record: Path | None, lost: WatchedProcess) -> NoReturn:
    """Report that the launcher has ended or was stopped, and exit. The child has already ended."""
    child.mark_end(record, 0 if lost.gone else signal.SIGSTOP, End.LAUNCHER)
    how = "has ended" if lost.gone else f"was stopped for {lost.stopped_seconds:.0f} s"
    _say(
        child.rank, f"the launcher's process {lost.name} ({lost.number}) {how}: this rank is ended as well.{child.place(record)}"
    )
    if not lost.gone:
        _kill(lost)
    os._exit(DEADLINE)


def _await_launcher(child: _Rank, record: Path | None) -> None:
    """Wait while a launcher's process is stopped, and kill it after the deadline. Call this before the process exits.

    A stopped launcher would never notice the end of this process.
    """
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
    with contextlib.suppress(OSError):  # it belongs to another user, or has ended
        os.kill(process.number, signal.SIGKILL)


def _leave_by(number: Signals, child: _Rank, record: Path | None) -> NoReturn:
    """End by the signal that ended the child, so that launchers and shells see it.

    No core dump is written, as the child may have written one.
    """
    if number == signal.SIGKILL:
        time.sleep(_ALONE_SECONDS)
    crash = number in (Signals.SIGBUS, Signals.SIGSEGV)
    hint = child.memory.hint() if number == signal.SIGKILL else shared_segments.hint() if crash else ""
    _say(child.rank, f"the process was ended by {number.name}{hint} before the run was over.{child.place(record)}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _await_launcher(child, record)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    # Other held signals stay blocked: one that is pending, such as that of the timer, would end this process before `number`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(SIGNALLED + number)


def _say(rank: int | None, sentence: str) -> None:
    """Write a line on standard error, unless its pipe stays full, for example because the launcher is stopped."""
    with contextlib.suppress(OSError):
        writable = select.poll()
        writable.register(2, select.POLLOUT)
        if writable.poll(_SAY_SECONDS * 1e3):
            os.write(2, f"hpctrain: {place_of(rank)}{escaped(sentence)}\n".encode(errors="backslashreplace"))


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
    """Writer of notes to the parent's pipe `descriptor`. Each note replaces the previous one. None: notes are dropped."""

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

    The call returns in both processes. The child returns the exit code of `work` instead of exiting here, so that MPI notifies
    the launcher at its normal exit; otherwise the launcher would kill the other ranks. If the process may not fork (`may_fork`),
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
    end = _WatchedChild(child, notes_out, errors_out).until_end(seconds)
    return end.code if end.code in (FINISHED, USER_ERROR) else explain(end)


class _WatchedChild:
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
            self._listen(0 if ended else _LISTEN_SECONDS)
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
        """Wait at most `seconds` for notes or output, read all that are available, and forward the child's standard error."""
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
