"""Runs of combinations that end early and go on, or go back: faults that are put into the program are seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.strategies.lazy import LazyAverager
from hpctrain.core.errors import HpctrainError
from hpctrain.data.image_file import ImageFile
from hpctrain.data.sampler import Reordering
from hpctrain.training.metrics import RunningSums, StepTotals
from hpctrain.training.snapshot import Position
from tests.support.combinations import TOLERANCE, run
from tests.support.dimensions import parsed, refusal
from tests.support.interrupted import Course, by_epoch, other_order_from
from tests.support.training import Result

Patch = Callable[[pytest.MonkeyPatch], None]


def is_well(options: str) -> bool:
    """Whether a combination trains what one rank does."""
    try:
        return run(parsed(["net=narrow", "steps=6", "grid=1x2", *options.split()])) <= TOLERANCE
    except (AssertionError, HpctrainError):
        return False


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("end", ["request", "max_time", "steps", "kill"])
@pytest.mark.parametrize("checkpoint", ["none", "single-background", "sharded"])
def test_a_run_that_ends_early_goes_on_as_one_that_does_not(end: str, checkpoint: str) -> None:
    assert is_well(f"end={end} checkpoint={checkpoint}")
    assert is_well(f"end={end} checkpoint={checkpoint} resume=2x1 plan=domain on_nonfinite=rollback")


def _changed_position(**values: Any) -> Patch:
    """Positions of checkpoints forget something."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Position.from_meta

        def from_meta(meta: Mapping[str, Any]) -> Position:
            return replace(original(meta), **values)

        monkeypatch.setattr(Position, "from_meta", from_meta)

    return patch


def _does_nothing(of: type, name: str) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(of, name, lambda *arguments: None)


def _labels_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_labels(self: ImageFile, samples: np.ndarray, out: np.ndarray) -> None:
        out[...] = self.labels[samples]

    monkeypatch.setattr(ImageFile, "take_labels", take_labels)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (_changed_position(sums=RunningSums()), "end=steps hashes=every-step"),  # which ends inside of an epoch
        (_changed_position(skipped=0), "end=steps on_nonfinite=skip-one checkpoint=single"),
        (_changed_position(reorderings=()), "end=steps on_nonfinite=rollback checkpoint=sharded"),
        (_does_nothing(GradientAverager, "load_state"), "end=steps checkpoint=sharded"),
        (_does_nothing(GradientAverager, "load_state"), "end=steps averager=blocking"),
        (_does_nothing(LazyAverager, "load_counters"), "end=request averager=lazy lazy=all-layers"),
        (_does_nothing(GradientAverager, "load_state"), "on_nonfinite=rollback-late checkpoint=single"),
        (_labels_as_stored, "data=unreadable"),
    ],
)
def test_a_fault_of_the_program_is_seen(monkeypatch: pytest.MonkeyPatch, fault: Patch, options: str) -> None:
    assert is_well(options)
    fault(monkeypatch)
    assert not is_well(options)


def test_a_run_goes_back_to_its_newest_checkpoint() -> None:
    course = Course("own", 5, 0, every_steps=2)
    stopped, reordered = Position(global_step=3), Position(global_step=3, reorderings=(Reordering(0, 0, 1),))

    def back_to(step: int, *stops: Position, saves: bool = True) -> int:
        return other_order_from(course, step, 7, stops, saves=saves)

    assert [back_to(step) for step in range(9)] == [0, 0, 2, 2, 4, 4, 6, 7, 8]
    assert [back_to(step, stopped, saves=False) for step in range(5)] == [0, 0, 0, 3, 3]
    assert back_to(3, reordered) == 2


def test_courses_lie_inside_of_their_runs() -> None:
    courses = [Course.drawn("kill", 3, seed) for seed in range(50)]
    assert {course.step for course in courses} == {1, 2}
    assert {course.every_steps for course in courses} == {1, 2, 3}


def test_sums_begin_again_with_an_epoch() -> None:
    result = Result({}, {}, [StepTotals(float(n), 0, 0, n, 0, 0, np.zeros(0)) for n in range(1, 6)])
    assert [totals.loss for totals in by_epoch(result, 2).totals] == [1, 3, 3, 7, 5]
    assert [totals.count for totals in by_epoch(result, 3).totals] == [1, 3, 6, 4, 9]


def test_what_cannot_go_on_is_refused() -> None:
    row = parsed(["end=kill", "resume=2x1", "data=unreadable", "grid=1x3"])
    assert "grid.rows is 2, and ranks that share samples cannot replace one" in str(refusal(row))
    assert refusal({**row, "end": "own"}) is None
    assert refusal({**row, "resume": "1x1"}) is None
