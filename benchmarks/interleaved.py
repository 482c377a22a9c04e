"""Run training steps of several processes in alternation, one process at a time, so that their measurements are comparable.

The protocol is one JSON object per line. The process first describes itself (its version, its parameters). It then answers each
{"steps": n} with the fields of `Turn`. It sleeps while it waits for input, and exits when the input ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpctrain.bench.engine_step import Turn
from hpctrain.core.errors import HpctrainError
from hpctrain.launch.process_start import release

_TIMEOUT_SECONDS = 600.0
_TAIL = 2000
_PEER = Path(__file__).with_name("torch_peer.py")

#: maximum ratio of a variant's median time to the fastest one's after `SCREENING` rounds; slower variants are dropped
SCREENED_OUT = 1.25
SCREENING = 3


class SteppingError(HpctrainError):
    """A stepping process ended or did not answer. The message contains the end of its output."""


class Stepper:
    """Process that runs steps on request, until `close`. `environment` is complete; an answer takes at most `timeout_seconds`.

    Attributes:
        idle_cpu_seconds: CPU time that the process used between its turns.

    Raises:
        SteppingError: the process does not start.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, timeout_seconds: float = _TIMEOUT_SECONDS
    ) -> None:
        self.name, self._timeout_seconds = name, timeout_seconds
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        how = {"start_new_session": True, "preexec_fn": release}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, env=dict(environment), text=True, **how, **pipes)  # type: ignore[call-overload]
        self._cpu_after_seconds: float | None = None
        self.idle_cpu_seconds = 0.0
        try:
            self.facts: dict[str, Any] = self._answer()
        except SteppingError:
            self.close()
            raise

    def run(self, steps: int) -> Turn:
        """Run `steps` steps.

        Raises:
            SteppingError: the process failed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"steps": steps}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SteppingError(self._failure()) from None
        turn = Turn(**self._answer())
        if self._cpu_after_seconds is not None:
            self.idle_cpu_seconds += turn.cpu_before_seconds - self._cpu_after_seconds
        self._cpu_after_seconds = turn.cpu_after_seconds
        return turn

    def close(self) -> None:
        """End the process, and wait for its end."""
        if self._process.poll() is None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._timeout_seconds, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise SteppingError(self._failure())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> str:
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace")[-_TAIL:].strip()
        return f"The process {self.name!r} ended with code {code} instead of running steps; its output: {output or 'none'}"


@dataclass
class Series:
    """All turns of one variant, in rounds counted from 0.

    Attributes:
        failure: reason why the series stopped early; None without a failure.
        idle_cpu_seconds: CPU time that the process used during turns of other variants.
        dropped: whether the variant was dropped because it is much slower than the fastest.
    """

    name: str
    steps: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None
    first_seconds: float = 0.0
    idle_cpu_seconds: float = 0.0
    dropped: bool = False

    def seconds(self, clock: str) -> list[float]:
        """Return the seconds of a step in each round, by the clock "wall" or "cpu"."""
        return [(turn.wall_seconds if clock == "wall" else turn.cpu_seconds) / self.steps for turn in self.turns]

    def median(self, clock: str) -> float:
        """Return the median seconds of a step; infinity without turns."""
        seconds = self.seconds(clock)
        return float(np.median(seconds)) if seconds else float("inf")

    @property
    def peak_bytes(self) -> int:
        return max((turn.peak_bytes for turn in self.turns), default=0)


@dataclass(frozen=True)
class Rounds:
    """Number and length of rounds.

    Attributes:
        steps: number of steps of each variant in a round.
        warm_up: number of steps before the first round.
        clock: clock by which variants are screened: "wall" or "cpu".
    """

    rounds: int
    steps: int
    warm_up: int = 2
    clock: str = "wall"


def interleave(
    commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], rounds: Rounds, screened: Sequence[str] = ()
) -> dict[str, Series]:
    """Run all variants in turn, one process at a time. The order rotates from round to round.

    Args:
        commands: (command, environment) of each variant, by name.
        screened: names of variants among which only the fastest matters. Much slower variants are dropped after some rounds, and
            failures are recorded instead of raised.

    Raises:
        SteppingError: a process of a variant outside `screened` fails.
    """
    steppers: dict[str, Stepper] = {}
    series = {name: Series(name, rounds.steps) for name in commands}
    try:
        for name, (command, environment) in commands.items():
            with _noted(series[name], name in screened):
                steppers[name] = Stepper(name, command, environment)
                series[name].facts = steppers[name].facts
                series[name].first_seconds = steppers[name].run(1).wall_seconds
                steppers[name].run(max(1, rounds.warm_up - 1))
        for number in range(rounds.rounds):
            names, turn = list(steppers), number % max(1, len(steppers))
            for name in names[turn:] + names[:turn]:
                one = series[name]
                if one.failure is None and not one.dropped:
                    with _noted(one, name in screened):
                        one.turns.append(steppers[name].run(rounds.steps))
            if number + 1 == SCREENING < rounds.rounds:
                group = [series[name] for name in screened if name in series]
                best = min((one.median(rounds.clock) for one in group), default=0.0)
                for one in group:
                    if one.failure is None and one.median(rounds.clock) > SCREENED_OUT * best:
                        one.dropped = True
                        steppers[one.name].close()
        for name, stepper in steppers.items():
            series[name].idle_cpu_seconds = stepper.idle_cpu_seconds
    finally:
        for stepper in steppers.values():
            stepper.close()
    return series


@contextlib.contextmanager
def _noted(series: Series, forgiven: bool) -> Iterator[None]:
    """Record a variant's failure in its series instead of raising it, if `forgiven`."""
    try:
        yield
    except SteppingError as error:
        if not forgiven:
            raise
        series.failure = str(error)


def ours(settings: Mapping[str, Any]) -> list[str]:
    """Return the command of a process that runs steps of hpctrain's engine; `settings` are those of `engine_step.main`."""
    return [sys.executable, "-m", "hpctrain.bench.engine_step", json.dumps(dict(settings))]


def peer(python: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the command of a process that runs steps of PyTorch with the `settings` that `torch_peer.py` names."""
    return [python, str(_PEER), json.dumps(dict(settings))]


def with_threads(environment: Mapping[str, str], threads: int, **more: str) -> dict[str, str]:
    """Return a copy of the environment with the variables that set the number of threads, and the variables `more`."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**environment, **dict.fromkeys(names, str(threads)), **more}
