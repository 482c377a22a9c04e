"""Restarts of a training that fails: from its newest checkpoint, after growing pauses, without nodes that failed repeatedly.

`TrainCommand` finds the training in a command line and builds the command of the next attempt. `SupervisedCommand` runs a
command, forwards a request to stop once, and ends all its processes. The command has its own process group, so that Ctrl-C at a
terminal reaches only the supervisor: launchers that receive it twice kill their ranks. Processes whose parent ends before them
become children of the supervisor, which ends the remaining ones. If the supervisor is killed, the system sends SIGTERM to the
command. `Supervisor` decides after each attempt; it uses neither MPI nor files, since the caller runs attempts and reports their
outcomes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from hpctrain.core.errors import LaunchError
from hpctrain.launch.keeper import end_with_parent
from hpctrain.launch.process_end import FINISHED, SIGNALLED, STOPPED, USER_ERROR
from hpctrain.launch.process_start import HELD, STOPS, release
from hpctrain.launch.processes import status_of
from hpctrain.launch.signals import AGAIN_SECONDS

_PROGRAM, _TRAIN, _RESUME = "hpctrain", "train", "--resume"
_SRUN = "srun"
_EXCLUDE = ("--exclude", "-x")


@dataclass(frozen=True)
class TrainCommand:
    """Command line that starts a training.

    Attributes:
        train_at: index of the word `train`.
    """

    words: tuple[str, ...]
    train_at: int

    @classmethod
    def find(cls, words: Sequence[str]) -> TrainCommand:
        """Return the command, whose training is the word `train` after `hpctrain` or a path that ends in it.

        Raises:
            LaunchError: the command has no training, or several.
        """
        places = [place for place in range(1, len(words)) if words[place] == _TRAIN and Path(words[place - 1]).name == _PROGRAM]
        if len(places) != 1:
            found = "no training" if not places else f"{len(places)} trainings"
            raise LaunchError(
                f'The command "{" ".join(words)}" contains {found}; it must contain "hpctrain train FILE" exactly once, as in '
                "mpiexec -n 4 python -m mpi4py -m hpctrain train FILE."
            )
        return cls(tuple(words), places[0])

    @property
    def training(self) -> tuple[str, ...]:
        """Words after `train`: file, overrides and options."""
        return self.words[self.train_at + 1 :]

    @property
    def uses_srun(self) -> bool:
        """Whether Slurm's srun starts the command."""
        return Path(self.words[0]).name == _SRUN

    def resumed(self, run: Path) -> TrainCommand:
        """Return the command with `--resume` set to a run directory."""
        before, rest = self.words[: self.train_at + 1], _split(self.training, (_RESUME,))[0]
        return TrainCommand((*before, _RESUME, str(run), *rest), self.train_at)

    def excluding(self, nodes: Iterable[str]) -> TrainCommand:
        """Return the `srun` command with these nodes excluded, in addition to those that it already excludes."""
        others, given = _split(self.words[1 : self.train_at], _EXCLUDE)
        names = list(dict.fromkeys((*given, *nodes)))
        if not names:
            return self
        before = (self.words[0], f"{_EXCLUDE[0]}={','.join(names)}", *others)
        return TrainCommand((*before, *self.words[self.train_at :]), len(before))


