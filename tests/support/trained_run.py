"""A small run on pictures, and the configurations that evaluate it on virtual ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.data.convert import folder
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.picture_files import write_pictures
from tests.support.virtual_runs import train_virtual

CLASSES = ("ant", "bee", "cow")
#: number of ranks, and overrides of the grid
GRIDS = {
    "1": (1, ()),
    "1x2": (2, ()),
    "1x3": (3, ()),
    "1x4": (4, ()),
    "domain 3x1": (3, ("grid.rows=3", "plan.default=domain")),
    "tiles 4x1": (4, ("grid={rows: 4, tiles: [2, 2]}", "plan.default=domain")),
    "model 2x1": (2, ("grid.rows=2", "plan.default=model")),
    "mixed 2x2": (4, ("grid.rows=2", "plan.stage1.*=domain", "plan.classifier.*=model")),
}

CONFIG = """
name: tiny
seed: 7
backend: numpy
dtype: {dtype}
progress: test
model: {{name: small, channels: [4, 6], hidden: 9}}
data:
  train: {folder}/train.h5
  test: {folder}/test.h5
  augment: [{{name: pad_crop, padding: 1}}]
  evaluate_augment: [{{name: center_crop, size: 9}}]
batch: 8
epochs: 1
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: constant
checkpoint: {{layout: {layout}}}
deadline_seconds: 60
output: {folder}/runs
"""


@dataclass(frozen=True)
class TrainedRun:
    """A folder with pictures in `train` and `test`, data files made of them, a configuration, and a run.

    The test images are larger than the training images, and fitted in another way.
    """

    folder: Path

    @property
    def file(self) -> Path:
        """The configuration."""
        return self.folder / "tiny.yaml"

    @property
    def run(self) -> RunDirectory:
        """The run."""
        run = latest(self.folder / "runs", "tiny")
        assert run is not None
        return run


def train(directory: Path, *overrides: str, layout: str = "single", dtype: str = "float64") -> TrainedRun:
    """Make all of it below a directory, by two virtual ranks. overrides: of the run, not of the configuration that stays."""
    for split, size, fit, seed in (("train", 9, "crop", 0), ("test", 11, "squash", 1)):
        write_pictures(directory / split, CLASSES, seed=seed)
        tree = folder.scan(directory / split)
        folder.convert(tree, directory / f"{split}.h5", size=(size, size), fit=fit, threads=1)  # type: ignore[arg-type]
    trained = TrainedRun(directory)
    trained.file.write_text(CONFIG.format(folder=directory, layout=layout, dtype=dtype))
    train_virtual(2, trained.file, *overrides)
    return trained
