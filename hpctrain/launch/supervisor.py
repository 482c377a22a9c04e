"""Starts a training again where it fails: from its newest checkpoint, after a pause that grows, on other nodes where one is bad.

Knows no MPI and no files: how an attempt is run, and what it has left, are told by others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

from hpctrain.launch.exit_codes import FINISHED, SIGNALLED, STOPPED, USER_ERROR
from hpctrain.launch.train_command import TrainCommand

LONGEST_PAUSE_SECONDS = 300.0
#: failures after which a node is left out
_BAD = 2


class Runner(Protocol):
    """Runs commands; as `SupervisedCommand` does."""

    request: Signals | None

    def run(self, words: Sequence[str]) -> int: ...

    def pause(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class Rules:
    """The restarts after failures between which no checkpoint was written, and the first pause; further ones double.

    requeue: go on after exit code 85, too. excludes: leave out nodes that failed twice.
    """

    restarts: int
    pause_seconds: float = 5.0
    requeue: bool = False
    excludes: bool = False


@dataclass(frozen=True)
class Traces:
    """The traces of an attempt. run: its directory. checkpoint: the newest one that it has written. None: there is none.

    finding: the first one of its flight records. node: that of the ranks that these blame, where it is one of several; or "".
    """

    run: Path | None = None
    checkpoint: Path | None = None
    step: int | None = None
    finding: str = ""
    node: str = ""


@dataclass(frozen=True)
class Attempt:
    """One start of the command. begin, end: seconds of the wall clock. excluded: nodes left out. next: what followed."""

    number: int
    words: tuple[str, ...]
    begin: float
    end: float
    code: int
    traces: Traces
    excluded: tuple[str, ...]
    next: str

    def as_json(self) -> dict[str, Any]:
        """For the file of attempts."""
        traces = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.traces).items()}
        times = {"begin": _clock(self.begin), "end": _clock(self.end)}
        return {"attempt": self.number, **times, "code": self.code, **traces, "next": self.next} | {
            "excluded": list(self.excluded),
            "command": list(self.words),
        }


@dataclass
class _State:
    """The knowledge from all attempts so far."""

    failures: int = 0
    run: Path | None = None
    bad: Counter[str] = field(default_factory=Counter)

    @property
    def excluded(self) -> tuple[str, ...]:
        return tuple(sorted(node for node, failures in self.bad.items() if failures >= _BAD))


class Supervisor:
    """Runs a training until it is done, is asked to stop, cannot go on, or has failed too often.

    Args:
        look: what the latest attempt has left. keep: is given each attempt. say: tells a person a sentence.

    Attributes:
        attempts: all so far.
    """

    def __init__(
        self,
        command: TrainCommand,
        rules: Rules,
        runner: Runner,
        *,
        look: Callable[[], Traces],
        keep: Callable[[Attempt], None],
        say: Callable[[str], None],
    ) -> None:
        self.attempts: list[Attempt] = []
        self._command, self._rules, self._runner = command, rules, runner
        self._look, self._keep, self._say = look, keep, say
        self._state = _State()

    def run(self) -> int:
        """All attempts; give the exit code of the last one, or that of a signal in a pause."""
        while True:
            attempt, pause_seconds = self._attempt()
            self.attempts.append(attempt)
            self._keep(attempt)
            self._say(f"attempt {attempt.number} ended with exit code {attempt.code}: {attempt.next}")
            if pause_seconds is None:
                return attempt.code
            self._runner.pause(pause_seconds)
            if self._runner.request is not None:  # nothing ran: what was saved is there to go on from
                return STOPPED if self._state.run is not None else SIGNALLED + self._runner.request

    def _attempt(self) -> tuple[Attempt, float | None]:
        """One start; and the pause before the next one, None where there is to be none."""
        excluded = self._state.excluded
        words = self._words(excluded)
        begin = time.time()
        code = self._runner.run(words)
        end, traces = time.time(), self._look()
        if traces.checkpoint is not None:
            self._state.run = traces.run
        pause_seconds, reason = self._judge(code, traces)
        return Attempt(len(self.attempts) + 1, words, begin, end, code, traces, excluded, reason), pause_seconds

    def _words(self, excluded: Sequence[str]) -> tuple[str, ...]:
        """The command for the next attempt. One that has written no checkpoint is repeated as it was given."""
        command = self._command
        if self._state.run is not None:
            command = command.resumed(self._state.run)
        return command.excluding(excluded).words if excluded else command.words

    def _judge(self, code: int, traces: Traces) -> tuple[float | None, str]:
        progress = traces.checkpoint is not None
        if code == FINISHED:
            return None, "done"
        if self._runner.request is not None:
            return None, f"stopped by {self._runner.request.name}"
        if code == USER_ERROR:
            return None, "its own words say what to mend; another start would fail alike"
        if code == STOPPED and not self._rules.requeue:
            return None, "stopped with a checkpoint"
        if code == STOPPED and progress:
            self._state.failures = 0
            return 0.0, "stopped with a checkpoint, and goes on"
        return self._failed(traces, progress=progress)

    def _failed(self, traces: Traces, *, progress: bool) -> tuple[float | None, str]:
        state, rules = self._state, self._rules
        state.failures = 1 if progress else state.failures + 1
        if rules.excludes and traces.node:
            state.bad[traces.node] += 1
        if state.failures > rules.restarts:
            times = f"{state.failures} failures without a new checkpoint" if state.failures > 1 else "a failure"
            return None, f"given up after {times}"
        pause_seconds = min(LONGEST_PAUSE_SECONDS, rules.pause_seconds * 2 ** (state.failures - 1))
        without = f" without {', '.join(state.excluded)}" if state.excluded else ""
        place = f"the newest checkpoint of {state.run}" if state.run is not None else "the beginning, as there is no checkpoint"
        return pause_seconds, f"starts again in {pause_seconds:g} s{without} from {place}"


def summary(attempts: Sequence[Attempt]) -> list[str]:
    """Lines that tell of all attempts."""
    lines = []
    for attempt in attempts:
        step = "no step" if not attempt.traces.step else f"step {attempt.traces.step}"
        finding = f"; {attempt.traces.finding}" if attempt.traces.finding else ""
        times = f"{_clock(attempt.begin)} to {_clock(attempt.end)}"
        lines.append(f"attempt {attempt.number}: {times}, exit code {attempt.code}, reached {step}{finding}")
    return lines


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