def _split(words: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without these options, and the values of the options."""
    kept: list[str] = []
    values: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option not in options:
            kept.append(word)
        elif equals:
            values.append(value)
        else:
            values += [following for following in [next(rest, None)] if following is not None]
    return kept, values


#: signal that every launcher forwards to its ranks without acting on it itself
PASSED_ON = Signals.SIGUSR1

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 1.0
# Time limits for a command to end after an interrupt, and for orphaned processes to end by themselves.
_INTERRUPTED_SECONDS = 10.0
_ORPHAN_SECONDS = 20.0


def _is_broken(stream: int) -> bool:
    """Return whether a descriptor is a pipe without a reader. A launcher that writes to it ends by SIGPIPE, in each attempt."""
    pipe = select.poll()
    pipe.register(stream, 0)
    return bool(pipe.poll(0))


class SupervisedCommand:
    """Runner of commands, one after another. Create one per process, on the main thread, while there are no other threads.

    Args:
        say: callback with each clause for the user.

    Attributes:
        request: signal that requested the end; None if none did.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.request: Signals | None = None
        self._say = say
        self._requested_at = self._kill_at = float("inf")
        self._libc = ctypes.CDLL(None)
        self._waited = frozenset(HELD)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def close(self) -> None:
        """Restore the default effects of signals."""
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        release()

    def run(self, words: Sequence[str]) -> int:
        """Run a command to its end; return its exit code, or 128 + n if signal n ended it.

        Raises:
            LaunchError: the command cannot be started.
        """
        try:
            out, err = (subprocess.DEVNULL if _is_broken(stream) else None for stream in (1, 2))
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0, preexec_fn=self._prepare
            )
        except OSError as error:
            advice = "; check its path and permissions" if isinstance(error, FileNotFoundError | PermissionError) else ""
            raise LaunchError(f"Cannot start {words[0]} ({error.strerror}){advice}.") from error
        try:
            while process.poll() is None:
                self._take(self._next(_LOOK_SECONDS), process.pid)
                if time.monotonic() >= self._kill_at:
                    self._kill_group(process.pid)
        finally:
            if process.poll() is None:
                self._kill_group(process.pid)
                process.wait()
            self._end_remaining()
        return process.returncode if process.returncode >= 0 else SIGNALLED - process.returncode

    def pause(self, seconds: float) -> None:
        """Wait; return early if a signal requests the end."""
        end = time.monotonic() + seconds
        while self.request is None and (left := end - time.monotonic()) > 0:
            self._take(self._next(min(left, _LOOK_SECONDS)), None)

    def _prepare(self) -> None:
        """Unblock signals, and request SIGTERM at the supervisor's end. This runs in the command, between fork and exec."""
        release()
        end_with_parent(signal.SIGTERM)

    def _next(self, seconds: float) -> Signals | None:
        received = signal.sigtimedwait(self._waited, seconds)
        return None if received is None else Signals(received.si_signo)

    def _take(self, number: Signals | None, process: int | None) -> None:
        if number not in STOPS:
            return
        now = time.monotonic()
        if self.request is None:
            self.request, self._requested_at = number, now
            self._say(f"{number.name} received: the training saves a checkpoint and ends, and is not restarted")
            self._send(process, PASSED_ON)
        elif number == Signals.SIGINT and now - self._requested_at >= AGAIN_SECONDS:
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

    def _end_remaining(self) -> None:
        """Wait for processes that outlive the command, and kill those that exceed a time limit."""
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
    """Return the IDs of this process's children, including zombies."""
    numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [number for number in numbers if (status := status_of(number)) is not None and status.parent == os.getpid()]


LONGEST_PAUSE_SECONDS = 300.0
#: number of failures after which a node is excluded
_BAD = 2


@dataclass(frozen=True)
class RestartPolicy:
    """Rules for restarting a training.

    Attributes:
        restarts: maximum number of consecutive restarts without a new checkpoint.
        pause_seconds: first pause; doubled after each further failure without a new checkpoint, up to LONGEST_PAUSE_SECONDS.
        requeue: whether to restart also after STOPPED, the exit code of a run that a signal or the time limit has stopped.
        excludes: whether to exclude nodes that failed twice.
    """

    restarts: int
    pause_seconds: float = 5.0
    requeue: bool = False
    excludes: bool = False


@dataclass(frozen=True)
class AttemptOutcome:
    """Outcome of an attempt.

    Attributes:
        run: run directory of the attempt; None if there is none.
        checkpoint: newest checkpoint that the attempt wrote; None if it wrote none.
        step: last step; None if unknown.
        finding: first finding of the attempt's flight records.
        node: node of the ranks that the findings blame, if the job has several nodes; otherwise "".
    """

    run: Path | None = None
    checkpoint: Path | None = None
    step: int | None = None
    finding: str = ""
    node: str = ""


@dataclass(frozen=True)
class Attempt:
    """One start of the command.

    Attributes:
        begin, end: wall-clock times in seconds since the epoch.
        code: exit code.
        traces: outcome of the attempt, from the files that it left.
        excluded: nodes that the command excluded.
        next: action after the attempt, in words.
    """

    number: int
    words: tuple[str, ...]
    begin: float
    end: float
    code: int
    traces: AttemptOutcome
    excluded: tuple[str, ...]
    next: str

    def as_json(self) -> dict[str, Any]:
        """Return the attempt as plain values, for the file of attempts."""
        traces = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.traces).items()}
        times = {"begin": _clock(self.begin), "end": _clock(self.end)}
        return {"attempt": self.number, **times, "code": self.code, **traces, "next": self.next} | {
            "excluded": list(self.excluded),
            "command": list(self.words),
        }


