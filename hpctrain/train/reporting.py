"""Reporters of a run: rank 0's console and metrics, and the log file of each rank.

On a terminal there is a bar, elsewhere one line per interval; JSON lines are always written.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.comm.progress import ProgressEngine
from hpctrain.core import log
from hpctrain.core.text import LOG_COLUMNS, duration_text, echo_block, fitting, loss_text
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import PatientRecords
from hpctrain.train.metrics import Reporter, RunningSums
from hpctrain.train.progress_bar import TimeLeft

if TYPE_CHECKING:
    from rich.console import Console

    from hpctrain.train.progress_bar import Advance, ProgressBar


# With one of these environment variables, rich treats a stream that is no terminal as one.
_FORCING = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")

#: how a run shows where it is
ProgressStyle = Literal["bar", "lines", "none"]


class ConsoleReporter(Reporter):
    """Writes for people on stdout and for programs into the run directory, and passes on what happens to other reporters.

    Args:
        directory: receives metrics; where its disk refuses them, they wait (see `Bookkeeping`).
        interval_seconds: between two records of progress, and between two lines where there is no bar; the first step and the
            last always have one. others: reporters that receive the same; they are closed with it.
        console: where to print.
        style: None: a bar on a terminal, lines elsewhere. clock: in seconds.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        interval_seconds: float = 10.0,
        others: Sequence[Reporter] = (),
        console: Console | Lines | None = None,
        style: ProgressStyle | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console if console is not None else make_console(style)
        self._style = style or ("bar" if self._console.is_terminal else "lines")
        self.width = self._console.width if self._console.is_terminal else None
        self._bookkeeping = directory.bookkeeping
        self._metrics = PatientRecords(self._bookkeeping, "metrics", directory.append_metrics)
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._others = tuple(others)
        self._bar: ProgressBar | None = None
        self._epochs = self._samples = 0
        self._left = TimeLeft(0, 0, clock)
        self._last_record: float | None = None
        self._unrecorded: dict[str, Any] | None = None

    def start(self, epochs: int, samples_per_epoch: int, done_samples: int, last_sample: int) -> None:
        """Report that training begins after `done_samples`; it will end after `last_sample`, counted over all epochs."""
        self._epochs = epochs
        self._samples = samples_per_epoch
        self._left = TimeLeft(done_samples, last_sample, self._clock)
        begin = {"epochs": epochs, "samples": samples_per_epoch, "done_samples": done_samples, "last_sample": last_sample}
        self._metrics.add({"kind": "start", "time": time.time(), **begin})
        if self._style == "bar":
            from hpctrain.train.progress_bar import ProgressBar  # here: it loads rich, for runs that draw a bar

            assert not isinstance(self._console, Lines), "a bar has a console"
            self._bar = ProgressBar(self._console, self._clock)
            self._bar.begin("training", last_sample, done_samples)
        self._pass_on(lambda reporter: reporter.start(epochs, samples_per_epoch, done_samples, last_sample))

    def step(self, epoch: int, step: int, sums: RunningSums, lr: float, images_per_second: float) -> None:
        """Move the bar; record, and print a line where there is no bar, at first and when the interval is over."""
        means = sums.means()
        record = {"epoch": epoch, "step": step, "images": sums.count, **means, "lr": lr, "images_per_second": images_per_second}
        self._unrecorded = record
        if self._bar is not None:
            where, facts = self._facts(record)
            self._bar.show(where, (epoch - 1) * self._samples + sums.count, facts)
        now = self._clock()
        if self._last_record is None or now - self._last_record >= self._interval_seconds:
            self._last_record = now
            self._record_step()
        self._pass_on(lambda reporter: reporter.step(epoch, step, sums, lr, images_per_second))

    def flush(self) -> None:
        self._record_step()
        self._pass_on(lambda reporter: reporter.flush())

    @contextmanager
    def evaluation(self, samples: int) -> Iterator[Advance]:
        """Show an evaluation of `samples` samples in the bar during the block; without a bar only its result is reported."""
        if self._bar is None:
            with super().evaluation(samples) as advance:
                yield advance
        else:
            with self._bar.pass_over("evaluation", samples) as advance:
                yield advance

    def _record_step(self) -> None:
        """Record, and print where there are lines, the latest step unless that has been done."""
        record, self._unrecorded = self._unrecorded, None
        if record is None:
            return
        self.record("interval", record)
        if self._style == "lines":
            where, facts = self._facts(record)
            self.say(fitting([(0, where), (0, f"step {record['step']}"), *facts], LOG_COLUMNS))

    def _facts(self, record: Mapping[str, Any]) -> tuple[str, list[tuple[int, str]]]:
        """Return the epoch, and the facts of a step, each with its rank: 0 is the most important."""
        seconds = self._left.seconds((record["epoch"] - 1) * self._samples + record["images"])
        facts = [
            (0, f"loss {loss_text(record['loss'])}"),
            (2, f"top1 {record['top1']:.2%}"),
            (4, f"lr {record['lr']:.4g}"),
            (3, f"{record['images_per_second']:,.0f} images/s"),
        ]
        if seconds is not None:
            facts.append((1, f"{duration_text(seconds)} left"))
        return f"epoch {record['epoch']}/{self._epochs}", facts

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        self._metrics.add({"kind": kind, "time": time.time(), **values})
        self._pass_on(lambda reporter: reporter.record(kind, values))

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._bookkeeping.attempt("output", lambda: self._console.print(text, markup=False))
        self._pass_on(lambda reporter: reporter.say(text))

    def close(self) -> None:
        """End the bar and close the other reporters; may be called twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._pass_on(lambda reporter: reporter.close())
        self._others = ()
        self._metrics.close()

    def _pass_on(self, call: Callable[[Reporter], None]) -> None:
        """Call the other reporters; a disk that refuses what they write ends nothing."""
        for reporter in self._others:
            self._bookkeeping.attempt(f"files of the reporter {type(reporter).__name__}", partial(call, reporter))


class Lines:
    """Print lines unchanged to a stream that is no terminal, without the forty modules that `PlainConsole` loads."""

    is_terminal, width = False, 0

    def print(self, text: str, *, markup: bool = False) -> None:
        echo_block(text)


def make_console(style: ProgressStyle | None) -> Console | Lines:
    """Return stdout, where nothing is cut; a requested bar is drawn even if stdout is no terminal (under mpiexec)."""
    if style != "bar" and not sys.stdout.isatty() and not any(name in os.environ for name in _FORCING):
        return Lines()
    from hpctrain.core.console import PlainConsole

    forced = True if style == "bar" else None
    return PlainConsole(file=sys.stdout, soft_wrap=True, force_terminal=forced)


_INTERVAL = "interval"


class LogReporter(Reporter):
    """Logs for this rank's file alone; nothing of it reaches the terminal.

    Args:
        progress: knows how long this rank has waited for others.
        interval_seconds: between two lines on steps; the first step has one. clock: in seconds.
    """

    def __init__(
        self, progress: ProgressEngine, *, interval_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._interval_seconds, self._clock = progress, interval_seconds, clock
        self._last: float | None = None
        self._steps = 0
        self._waited_seconds = 0.0

    def start(self, epochs: int, samples_per_epoch: int, done_samples: int, last_sample: int) -> None:
        self._waited_seconds = self._progress.waited_seconds
        _info(f"training begins, {done_samples:,} of {last_sample:,} samples are done")

    def step(self, epoch: int, step: int, sums: RunningSums, lr: float, images_per_second: float) -> None:
        """Log a line where the interval is over: the step, its loss over all ranks, and this rank's share of waiting."""
        self._steps += 1
        if self._last is None or self._clock() - self._last >= self._interval_seconds:
            self._log_step(epoch, step, sums)

    def _log_step(self, epoch: int, step: int, sums: RunningSums) -> None:
        now = self._clock()
        waited = self._progress.waited_seconds
        since = "" if self._last is None else f" of {now - self._last:.1f} s"
        _debug(
            f"epoch {epoch}, step {step}: loss {sums.means()['loss']:.6g}; in {self._steps} "
            f"{'step' if self._steps == 1 else 'steps'} this rank waited {waited - self._waited_seconds:.3f} s{since} for others"
        )
        self._last, self._steps, self._waited_seconds = now, 0, waited

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind != _INTERVAL:
            _debug(f"{kind}: {json.dumps(values, default=str)}")

    def say(self, text: str) -> None:
        _info(text)

    def close(self) -> None:
        _info("the run is over on this rank")


def _info(text: str) -> None:
    log.tee(text, logging.INFO)


def _debug(text: str) -> None:
    log.tee(text, logging.DEBUG)
