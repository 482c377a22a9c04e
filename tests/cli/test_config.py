"""`hpctrain config`: what it prints, how it ends, and that the shipped configurations pass."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from hpctrain.assembly import recipe
from hpctrain.assembly.options import filled
from hpctrain.backend import choice
from hpctrain.backend.choice import NAMES, PRECISIONS
from hpctrain.backend.graph import Graph
from hpctrain.cli.main import cli
from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.data.writer import write_data_file
from hpctrain.models import catalogue
from hpctrain.models.state_dict import declared_state
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, partition_graph
from hpctrain.storage import weights_file
from hpctrain.storage.weights_file import WeightsFile

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
[QUICKSTART] = [str(path) for path in CONFIGS if path.stem == "quickstart"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_pass(path: Path) -> None:
    result = CliRunner().invoke(cli, ["config", "check", str(path)])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("ok: ")
    absent = not Path(load(path)[0].data.train).exists()
    assert ("not checked: the data, and the network" in result.output) == absent, "it has not built the network"


def test_show_prints_what_would_run() -> None:
    path = str(CONFIGS[0])
    result = CliRunner().invoke(cli, ["config", "show", path, "optimizer.lr=2e-1"])
    assert result.exit_code == 0, result.output
    shown = Config.model_validate(yaml.safe_load(result.output))
    assert shown == filled(load(path, ["optimizer.lr=0.2"])[0])
    assert shown.optimizer.options["clip_norm"] is None  # which no file of configs/ sets


def test_check_builds_the_network_for_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one's own that fits its IMAGE_SHAPE, but not the images of the training file, is refused by the check."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat_model.py").write_text(
        "from hpctrain.nn.layers import Flatten, Linear, Sequential\nIMAGE_SHAPE = (8, 8, 1)\n"
        "def net(classes: int = 10):\n    return Sequential({'flatten': Flatten(), 'fc': Linear(64, classes)})\n"
    )
    for side, code in ((8, 0), (9, 2)):
        pixels = np.zeros((2, side, side, 1), np.uint8)
        write_data_file(tmp_path / f"{side}.h5", 2, (side, side, 1), ["a", "b"], [(pixels, np.arange(2))])
        overrides = [f"data.train={side}.h5", "data.test=", "data.augment=[]", "model=flat_model.py:net"]
        result = CliRunner().invoke(cli, ["config", "check", QUICKSTART, *overrides])
        assert result.exit_code == code, result.output
    assert "Layer fc: linear expects inputs of shape (N, 64), not (1, 81); set its input features to 81." in result.stderr
    overrides = ["data.train=8.h5", "data.test=", "data.validation=0.5", "data.augment=[]"]
    result = CliRunner().invoke(cli, ["config", "check", QUICKSTART, *overrides])
    assert (result.exit_code, "cannot be held out for validation" in result.stderr) == (2, True), "as a training would refuse"


def test_check_compares_test_data_and_weights_with_training_data_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test data of other classes and weights of another model passed the check, and only the training refused them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    for name, classes in (("train", 3), ("other", 4)):
        pixels = np.zeros((4, 8, 8, 1), np.uint8)
        names = [f"class {number}" for number in range(classes)]
        write_data_file(tmp_path / f"{name}.h5", 4, (8, 8, 1), names, [(pixels, np.arange(4) % classes)])
    for classes in (3, 4):
        model = catalogue.build("small", {"channels": [2], "hidden": 3, "classes": classes, "channels_in": 1})
        state = {name: np.ones(entry.shape, np.float16) for name, entry in declared_state(model).items()}
        weights_file.write(tmp_path / f"of_{classes}.safetensors", WeightsFile(state))
    small = ["data.train=train.h5", "data.augment=[]", "model={name: small, channels: [2], hidden: 3}"]

    def check(*overrides: str) -> Result:
        return CliRunner().invoke(cli, ["config", "check", QUICKSTART, *small, *overrides])

    for split in ("test", "validation"):
        assert "other.h5 has other classes than train.h5: " in check("data.test=null", f"data.{split}=other.h5").stderr
    fits = check("data.test=train.h5", "init.weights=of_3.safetensors")
    assert fits.exit_code == 0, fits.output
    assert "not checked" not in fits.output
    other = ["data.test=null", "init.weights=of_4.safetensors"]
    refused = check(*other)
    assert refused.exit_code == 2
    assert 'another number of classes, set init.ignore to ["' in refused.stderr
    layer = refused.stderr.partition('to ["')[2].partition('"')[0]
    assert check(*other, f"init.ignore=[{layer}]").exit_code == 0
    assert (
        "of_3.safetensors lacks conv1.weight, which the model resnet50 has"
        in check("data.test=null", "init.weights=of_3.safetensors", "model=resnet50").stderr
    )
    missing = check("data.test=null", "init.weights=of_5.safetensors")
    assert missing.exit_code == 0
    assert "  not checked: the initial weights, as there is no of_5.safetensors yet; the nearest file is of_" in missing.stdout


def test_a_machine_that_does_not_multiply_bfloat16_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning does not ask for a GPU, which bfloat16 on CPUs does not need."""
    monkeypatch.setattr(choice, "missing", lambda place: "There is no GPU.")
    for multiplies in (True, False):
        monkeypatch.setattr(choice, "_onednn", lambda able=multiplies: SimpleNamespace(multiplies_bfloat16=able))
        result = CliRunner().invoke(cli, ["config", "check", QUICKSTART, "precision=bfloat16"])
        assert result.exit_code == 0
        assert ("warning: The training cannot run here: precision is bfloat16, which" in result.stderr) != multiplies
        assert "GPU" not in result.stderr


def test_the_configured_precisions_and_backends_are_those_that_can_be_made() -> None:
    assert get_args(Config.model_fields["precision"].annotation) == PRECISIONS
    assert set(get_args(Config.model_fields["backend"].annotation)) == set(NAMES)


def test_check_names_missing_data_files_and_the_nearest_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt path passed as if the data were still to come."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.h5").touch()
    arguments = ["config", "check", str(CONFIGS[0]), "data.train=data/tran.h5", "data.test=date/train.h5"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    *_, network, test = result.stdout.splitlines()
    assert network.endswith(", as there is no data/tran.h5 yet; the nearest file is data/train.h5")
    assert test == "  not checked: the test data, as there is no date/train.h5 yet; the nearest file is data/train.h5"


@pytest.mark.job
@pytest.mark.parametrize(
    "words",
    [["config", "check", str(CONFIGS[0]), "data.train=nowhere.h5"], ["plan", "show", str(CONFIGS[0]), "--ranks", "4"]],
)
def test_what_runs_nothing_needs_neither_mpi_nor_data(words: list[str]) -> None:
    """Under a launcher's environment, with data files that do not exist, and without importing mpi4py."""
    code = (
        "import sys; from hpctrain.cli.main import cli\n"
        f"try: cli({words})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not any(name.startswith('mpi4py') for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", ["batch", "model", "domain"])
def test_the_largest_grid_is_checked_as_fast_as_a_small_one(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a distribution over 10,000 rows takes most of a minute."""

    def few(graph: Graph, plan: ParallelPlan, counts: Sequence[int]) -> PartitionedGraph:
        assert plan.rows <= 8, plan.rows
        return partition_graph(graph, plan, counts)

    monkeypatch.setattr(recipe, "partition_graph", few)
    overrides = ["grid.rows=1000000", f"plan.default={use}"]
    result = CliRunner().invoke(cli, ["config", "check", QUICKSTART, *overrides], catch_exceptions=False)
    assert result.exit_code == 0, result.output