class Supervisor:
    """Runner of a training, until it finishes, is asked to stop, cannot continue, or has failed too often.

    Args:
        look: function that returns the outcome of the latest attempt.
        keep: callback with each finished attempt.
        say: callback with each clause for the user.
    """

    def __init__(
        self,
        command: TrainCommand,
        rules: RestartPolicy,
        runner: SupervisedCommand,
        *,
        look: Callable[[], AttemptOutcome],
        keep: Callable[[Attempt], None],
        say: Callable[[str], None],
    ) -> None:
        self.attempts: list[Attempt] = []
        self._command, self._rules, self._runner = command, rules, runner
        self._look, self._keep, self._say = look, keep, say
        self._failures, self._node_failures = 0, Counter[str]()  # by node
        self._run: Path | None = None

    def run(self) -> int:
        """Run all attempts; return the exit code of the last one, or that of a signal during a pause."""
        while True:
            attempt, pause_seconds = self._attempt()
            self.attempts.append(attempt)
            self._keep(attempt)
            self._say(f"attempt {attempt.number} ended with exit code {attempt.code}: {attempt.next}")
            if pause_seconds is None:
                return attempt.code
            self._runner.pause(pause_seconds)
            if self._runner.request is not None:  # no attempt was running: the last checkpoint can be resumed
                return STOPPED if self._run is not None else SIGNALLED + self._runner.request

    def _attempt(self) -> tuple[Attempt, float | None]:
        """Start the command once; return the attempt, and the pause in seconds before the next one, or None if there is none."""
        excluded = self._excluded()
        words = self._words(excluded)
        begin = time.time()
        code = self._runner.run(words)
        end, traces = time.time(), self._look()
        if traces.checkpoint is not None:
            self._run = traces.run
        pause_seconds, reason = self._judge(code, traces)
        return Attempt(len(self.attempts) + 1, words, begin, end, code, traces, excluded, reason), pause_seconds

    def _excluded(self) -> tuple[str, ...]:
        return tuple(sorted(node for node, failures in self._node_failures.items() if failures >= _BAD))

    def _words(self, excluded: Sequence[str]) -> tuple[str, ...]:
        """Return the command of the next attempt. Without a checkpoint, the command is repeated unchanged."""
        command = self._command
        if self._run is not None:
            command = command.resumed(self._run)
        return command.excluding(excluded).words if excluded else command.words

    def _judge(self, code: int, traces: AttemptOutcome) -> tuple[float | None, str]:
        progress = traces.checkpoint is not None
        if code == FINISHED:
            return None, "done"
        if self._runner.request is not None:
            return None, f"stopped by {self._runner.request.name}"
        if code == USER_ERROR:
            return None, "its message says what to change; another start would fail the same way"
        if code == STOPPED and not self._rules.requeue:
            return None, "stopped with a checkpoint"
        if code == STOPPED and progress:
            self._failures = 0
            return 0.0, "stopped with a checkpoint; continues"
        return self._failed(traces, progress=progress)

    def _failed(self, traces: AttemptOutcome, *, progress: bool) -> tuple[float | None, str]:
        rules = self._rules
        self._failures = failures = 1 if progress else self._failures + 1
        if rules.excludes and traces.node:
            self._node_failures[traces.node] += 1
        if failures > rules.restarts:
            times = f"{failures} failures without a new checkpoint" if failures > 1 else "a failure"
            return None, f"given up after {times}"
        pause_seconds = min(LONGEST_PAUSE_SECONDS, rules.pause_seconds * 2 ** (failures - 1))
        without = f" without {', '.join(excluded)}" if (excluded := self._excluded()) else ""
        place = f"the newest checkpoint of {self._run}" if self._run is not None else "the beginning, as there is no checkpoint"
        return pause_seconds, f"restarts in {pause_seconds:g} s{without} from {place}"


def summary(attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each attempt."""
    lines = []
    for attempt in attempts:
        step = "no step" if not attempt.traces.step else f"step {attempt.traces.step}"
        finding = f"; {attempt.traces.finding}" if attempt.traces.finding else ""
        times = f"{_clock(attempt.begin)} to {_clock(attempt.end)}"
        lines.append(f"attempt {attempt.number}: {times}, exit code {attempt.code}, reached {step}{finding}")
    return lines


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
