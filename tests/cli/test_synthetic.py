"""Commands on made-up images: no file is needed, resumes are bit by bit, and other images are noticed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import latest
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]

CONFIG = """
name: tiny
backend: numpy
model: {name: small, channels: [4, 6], hidden: 9}
data:
  train: synthetic
  test: synthetic
  augment: [flip]
  synthetic: {height: 8, width: 6, classes: 3, samples: 50, test_samples: 7}
batch: 16
epochs: 1
optimizer: {name: sgd, lr: 0.05, momentum: 0.9}
schedule: constant
deadline_seconds: 30
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def tensors(folder: Path, output: str) -> dict[str, np.ndarray]:
    run = latest(folder / output, "tiny")
    assert run is not None
    newest = checkpoint.read_newest(run.checkpoints)
    assert newest is not None
    return {name: np.array(values) for name, values in newest[1].tensors.items()}


@pytest.mark.slow
@pytest.mark.job
def test_a_run_on_two_ranks_goes_on_bit_by_bit_and_notices_other_images(job: Job, folder: Path) -> None:
    def train(output: str, *more: str, ranks: int = 2) -> Outcome:
        return job(ranks, ["-m", "hpctrain", "train", "tiny.yaml", f"output={output}", *more], cwd=folder)

    whole = train("whole")
    assert whole.code == 0, whole.output
    assert "data synthetic: 50 images, batch 16, 4 steps per epoch" in whole.stdout
    assert "7 images)" in whole.stdout
    assert train("parts", "--steps", "2").code == 0
    refused = train("parts", "--resume", "auto", "data.synthetic.samples=60", ranks=0)
    assert "an epoch sees each image of one file once" in refused.output
    assert refused.code == 2
    rest = train("parts", "--resume", "auto")
    assert rest.code == 0, rest.output
    expected, actual = tensors(folder, "whole"), tensors(folder, "parts")
    assert expected.keys() == actual.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, name)
    evaluated = job(0, ["-m", "hpctrain", "eval", "tiny.yaml", "output=whole"], cwd=folder)
    assert "7 samples" in evaluated.stdout


def test_a_plan_takes_shape_and_classes_of_images_that_nobody_has_made_yet(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["plan", "show", str(folder / "tiny.yaml"), "--ranks", "2"])
    assert result.exit_code == 0, result.output
    assert "There is no" not in result.output
