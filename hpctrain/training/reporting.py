"""Reporters of a run: the console and metrics of rank 0, and the log file of each rank.

The console shows a bar on a terminal, and prints one line per interval elsewhere. The metrics are JSON lines in a file.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.comm.progress import ProgressEngine
from hpctrain.core import log
from hpctrain.core.text import counted, duration_text, echo_block, fitting, loss_text, pipe_columns, wrapped
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import PatientRecords
from hpctrain.training.metrics import Reporter, RunningSums
from hpctrain.training.progress_bar import TimeLeft

if TYPE_CHECKING:
    from rich.console import Console

    from hpctrain.training.progress_bar import Advance, ProgressBar


# Environment variables that make rich treat any stream as a terminal.
_FORCING = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")

#: style of the progress display of a run
ProgressStyle = Literal["bar", "lines", "none"]


class ConsoleReporter(Reporter):
    """Reporter that prints progress to stdout, writes metrics to the run directory, and passes all events to other reporters.

    Args:
        directory: run directory, which receives the metrics. Metrics that its disk rejects are queued (see `PatientRecords`).
        interval_seconds: time between two records of progress, and between two lines if there is no bar. The first step and, if
            training ends within an epoch, the last one are always recorded.
        others: reporters that receive the same events; closed together with this one.
        console: console to print to; None: stdout.
        style: style of the progress display; None: a bar on a terminal, lines elsewhere; "none": only warnings are printed.
        clock: function that returns seconds.
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
        self.width = self._console.width if self._console.is_terminal else pipe_columns()
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
        """Report that training begins after `done_samples` samples and will end after `last_sample`, counted over all epochs."""
        self._epochs = epochs
        self._samples = samples_per_epoch
        self._left = TimeLeft(done_samples, last_sample, self._clock)
        begin = {"epochs": epochs, "samples": samples_per_epoch, "done_samples": done_samples, "last_sample": last_sample}
        self._metrics.add({"kind": "start", "time": time.time(), **begin})
        if self._style == "bar":
            from hpctrain.training.progress_bar import ProgressBar  # imports rich, which is slow

            assert not isinstance(self._console, Lines), "a bar requires a console"
            self._bar = ProgressBar(self._console)
            self._bar.begin("training", last_sample, done_samples)
        self._pass_on(lambda reporter: reporter.start(epochs, samples_per_epoch, done_samples, last_sample))

    def step(self, epoch: int, step: int, sums: RunningSums, lr: float, images_per_second: float) -> None:
        """Update the bar. At the first step and once per interval, record the step and, without a bar, print a line."""
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
        self._pass_on(lambda reporter: reporter.step(epoch, step, replace(sums), lr, images_per_second))

    def flush(self) -> None:
        self._record_step()
        self._pass_on(lambda reporter: reporter.flush())

    @contextmanager
    def evaluation(self, samples: int) -> Iterator[Advance]:
        """Show an evaluation of `samples` samples in the bar during the block. Without a bar only the result is reported."""
        if self._bar is None:
            with super().evaluation(samples) as advance:
                yield advance
        else:
            with self._bar.pass_over("evaluation", samples) as advance:
                yield advance

    def _record_step(self) -> None:
        """Record the latest step unless it is recorded already. In style "lines", print it as well."""
        record, self._unrecorded = self._unrecorded, None
        if record is None:
            return
        self.record("interval", record)
        if self._style == "lines":
            where, facts = self._facts(record)
            self.say(fitting([(0, where), (0, f"step {record['step']}"), *facts], self.width))

    def _facts(self, record: Mapping[str, Any]) -> tuple[str, list[tuple[int, str]]]:
        """Return the text for the epoch, and the facts of a step, each with its priority; 0 is the most important."""
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
        """Append a record to the metrics."""
        self._metrics.add({"kind": kind, "time": time.time(), **values})
        self._pass_on(lambda reporter: reporter.record(kind, copy.deepcopy(dict(values))))

    def say(self, text: str) -> None:
        """Print a line as `warn` does, unless the style is "none"; other reporters always receive it."""
        if self._style == "none":
            self._pass_on(lambda reporter: reporter.say(text))
        else:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a line above the bar in every style, wrapped to `width`. Other reporters receive it unwrapped."""
        self._bookkeeping.attempt("output", lambda: self._console.print(wrapped(text, self.width), markup=False))
        self._pass_on(lambda reporter: reporter.say(text))

    def close(self) -> None:
        """Close the bar, the metrics and the other reporters. Later calls have no effect."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._pass_on(lambda reporter: reporter.close())
        self._others = ()
        self._metrics.close()

    def _pass_on(self, call: Callable[[Reporter], None]) -> None:
        """Call the other reporters. A disk error in one of them does not end the run."""
        for reporter in self._others:
            self._bookkeeping.attempt(f"files of the reporter {type(reporter).__name__}", partial(call, reporter))


class Lines:
    """Console that prints lines unchanged to a stream other than a terminal.

    Unlike `PlainConsole`, it does not import rich, which is slow.
    """

    is_terminal, width = False, 0

    def print(self, text: str, *, markup: bool = False) -> None:
        echo_block(text)


def make_console(style: ProgressStyle | None) -> Console | Lines:
    """Return a console for stdout that truncates nothing.

    A requested bar is drawn even if stdout is not a terminal (under mpiexec).
    """
    if style != "bar" and not sys.stdout.isatty() and not any(name in os.environ for name in _FORCING):
        return Lines()
    from hpctrain.core.console import PlainConsole

    forced = True if style == "bar" else None
    return PlainConsole(file=sys.stdout, soft_wrap=True, force_terminal=forced)


_INTERVAL = "interval"


class LogReporter(Reporter):
    """Reporter that writes to this rank's log file only, never to the terminal.

    Args:
        progress: engine that measures how long this rank has waited for other ranks.
        interval_seconds: time between two lines about steps; the first step always has a line.
        clock: function that returns seconds.
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
        """Log a line once per interval: the step, its loss over all ranks, and this rank's waiting time."""
        self._steps += 1
        if self._last is None or self._clock() - self._last >= self._interval_seconds:
            self._log_step(epoch, step, sums)

    def _log_step(self, epoch: int, step: int, sums: RunningSums) -> None:
        now = self._clock()
        waited = self._progress.waited_seconds
        since = "" if self._last is None else f" of {now - self._last:.1f} s"
        _debug(
            f"epoch {epoch}, step {step}: loss {sums.means()['loss']:.6g}; "
            f"in {counted(self._steps, 'step')} this rank waited "
            f"{waited - self._waited_seconds:.3f} s{since} for other ranks"
        )
        self._last, self._steps, self._waited_seconds = now, 0, waited

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind != _INTERVAL:
            _debug(f"{kind}: {json.dumps(values, default=str)}")

    def say(self, text: str) -> None:
        _info(text)

    def close(self) -> None:
        _info("the run has ended on this rank")


def _info(text: str) -> None:
    log.tee(text, logging.INFO)


def _debug(text: str) -> None:
    log.tee(text, logging.DEBUG)
