"""The how-tos: the files and lines that they add exist where the pages say. (test_blocks.py runs the rest of their code.)"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.backend import specs
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import TensorSpec
from hpctrain.cli.main import cli
from hpctrain.data.image_file import ImageFile
from hpctrain.models import catalogue
from hpctrain.parallel import sharding_rules
from hpctrain.runs.directory import RunDirectory
from tests.support import how_tos
from tests.support.runs import train_virtual
from tests.support.tiny_runs import tiny

_TRAINING = tiny(
    "batch: 8, metrics: {reporters: [{name: 'my_wandb.py:Wandb', project: garments}]}, output: FOLDER/runs, "
    "data: {train: synthetic, test: synthetic, synthetic: {height: 9, width: 9, samples: 24, test_samples: 8, classes: 3}}"
)


@pytest.fixture
def followed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    with how_tos.followed(request.param, tmp_path):
        yield


@pytest.mark.parametrize("followed", [how_tos.MODEL], indirect=True)
@pytest.mark.usefixtures("followed")
def test_adding_a_model() -> None:
    assert {"plain", "plain_deep"} <= set(catalogue.names())
    assert catalogue.options("plain_deep")["channels"] == [32, 64, 128, 256]


def test_what_was_added_is_gone_afterwards(tmp_path: Path) -> None:
    before = set(catalogue.names())
    with how_tos.followed(how_tos.MODEL, tmp_path):
        assert set(catalogue.names()) == before | {"plain", "plain_deep"}
    assert set(catalogue.names()) == before


@pytest.mark.parametrize("followed", [how_tos.OPERATOR], indirect=True)
@pytest.mark.usefixtures("followed")
def test_adding_a_kernel_operator() -> None:
    spec = specs.LeakyReluSpec(0.25)  # type: ignore[attr-defined]
    assert type(NumpyKernelSet().make(spec, (TensorSpec((2, 3)),), training=True)).__name__ == "LeakyRelu"
    assert isinstance(sharding_rules._ANY_CHANNELS, tuple), "the page names it"


@pytest.mark.parametrize("followed", [how_tos.CONVERTER], indirect=True)
@pytest.mark.usefixtures("followed")
def test_adding_a_converter(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((3, 4, 5), np.uint8))
    np.save(tmp_path / "labels.npy", np.array([0, 2, 1]))
    names = [str(tmp_path / name) for name in ("images.npy", "labels.npy", "out.h5")]
    command = ["data", "convert", "npy", *names]
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert ImageFile.open(tmp_path / "out.h5").shape == (4, 5, 1)
    again = CliRunner().invoke(cli, command)
    assert again.exit_code == 2
    assert "out.h5 already exists" in again.output
    for content, reason in ((b"", "not a .npy file"), (b"\x93NUMPY\x01\x00", "not a .npy file")):
        (tmp_path / "images.npy").write_bytes(content)
        refused = CliRunner().invoke(cli, [*command, "--overwrite"])
        assert (refused.exit_code, reason in refused.output) == (2, True), refused.output
    np.save(tmp_path / "images.npy", np.zeros((4, 4, 5), np.uint8))
    refused = CliRunner().invoke(cli, [*command, "--overwrite"])
    assert "needs integers of shape (4,)" in refused.output.replace("\n", " ")


@pytest.mark.parametrize("followed", [how_tos.STRATEGY], indirect=True)
@pytest.mark.usefixtures("followed")
def test_adding_a_strategy() -> None:
    configuration = str(how_tos.ROOT / "configs" / "quickstart.yaml")
    words = ["plan", "schedule", configuration, "averager=stages", "averager.depth=1", "--ranks", "4", "--image", "28", "28", "1"]
    shown = CliRunner().invoke(cli, words)
    assert shown.exit_code == 0, shown.output
    assert "stages, depth 1; parameters " in shown.output
    refused = CliRunner().invoke(cli, ["config", "check", configuration, "averager=stages", "averager.depth=0"])
    assert (refused.exit_code, "depth is 0, but must be at least 1" in refused.output) == (2, True), refused.output


@pytest.mark.parametrize("followed", [how_tos.OWN_CODE], indirect=True)
@pytest.mark.usefixtures("followed")
def test_a_training_reports_to_a_tracker_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(_TRAINING.replace("FOLDER", str(tmp_path)))
    train_virtual(1, file)
    (run,) = (tmp_path / "runs").iterdir()
    wandb = sys.modules["wandb"]
    assert isinstance(wandb, how_tos.WandbStandIn)
    assert wandb.calls[0] == ("start", ("garments", run.name, run.name, "allow", str(run)))
    kinds = ("interval", "epoch", "evaluation")
    steps = [record["step"] for record in RunDirectory(run).metrics() if record["kind"] in kinds]
    metrics = [value for name, value in wandb.calls if name == "metrics"]
    assert [step for step, _ in metrics] == steps
    assert {"interval/loss", "evaluation/top1"} <= set().union(*(values for _, values in metrics))
    assert [name for name, _ in wandb.calls].count("end") == 1
    assert wandb.calls[-1][0] == "end"
