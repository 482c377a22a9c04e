"""An evaluation gives the same integers on any grid and from either layout of checkpoints, with mirror images or without."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.experiment.evaluation import Evaluation, run_evaluation
from hpctrain.storage import checkpoint
from hpctrain.storage.convert import convert
from tests.support.trained_run import CLASSES, GRIDS, TrainedRun, train
from tests.support.virtual_runs import train_virtual, work_virtual

SAMPLES = 21


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run with averaged weights whose checkpoint is a file, and, converted, a directory of shards beside it."""
    trained = train(tmp_path_factory.mktemp("trained"), "ema.decay=0.5", "init.freeze=[stage1.*]")
    ((_, path),) = checkpoint.checkpoints(trained.run.checkpoints)
    convert(path, trained.folder / "copy.shards", sharded=True, shards=3)
    return trained


@pytest.fixture(scope="module")
def expected(trained: TrainedRun) -> dict[bool, Evaluation]:
    """The evaluation of one rank in one batch, without mirror images and with them."""
    return {flip: _evaluated(trained, "1", flip=flip, batch=SAMPLES) for flip in (False, True)}


def _evaluated(
    trained: TrainedRun, grid: str, *, flip: bool, averaged: bool = False, batch: int = 5, sharded: bool = False
) -> Evaluation:
    ranks, overrides = GRIDS[grid]
    source = trained.folder / "copy.shards" if sharded else trained.run.path
    work = partial(run_evaluation, source=str(source), averaged=averaged, flip=flip, confusion=True)
    evaluations = work_virtual(ranks, trained.file, (*overrides, f"evaluate.batch={batch}"), work)
    for other in evaluations[1:]:
        assert np.array_equal(_matrix(other), _matrix(evaluations[0]))
    return evaluations[0]


def _matrix(evaluation: Evaluation) -> np.ndarray:
    matrix = evaluation.confusion
    assert matrix is not None
    return np.array([matrix.of_label(label) for label in range(matrix.classes)])


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("grid", "sharded"), [*((grid, False) for grid in GRIDS if grid != "1"), ("1x3", True), ("mixed 2x2", True)]
)
def test_any_grid_counts_what_one_rank_counts(
    trained: TrainedRun, expected: dict[bool, Evaluation], grid: str, sharded: bool
) -> None:
    for flip, of_one in expected.items():
        found = _evaluated(trained, grid, flip=flip, sharded=sharded)
        assert np.array_equal(_matrix(found), _matrix(of_one))
        assert (found.sums.top1, found.sums.top5, found.sums.count) == (of_one.sums.top1, SAMPLES, SAMPLES)
        assert np.isclose(found.sums.loss, of_one.sums.loss, rtol=1e-12)
        assert found.sums.top1 == int(np.trace(_matrix(found)))
        assert (found.class_names, found.flip) == (CLASSES, flip)


def test_mirror_images_change_the_loss(expected: dict[bool, Evaluation]) -> None:
    assert expected[True].sums.loss != expected[False].sums.loss


def test_averaged_weights_are_evaluated_as_the_run_has_done_it(trained: TrainedRun) -> None:
    """Whose configuration keeps averages and freezes layers, unlike that of the evaluation."""
    lines = map(json.loads, (trained.run.path / "metrics.jsonl").read_text().splitlines())
    (by_run,) = (line for line in lines if line["kind"] == "evaluation")
    for averaged, prefix in ((False, ""), (True, "ema_")):
        found = _evaluated(trained, "1x2", flip=False, averaged=averaged, batch=8)
        for name, value in found.sums.means().items():
            assert by_run[f"{prefix}{name}"] == pytest.approx(value, rel=1e-12)
        assert found.averaged is averaged
    assert by_run["loss"] != by_run["ema_loss"]


@pytest.mark.parametrize("flip", [False, True])
def test_averaged_weights_are_counted_alike_on_any_grid(
    trained: TrainedRun, expected: dict[bool, Evaluation], flip: bool
) -> None:
    alone = _evaluated(trained, "1", flip=flip, averaged=True, batch=SAMPLES)
    assert alone.sums.loss != expected[flip].sums.loss
    found = _evaluated(trained, "mixed 2x2", flip=flip, averaged=True, sharded=True)
    assert np.array_equal(_matrix(found), _matrix(alone))
    assert np.isclose(found.sums.loss, alone.sums.loss, rtol=1e-12)


def test_nothing_is_counted_that_nobody_asked_for(trained: TrainedRun) -> None:
    (plain,) = work_virtual(1, trained.file, (), partial(run_evaluation, source=str(trained.run.path)))
    assert plain.confusion is None
    assert plain.sums.loss == _evaluated(trained, "1", flip=False, batch=8).sums.loss


def test_made_up_images_are_counted_alike_on_any_ranks(tmp_path: Path) -> None:
    file = tmp_path / "made-up.yaml"
    file.write_text(
        "{name: made-up, backend: numpy, dtype: float64, model: {name: small, channels: [3], hidden: 5}, batch: 8, epochs: 1, "
        "optimizer: {name: sgd, lr: 0.01}, schedule: constant, data: {train: synthetic, test: synthetic, synthetic: "
        f"{{height: 9, width: 7, classes: 5, samples: 24, test_samples: 25}}}}, output: {tmp_path}/runs}}"
    )
    train_virtual(1, file)
    work = partial(run_evaluation, source="auto", confusion=True)
    (expected,) = work_virtual(1, file, (), work)
    for found in work_virtual(3, file, ("evaluate.batch=7",), work):
        assert np.array_equal(_matrix(found), _matrix(expected))
        assert [score.samples for score in found.confusion.scores()] == [5] * 5
