"""Whole runs in this process, on one rank: with an evaluation that says what a test wants, and an end wherever it wants one."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpctrain.training.metrics import RunningSums
from hpctrain.training.replica import Replica
from tests.support import tiny_runs
from tests.support.runs import train_virtual

SAMPLES, BATCH = 10, 4

STEPS_PER_EPOCH = 3

TEST_SAMPLES = 20

CONFIG = tiny_runs.tiny(
    f"model: {{name: small, channels: [2], hidden: 3}}, batch: {BATCH}, threads: 1, progress: none, flight: none, "
    "data: {train: FOLDER/train.h5, test: FOLDER/test.h5, prefetch: 0}, metrics: {interval_seconds: 1.0e+9}, output: FOLDER/runs"
)


class Killed(BaseException):
    """The end of a run at a step: nothing of the program catches it."""


def prepare(folder: Path) -> None:
    """A configuration and two small data files."""
    tiny_runs.prepare(folder, CONFIG, SAMPLES, TEST_SAMPLES, (7, 6, 1))


def train(folder: Path, *overrides: str, resume: str | None = None, steps: int = 0) -> None:
    """`hpctrain train tiny.yaml OVERRIDES --resume RESUME --steps STEPS`, but for signals."""
    train_virtual(1, folder / "tiny.yaml", *overrides, resume=resume, steps=steps)


@contextmanager
def disturbed(evaluation: Callable[[int], RunningSums], before_step: Callable[[int], None] = lambda step: None) -> Iterator[None]:
    """While this lasts, evaluations give `evaluation` of the steps done, and `before_step` is called with them first."""
    update = Replica.update

    def updated(replica: Replica, *arguments: object) -> object:
        before_step(replica.global_step)
        return update(replica, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "evaluate", lambda replica, loader, **options: evaluation(replica.global_step))
        patch.setattr(Replica, "update", updated)
        yield


MEASURES = ("top1", "top5", "loss")


@dataclass(frozen=True)
class Case:
    """A run: how often it saves and evaluates, and what its evaluations say, by a seed."""

    seed: int
    epochs: int
    keep: int
    measure: str
    save_epochs: int
    save_steps: int
    evaluate_epochs: int
    layout: str
    asynchronous: bool
    goes_back: bool

    @classmethod
    def of(cls, seed: int) -> Case:
        """A case at random."""
        draw = random.Random(seed)
        save_epochs = draw.choice([0, 1, 1, 2, 3])
        save_steps = draw.choice([0, 0, 1, 2, 3, 4]) if save_epochs else draw.randint(1, 4)
        rest: tuple[Any, ...] = (save_epochs, save_steps, draw.choice([1, 1, 2, 3]), draw.choice(["single", "sharded"]))
        measure = draw.choice((*MEASURES, "top1"))
        return cls(seed, draw.randint(2, 6), draw.randint(1, 3), measure, *rest, draw.random() < 0.5, draw.random() < 0.3)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the configuration."""
        best = f"checkpoint={{best: {self.measure}, keep: {self.keep}, every_epochs: {self.save_epochs}, "
        best += f"every_steps: {self.save_steps}, layout: {self.layout}, asynchronous: {str(self.asynchronous).lower()}}}"
        back = ["on_nonfinite={action: rollback, most: 99}"] if self.goes_back else []
        return (f"epochs={self.epochs}", f"evaluate.every_epochs={self.evaluate_epochs}", best, *back)

    @property
    def last(self) -> int:
        """Steps of the whole run."""
        return self.epochs * STEPS_PER_EPOCH

    def evaluation(self, step: int) -> RunningSums:
        """Few values, so that many are equal."""
        draw = random.Random(self.seed * 1000 + step)
        return RunningSums(draw.randint(1, 4) * 1.0, draw.randint(0, 3), draw.randint(0, 3), TEST_SAMPLES)

    def written(self) -> list[int]:
        """Steps of all checkpoints of an undisturbed run."""
        due = [epoch * STEPS_PER_EPOCH for epoch in range(1, self.epochs + 1) if self._is_due(epoch, self.save_epochs)]
        inside = range(self.save_steps, self.last + 1, self.save_steps) if self.save_steps else ()
        return sorted({*due, *inside, *([0] if self.goes_back else [])})

    def best(self, steps: Collection[int]) -> int | None:
        """By the documented rule: the highest accuracy or the lowest loss, the earlier one of two."""
        evaluated = {epoch * STEPS_PER_EPOCH for epoch in range(1, self.epochs + 1) if self._is_due(epoch, self.evaluate_epochs)}
        candidates = sorted(evaluated & set(steps))
        sums = {step: self.evaluation(step) for step in candidates}
        score = {step: -each.loss if self.measure == "loss" else getattr(each, self.measure) for step, each in sums.items()}
        return max(candidates, key=lambda step: score[step], default=None)

    def kept(self) -> list[int]:
        """Steps of the checkpoints that an undisturbed run leaves."""
        written = self.written()
        newest = written[-self.keep :]
        best = self.best([step for step in written if step <= newest[0]]) if newest else None
        return sorted({*newest, *([best] if best is not None else [])})

    def _is_due(self, epoch: int, every: int) -> bool:
        return bool(every) and (epoch == self.epochs or epoch % every == 0)


class Disturbance:
    """Ends a run at a step, or lets it diverge there, once."""

    def __init__(self, step: int, error: BaseException) -> None:
        self._step, self._error, self.came = step, error, False

    def __call__(self, step: int) -> None:
        if step == self._step and not self.came:
            self.came = True
            raise self._error
