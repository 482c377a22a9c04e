"""Trials: what is left out of a configuration is its length alone, and what comes of it is legal on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.load import parse
from hpctrain.config.schema import Config, ScheduleConfig
from hpctrain.data import format as data_format
from hpctrain.errors import DataError, ShapeError
from hpctrain.experiment.check import check_names
from hpctrain.experiment.options import filled
from hpctrain.experiment.smoke import EPOCHS, SIDE, STEPS, recipe_images, remove_run, short_schedule, shortened
from hpctrain.optim.schedules import SCHEDULES

TEXT = """
model: {model}
data:
  train: {folder}/train.h5
  test: {folder}/test.h5
  augment: [{{name: random_resized_crop, size: {size}}}]
  evaluate_augment: [{{name: center_crop, size: {size}}}]
batch: 256
epochs: 90
optimizer: {{name: sgd, lr: 0.1, momentum: 0.9}}
schedule: {{name: cosine, warmup_epochs: 5}}
"""
#: keys that a trial may change; all others are the recipe's
CHANGED = {
    "name",
    "batch",
    "epochs",
    "optimizer.lr",
    "schedule.warmup_epochs",
    "data.train",
    "data.test",
    "data.synthetic",
    "data.augment",
    "data.evaluate_augment",
}


def configured(folder: Path, *overrides: str, model: str = "small", size: int = 28) -> Config:
    config, source = parse(TEXT.format(folder=folder, model=model, size=size), overrides=overrides)
    check_names(config, source)
    return filled(config)


def write_images(path: Path, shape: tuple[int, int, int], classes: list[str]) -> None:
    count = len(classes)
    data_format.write(path, count, shape, classes, [(np.ones((count, *shape), np.uint8), np.arange(count))])


def different(one: Any, other: Any, path: str = "") -> set[str]:
    """Dotted keys in which two configurations differ, down to those that are listed above."""
    if one == other:
        return set()
    if path in CHANGED or not isinstance(one, dict) or not isinstance(other, dict):
        return {path}
    keys = one.keys() | other.keys()
    return set().union(*(different(one.get(key), other.get(key), f"{path}.{key}" if path else key) for key in keys))


def test_nothing_but_the_length_is_left_out(tmp_path: Path) -> None:
    config = configured(tmp_path, "ema.decay=0.9", "data.mixing.mixup=0.2", "averager=lazy", "loss.label_smoothing=0.1")
    trial = shortened(config, ranks=2)
    assert different(config.model_dump(), trial.config.model_dump()) == CHANGED - {"data.augment", "data.evaluate_augment"}
    assert Config.model_validate(trial.config.model_dump()) == trial.config
    assert trial.config.optimizer.lr / trial.config.batch == pytest.approx(config.optimizer.lr / config.batch)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 12])
def test_the_grid_splits_layers_over_as_many_ranks_as_it_can(ranks: int, tmp_path: Path) -> None:
    config = configured(tmp_path, "grid={rows: 4, cols: 3, tiles: [2, 2]}", "plan.default=domain")
    trial = shortened(config, ranks)
    rows = trial.config.grid.rows
    assert ranks % rows == 0
    assert rows == {1: 1, 2: 2, 3: 3, 4: 4, 5: 1, 6: 3, 12: 4}[ranks]
    assert trial.config.grid == config.grid or any("in place of 4 x 3" in note for note in trial.notes)
    assert trial.config.batch >= ranks


@pytest.mark.parametrize(("model", "size", "side"), [("resnet18", 224, SIDE), ("resnet20", 32, 32), ("vgg11", 160, SIDE)])
def test_images_are_the_recipes_or_smaller_ones_that_the_model_takes(model: str, size: int, side: int, tmp_path: Path) -> None:
    write_images(tmp_path / "train.h5", (256, 256, 3), ["a", "b", "c"])
    trial = shortened(configured(tmp_path, model=model, size=size), 1).config
    assert [step.options["size"] for step in (*trial.data.augment, *trial.data.evaluate_augment)] == [side, side]
    assert trial.data.synthetic.height == round(256 * side / size)
    assert trial.data.synthetic.classes == 3


def test_images_stay_as_large_where_the_parameters_follow_from_their_size(tmp_path: Path) -> None:
    """AlexNet's strides and pools leave nothing of 64 pixels, or other features."""
    trial = shortened(configured(tmp_path, "model.width=0.1", model="alexnet2014", size=224), 1).config
    sizes = {step.options["size"] for step in trial.data.augment}
    assert sizes <= {SIDE, 224}
    assert trial.data.synthetic.height >= sizes.pop()


def test_files_that_are_there_are_looked_at(tmp_path: Path) -> None:
    write_images(tmp_path / "train.h5", (30, 28, 3), ["a", "b"])
    assert recipe_images(configured(tmp_path)).shape == (30, 28, 3)
    assert recipe_images(configured(tmp_path)).notes == (f"there is no {tmp_path}/test.h5 yet",)
    write_images(tmp_path / "test.h5", (30, 28, 3), ["a", "c"])
    with pytest.raises(DataError):
        shortened(configured(tmp_path), 1)
    write_images(tmp_path / "test2.h5", (30, 28, 3), ["a", "b"])
    with pytest.raises(ShapeError):
        shortened(configured(tmp_path, f"data.test={tmp_path}/test2.h5", "data.evaluate_augment.0.size=20"), 1)


@given(
    epochs=st.integers(1, 300),
    warm=st.floats(0, 1),
    milestones=st.lists(st.floats(0.01, 2), max_size=4, unique=True).map(sorted),
)
def test_schedules_keep_their_order(epochs: int, warm: float, milestones: list[float]) -> None:
    warmup = warm * epochs
    ends = tuple(warmup + share * epochs for share in milestones)
    schedule = ScheduleConfig(name="step", warmup_epochs=warmup, milestones_epochs=ends)
    fewer = min(epochs, EPOCHS)
    short = short_schedule(schedule, epochs, fewer)
    made = SCHEDULES.create(
        short.name, short.options, base_lr=1.0, epochs=fewer, steps_per_epoch=STEPS, warmup_epochs=short.warmup_epochs
    )
    assert made.warmup_steps >= (warmup > 0 and fewer < epochs)
    assert len(short.options["milestones_epochs"]) == len(ends)


def test_a_directory_is_removed_and_a_failure_to_do_so_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert remove_run(run) == f"the trial passed; its directory {run} is removed"
    assert not run.exists()
    assert "could not be removed (No such file or directory)" in remove_run(run)
