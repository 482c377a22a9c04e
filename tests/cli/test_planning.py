"""`hpctrain plan`: show, search, simulate and schedule, and their options."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from hpctrain.assembly.faults import check_config
from hpctrain.cli.main import cli
from hpctrain.cli.plan import FACTOR, SlowRank, slow_ranks
from hpctrain.config.load import load
from hpctrain.core.errors import ConfigError
from hpctrain.data.writer import write_data_file
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.operator_times import processor_model
from hpctrain.planner.planned_run import prepare

CONFIGS = Path(__file__).parents[2] / "configs"

VGG = str(CONFIGS / "imagenet-vgg16.yaml")

RESNET = str(CONFIGS / "imagenet-resnet50.yaml")

MIXED = ("plan.features.*=domain", "plan.classifier.*=model")

IMAGENET = ("--image", "224", "224", "3", "--classes", "1000")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def content(*arguments: str) -> dict[str, Any]:
    """Return what a command prints with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


def shown(*arguments: str) -> dict[str, Any]:
    return content("show", *arguments)


def test_a_split_group_that_leaves_its_node_is_pointed_out() -> None:
    result = run("show", VGG, "grid.rows=3", "batch=8", *IMAGENET, "--ranks", "6", "--ranks-per-node", "4")
    assert "  c = 1: 3-5   nodes 0-1: this split group spans nodes" in result.output.splitlines()


