"""Rank 0's reporter: a rich progress bar on a terminal, one line per interval elsewhere, JSON lines always."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hpctrain.errors import ConfigError
from hpctrain.train.metrics import RunningSums
from hpctrain.train.run_directory import RunDirectory


class ConsoleReporter:
    """Writes for people on stdout and for programs into the run directory.

    Args:
        directory: receives metrics. interval_seconds: between two lines where there is no terminal. tensorboard: directory of
        TensorBoard files, or None. console: where to print. done_steps: of an earlier part of this run; TensorBoard hides what
        that wrote of later ones.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        interval_seconds: float = 10.0,
        tensorboard: Path | None = None,
        console: Console | None = None,
        done_steps: int = 0,
    ) -> None:
        self._console = console if console is not None else Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._directory = directory
        self._interval_seconds = interval_seconds
        self._board = _board(tensorboard, done_steps) if tensorboard is not None else None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._epochs = 0
        self._last_line = time.monotonic()

    def start(self, epochs: int, samples_per_epoch: int, done_samples: int) -> None:
        """Training begins, or goes on behind `done_samples`."""
        self._epochs = epochs
        self._samples = samples_per_epoch
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
                refresh_per_second=4,
            )
            self._progress.start()
            self._task = self._progress.add_task("training", total=epochs * samples_per_epoch, completed=done_samples, note="")

    def step(self, epoch: int, step: int, sums: RunningSums, lr: float, images_per_second: float) -> None:
        """Move the bar, or print a line when the interval is over."""
        now = time.monotonic()
        due = now - self._last_line >= self._interval_seconds
        if not sums.count or (self._progress is None and not due):
            return
        means = sums.means()
        note = f"loss {means['loss']:.4f}  top1 {means['top1']:.2%}  lr {lr:.4g}  {images_per_second:,.0f} images/s"
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task,
                description=f"epoch {epoch + 1}/{self._epochs}",
                completed=epoch * self._samples + sums.count,
                note=note,
            )
        if due:
            self._last_line = now
            self.record("interval", {"epoch": epoch, "step": step, **means, "lr": lr, "images_per_second": images_per_second})
            if self._progress is None:
                self.say(f"epoch {epoch + 1}/{self._epochs}  step {step}  {note}")

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line of metrics; numbers go to TensorBoard too."""
        self._directory.append_metrics({"kind": kind, "time": time.time(), **values})
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(f"{kind}/{name}", value, int(values.get("step", 0)))

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text)

    def close(self) -> None:
        """End the bar and the TensorBoard files; may be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._board is not None:
            self._board.close()
            self._board = None


def _board(directory: Path, done_steps: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "metrics.tensorboard is true, but tensorboardX is not installed; install hpctrain[export] or set it to false."
        ) from error
    return SummaryWriter(str(directory), purge_step=done_steps + 1 if done_steps else None)
