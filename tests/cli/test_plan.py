"""`hpctrain plan`: what it prints, in which width, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.data.format import write

CONFIGS = Path(__file__).parents[2] / "configs"
VGG = str(CONFIGS / "imagenet-vgg16.yaml")
RESNET = str(CONFIGS / "imagenet-resnet50.yaml")
MIXED = ("plan.features.*=domain", "plan.classifier.*=model")
IMAGENET = ("--image", "224", "224", "3", "--classes", "1000")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def shown(*arguments: str) -> dict[str, Any]:
    result = run("show", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_what_overlap_comes_to_is_said_and_what_it_cannot_serve_is_refused() -> None:
    config = (str(CONFIGS / "quickstart.yaml"), "batch=8", "backend=numpy", "plan.default=domain", "--image", "28", "28", "1")
    on_ranks = (*config, "--classes", "10", "grid.rows=2", "--ranks", "2")
    assert "Interiors are computed while halos travel in stage2.conv." in run("show", *on_ranks, "grid.overlap=['*.conv']").output
    refused = run("show", *config, "--classes", "10", "grid.rows=14", "--ranks", "14", "grid.overlap=['*.conv']")
    assert refused.exit_code == 2
    assert "stage2.conv leaves rank 0 of a split group no row to compute while its halo travels" in refused.stderr


def test_a_split_group_that_leaves_its_node_is_pointed_out() -> None:
    result = run("show", VGG, "grid.rows=3", "batch=8", *IMAGENET, "--ranks", "6", "--ranks-per-node", "4")
    assert "  c = 1: 3 4 5   nodes 0, 1: a split group leaves its node" in result.output.splitlines()


@pytest.mark.slow
def test_image_and_classes_come_from_the_files_header(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    images = np.zeros((4, 40, 40, 3), np.uint8)
    write(path, 4, (40, 40, 3), ["cat", "dog", "eel"], [(images, np.zeros(4, np.int64))])
    augment = "data.augment=[{name: random_resized_crop, size: 32}]"
    found = shown(RESNET, f"data.train={path}", augment, "grid.rows=2", "--ranks", "2", "plan.default=domain", "batch=4")
    layers = [entry for entry in found["entries"] if "layer" in entry]
    assert found["image"] == [32, 32, 3]
    assert layers[0]["shape"] == [4, 16, 16, 64]
    assert layers[-1]["shape"] == [4, 3]


def test_without_data_the_models_own_images_and_classes_are_taken_and_said(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    config = (str(CONFIGS / "quickstart.yaml"), f"data.train={path}", "batch=8", "backend=numpy")
    arguments = (*config, "grid.rows=2", "--ranks", "4")
    words = f"There is no {path} yet, so this assumes images of 28 x 28 x 1 and 10 classes"
    result = run("show", *arguments)
    assert result.exit_code == 0, result.output
    assert "".join(words.split()) in "".join(result.output.split())  # lines are folded
    found = shown(*arguments)
    assert (found["image"], found["entries"][-1]["shape"]) == ([28, 28, 1], [4, 10])
    assert words in run("--schedule", *arguments).output
    listed = run("--schedule", *arguments, "--json")
    assert words in listed.stderr
    assert json.loads(listed.stdout)
    assert shown(*arguments, "--image", "16", "16", "1", "--classes", "7")["assumption"] is None
    cropped = shown(*arguments, "model={name: small, classes: 7}", "data.augment=[{name: random_resized_crop, size: 14}]")
    assert (cropped["image"], cropped["entries"][-1]["shape"]) == ([14, 14, 1], [4, 7])


@pytest.mark.parametrize("averager", ["blocking", "overlap", "bucketed", "lazy", "priority"])
def test_every_strategy_has_a_plan(averager: str) -> None:
    result = run("--schedule", VGG, f"averager={averager}", "--ranks", "4", *IMAGENET)
    assert result.exit_code == 0, result.output
    assert "138,357,544 elements" in result.output
    if averager == "blocking":
        assert "one allreduce of all" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("grid.rows=2", "--ranks", "5"), "the nearest legal grid is 1 x 5."),
        (("grid.rows=2",), "give --ranks, or set grid.cols."),
        (("grid.rows=4", "grid.tiles=[2, 3]", "--ranks", "4"), "the nearest legal tiles are 4 x 1."),
        (("plan.featurez.*=domain", "--ranks", "4"), "No layer matches the plan's pattern 'featurez.*'"),
        (("batch=3", "--ranks", "4"), "the smallest batch is 4."),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = run("show", VGG, *arguments, *IMAGENET)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["--alpha", "--beta"])
@pytest.mark.parametrize("command", ["show", "schedule"])
def test_a_link_has_finite_times(command: str, option: str, value: str) -> None:
    result = run(command, VGG, "--ranks", "2", *IMAGENET, option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr


@pytest.mark.job
def test_no_mpi_is_needed() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from hpctrain.cli.main import cli; "
        f"assert CliRunner().invoke(cli, {['plan', 'show', VGG, '--ranks', '4', *IMAGENET]}).exit_code == 0; "
        "assert 'mpi4py' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