@pytest.mark.slow
def test_image_and_classes_come_from_the_files_header(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    images = np.zeros((4, 40, 40, 3), np.uint8)
    write_data_file(path, 4, (40, 40, 3), ["cat", "dog", "eel"], [(images, np.zeros(4, np.int64))])
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
    words = f"{path} does not exist yet, so this assumes images of 28 x 28 x 1 and 10 classes"
    result = run("show", *arguments)
    assert result.exit_code == 0, result.output
    assert "".join(words.split()) in "".join(result.output.split())  # lines are folded
    found = shown(*arguments)
    assert (found["image"], found["entries"][-1]["shape"]) == ([28, 28, 1], [4, 10])
    assert words in run("schedule", *arguments).output
    listed = run("schedule", *arguments, "--json")
    assert words in listed.stderr
    assert json.loads(listed.stdout)
    assert shown(*arguments, "--image", "16", "16", "1", "--classes", "7")["assumption"] is None
    cropped = shown(*arguments, "model={name: small, classes: 7}", "data.augment=[{name: random_resized_crop, size: 14}]")
    assert (cropped["image"], cropped["entries"][-1]["shape"]) == ([14, 14, 1], [4, 7])


@pytest.mark.parametrize("averager", ["blocking", "overlap", "bucketed", "lazy", "priority"])
def test_every_strategy_has_a_plan(averager: str) -> None:
    result = run("schedule", VGG, f"averager={averager}", "--ranks", "4", *IMAGENET)
    assert result.exit_code == 0, result.output
    assert "138,357,544 elements" in result.output
    if averager == "blocking":
        assert "one allreduce of all" in result.output


QUICKSTART, GRID = (str(CONFIGS / f"{name}.yaml") for name in ("quickstart", "quickstart-grid"))

SMALL = ("model.width=0.25", "batch=8", "backend=numpy", "--machine", "xc40")


def found(*arguments: str) -> dict[str, Any]:
    choices = content("search", *arguments)
    assert choices["simulated"] is True
    return choices


def test_the_best_come_first() -> None:
    choices = found(QUICKSTART, *SMALL, "--ranks", "4")["choices"]
    assert 2 <= len(choices) <= 5
    seconds = [choice["step_seconds"] for choice in choices]
    assert seconds == sorted(seconds)
    assert all(choice["fits"] for choice in choices)
    assert all(choice["grid"][0] * choice["grid"][1] == 4 for choice in choices)


def test_the_table_fits_and_contains_the_command_line() -> None:
    result = run("search", QUICKSTART, *SMALL, "--ranks", "4", "--best", "3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Simulated: small on 4 ranks, batch 8; images 28 x 28 x 1")
    assert sum(line.startswith("Choice 1: ") for line in lines) == 1
    assert max(map(len, lines[:-1])) <= 100
    command = shlex.split(lines[-1])
    assert command[:8] == ["mpiexec", "-n", "4", "python", "-m", "mpi4py", "-m", "hpctrain"]
    config, source = load(command[9], command[10:])
    check_config(config, source)
    assert config.grid.rows * (config.grid.cols or 0) == 4
    assert config.batch == 8


def test_the_written_file_is_the_first_choice_and_plans(tmp_path: Path) -> None:
    path = tmp_path / "fast.yaml"
    searched = found(GRID, *SMALL, "--ranks", "4", "--write", str(path))
    assert searched["command"] == f"mpiexec -n 4 python -m mpi4py -m hpctrain train {path}"
    config, source = load(path)
    check_config(config, source)
    keys = searched["choices"][0]["keys"]
    assert [config.grid.rows, config.grid.cols] == searched["choices"][0]["grid"]
    assert (config.averager.name, config.micro_batches) == (keys["averager"]["name"], keys["micro_batches"])
    assert prepare(config, 4).plan.rows * prepare(config, 4).plan.cols == 4
    assert path.read_text().startswith(f"# {GRID} with the grid, plan and averager that hpctrain plan search chose for 4 ranks\n")
    shown = CliRunner().invoke(cli, ["plan", "show", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "on 4 ranks" in shown.output
    assert run("search", QUICKSTART, *SMALL, "--ranks", "2", "--write", str(path)).exit_code == 0  # written again


def test_ranks_per_node_are_compared_on_the_same_cores(tmp_path: Path) -> None:
    path = tmp_path / "fast.yaml"
    arguments = (QUICKSTART, *SMALL[:-1], "cpu-cluster", "batch=16", "--ranks", "8")
    result = run("search", *arguments, "--write", str(path))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 100
    header = next(number for number, line in enumerate(lines) if line.startswith("ranks per node  threads  ranks    grid"))
    rows = [line.split()[:3] for line in lines[header + 1 : header + 6]]
    assert rows == [["2", "64", "2"], ["4", "32", "4"], ["8", "16", "8"], ["16", "8", "16"], ["32", "4", "32"]]
    assert any("32 ranks per node with 4 threads per rank: 32 ranks exceed the batch of 16 samples." in line for line in lines)
    searched = found(*arguments)
    layouts = {one["ranks_per_node"]: one for one in searched["layouts"]}
    assert layouts[32]["step_seconds"] is None
    chosen = layouts[searched["ranks_per_node"]]
    assert (searched["ranks"], searched["threads"]) == (chosen["ranks"], chosen["threads"])
    assert searched["choices"][0]["step_seconds"] == chosen["step_seconds"]
    assert f"-n {searched['ranks']} " in searched["command"]
    assert searched["command"].endswith(f" threads={searched['threads']}")
    assert load(path)[0].threads == searched["threads"]
    assert f"{searched['ranks_per_node']} on each node" in path.read_text().splitlines()[1]
    fixed = found(*arguments, "--ranks-per-node", "4")
    assert (fixed["ranks"], fixed["threads"], len(fixed["layouts"])) == (8, 32, 1)


def test_sections_that_are_kept_stay() -> None:
    keep = [word for name in ("grid", "plan", "averager", "micro_batches") for word in ("--keep", name)]
    choices = found(GRID, *SMALL, "averager=bucketed", "micro_batches=2", "--ranks", "4", *keep)["choices"]
    assert len(choices) == 1
    (choice,) = choices
    assert choice["grid"] == [2, 2]
    assert choice["keys"]["plan"] == {"default": "batch", "stage*": "domain", "classifier.*": "model"}
    assert choice["keys"]["averager"]["name"] == "bucketed"
    assert choice["keys"]["micro_batches"] == 2


@pytest.mark.job
@pytest.mark.slow
def test_operators_are_measured_here_and_then_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    xc40 = machine_file.read("xc40")
    sources = dict.fromkeys(xc40.sources, f"measured 2026-01-31 on {processor_model()}")
    machine_file.write(tmp_path / "here.yaml", replace(xc40, ranks_per_node=2, ranks_per_card=2, sources=sources))
    arguments = (QUICKSTART, *SMALL, "--machine", str(tmp_path / "here.yaml"), "--ranks", "2", "--best", "1")
    assert found(*arguments)["choices"][0]["measured_share"] == 0.0
    assert found(*arguments, "--measure", "--seconds", "30")["choices"][0]["measured_share"] > 0.9
    assert found(*arguments)["choices"][0]["measured_share"] > 0.9  # kept


SIMULATED, SIMULATED_GRID = (QUICKSTART, *SMALL), (GRID, *SMALL)


def points(*arguments: str) -> list[dict[str, Any]]:
    printed = content("simulate", *arguments)
    assert printed["simulated"] is True
    simulated: list[dict[str, Any]] = printed["points"]
    return simulated


def test_the_table_has_a_line_for_each_number_of_ranks_and_says_that_it_is_simulated() -> None:
    averagers = ("--averager", "sharded", "--averager", "{name: sharded, fc_exchange: never}")
    result = run("simulate", *SIMULATED, "--ranks", "1,2,4,8", *averagers)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Simulated: small, weak scaling, batch 8 per rank; images 28 x 28 x 1")
    assert lines.count("averager sharded, simulated:") == 1
    assert lines.count("averager {name: sharded, fc_exchange: never}, simulated:") == 1
    assert [line.split()[0] for line in lines if line[:5].strip().isdecimal()] == ["1", "2", "4", "8"] * 2
    assert max(map(len, lines)) <= 100
    assert "No computation times were measured" in result.stdout
    assert "bfloat16" not in result.stdout


def test_a_simulation_of_bfloat16_on_a_machine_of_float32_says_that_it_estimates() -> None:
    result = run("simulate", *SIMULATED, "precision=bfloat16", "--ranks", "1")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "The rates of bfloat16 are estimated from those of float32, because machine xc40 has none of bfloat16." in words


def test_weak_scaling_multiplies_the_batch_and_strong_scaling_shares_it() -> None:
    weak, strong = (points(*SIMULATED, "--ranks", "1,4"), points(*SIMULATED, "--ranks", "1,4", "--mode", "strong"))
    assert [point["batch"] for point in weak] == [8, 32]
    assert [point["batch"] for point in strong] == [8, 8]
    assert weak[0]["step_seconds"] == strong[0]["step_seconds"]
    assert strong[1]["step_seconds"] < weak[1]["step_seconds"]
    for several in (weak, strong):
        assert several[0]["efficiency"] == 1.0
        assert several[1]["efficiency"] == pytest.approx(several[1]["images_per_second"] / several[0]["images_per_second"] / 4)


def test_what_ifs_move_the_step_in_their_direction() -> None:
    (usual,) = points(*SIMULATED, "--ranks", "4", "--averager", "blocking")

    def seconds(*options: str) -> float:
        (point,) = points(*SIMULATED, "--ranks", "4", "--averager", "blocking", *options)
        return float(point["step_seconds"])

    assert seconds("--compute", "2") < usual["step_seconds"] < seconds("--compute", "0.5")
    assert seconds("--bandwidth", "0.1") > usual["step_seconds"]
    assert seconds("--latency", "100") > usual["step_seconds"]
    assert seconds("--slow", "3=2") > 1.5 * usual["step_seconds"]


@pytest.mark.slow
def test_open_sections_are_chosen_for_each_number_of_ranks() -> None:
    auto = points(*SIMULATED, "--ranks", "1,4", "grid=auto", "plan=auto", "averager=auto", "--bandwidth", "0.5")
    for averager in ("blocking", "sharded"):
        named = points(*SIMULATED, "--ranks", "1,4", "--averager", averager, "--bandwidth", "0.5")
        assert all(best["step_seconds"] <= 1.001 * other["step_seconds"] for best, other in zip(auto, named, strict=True))
    closed = run("simulate", *SIMULATED, "--ranks", "2", "--averager", "sharded", "grid=auto")
    assert "averager sharded, simulated" in closed.stdout


@pytest.mark.slow
def test_a_grid_is_simulated_as_it_is_configured(tmp_path: Path) -> None:
    result = run("simulate", *SIMULATED_GRID, "--ranks", "2,4", "--trace", str(tmp_path / "trace.json"))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["simulated"] is True
    assert trace["otherData"]["ranks"] == 4
    assert min(event["ts"] for event in trace["traceEvents"] if event["ph"] != "M") == 0.0
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert len(processes) == 2  # the ranks of a split group differ
    assert all(name.startswith("simulated: ") for name in processes)
    assert {point["grid"][0] for point in points(*SIMULATED_GRID, "--ranks", "2,4")} == {2}


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_a_factor_is_finite_and_above_0(text: str) -> None:
    for convert in (FACTOR.convert, lambda value, *rest: SlowRank().convert(f"1={value}", *rest)):
        with pytest.raises(click.BadParameter):
            convert(text, None, None)


def test_slow_ranks_are_ranks_of_the_job() -> None:
    pairs = (SlowRank().convert("3=1.5", None, None), SlowRank().convert("0=2", None, None))
    assert slow_ranks(pairs, 4) == {3: 1.5, 0: 2.0}
    with pytest.raises(ConfigError, match="rank 3, but the largest job has 2 ranks; the highest rank is 1"):
        slow_ranks(pairs, 2)
    with pytest.raises(click.BadParameter, match="must be a rank and a factor"):
        SlowRank().convert("-1=2", None, None)
