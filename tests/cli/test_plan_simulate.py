"""`hpctrain plan simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.config.load import load
from hpctrain.experiment.planner_search import progress_of

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = (str(CONFIGS / "quickstart.yaml"), "model.width=0.25", "batch=8", "backend=numpy", "--machine", "xc40")
GRID = (str(CONFIGS / "quickstart-grid.yaml"), "model.width=0.25", "batch=8", "backend=numpy", "--machine", "xc40")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", "simulate", *arguments])


def points(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["simulated"] is True
    simulated: list[dict[str, Any]] = content["points"]
    return simulated


def test_the_table_has_a_line_for_each_number_of_ranks_and_says_that_it_is_simulated() -> None:
    result = run(*SMALL, "--ranks", "1,2,...,8", "--averager", "sharded", "--averager", "{name: sharded, fc_exchange: never}")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Simulated: small, weak scaling, batch 8 per rank; images 28 x 28 x 1")
    assert lines.count("averager sharded, simulated:") == 1
    assert lines.count("averager {name: sharded, fc_exchange: never}, simulated:") == 1
    assert [line.split()[0] for line in lines if line[:5].strip().isdecimal()] == ["1", "2", "4", "8"] * 2
    assert max(map(len, lines)) <= 100
    assert "None of the compute follows from measured times" in result.stdout


def test_weak_scaling_multiplies_the_batch_and_strong_scaling_shares_it() -> None:
    weak, strong = points(*SMALL, "--ranks", "1,4"), points(*SMALL, "--ranks", "1,4", "--mode", "strong")
    assert [point["batch"] for point in weak] == [8, 32]
    assert [point["batch"] for point in strong] == [8, 8]
    assert weak[0]["step_seconds"] == strong[0]["step_seconds"]
    assert strong[1]["step_seconds"] < weak[1]["step_seconds"]
    for several in (weak, strong):
        assert several[0]["efficiency"] == 1.0
        assert several[1]["efficiency"] == pytest.approx(several[1]["images_per_second"] / several[0]["images_per_second"] / 4)


def test_what_ifs_move_the_step_in_their_direction() -> None:
    (usual,) = points(*SMALL, "--ranks", "4", "--averager", "blocking")

    def seconds(*options: str) -> float:
        (point,) = points(*SMALL, "--ranks", "4", "--averager", "blocking", *options)
        return float(point["step_seconds"])

    assert seconds("--compute", "2") < usual["step_seconds"] < seconds("--compute", "0.5")
    assert seconds("--bandwidth", "0.1") > usual["step_seconds"]
    assert seconds("--latency", "100") > usual["step_seconds"]
    assert seconds("--slow", "3=2") > 1.5 * usual["step_seconds"]
    jittered = seconds("--jitter", "0.5", "--seed", "7")
    assert jittered != usual["step_seconds"]
    assert jittered == seconds("--jitter", "0.5", "--seed", "7")


@pytest.mark.slow
def test_open_sections_are_chosen_for_each_number_of_ranks() -> None:
    auto = points(*SMALL, "--ranks", "1,4", "grid=auto", "plan=auto", "averager=auto", "--bandwidth", "0.5")
    for averager in ("blocking", "sharded"):
        named = points(*SMALL, "--ranks", "1,4", "--averager", averager, "--bandwidth", "0.5")
        assert all(best["step_seconds"] <= 1.001 * other["step_seconds"] for best, other in zip(auto, named, strict=True))
    assert "averager sharded, simulated" in run(*SMALL, "--ranks", "2", "--averager", "sharded", "grid=auto").stdout


@pytest.mark.slow
def test_a_grid_is_simulated_as_it_is_configured(tmp_path: Path) -> None:
    result = run(*GRID, "--ranks", "2,4", "--trace", str(tmp_path / "trace.json"), "--png", str(tmp_path / "curves.png"))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2:] == [str(tmp_path / "trace.json"), str(tmp_path / "curves.png")]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["simulated"] is True
    assert trace["otherData"]["ranks"] == 4
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert len(processes) == 2  # the ranks of a split group differ
    assert all(name.startswith("simulated: ") for name in processes)
    assert {point["grid"][0] for point in points(*GRID, "--ranks", "2,4")} == {2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--ranks", "1,3", "--mode", "strong", "batch=2"),
            "batch is 2, but 3 ranks (grid.cols) share it; the smallest batch is 3.",
        ),
        (("--ranks", "1,2", "grid.rows=2"), "the nearest legal grid is 1 x 1."),
        (("--ranks", "2", "--averager", "sharted"), 'the nearest is "sharded"'),
        (("--ranks", "2", "--slow", "2=1.5"), "--slow names rank 2, but the largest job has 2 ranks; the last is 1."),
        (("--ranks", "2", "--png", "nowhere/x.png"), "--png nowhere/x.png cannot be written: there is no directory nowhere"),
        (("--ranks", "2", "--machine", "xc41"), 'the nearest is "xc40"'),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*SMALL, *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(("configured", "simulated"), [("auto", "test"), *((mode, mode) for mode in ProgressMode)])
def test_the_configured_progress_is_simulated(configured: str, simulated: str) -> None:
    config, _ = load(SMALL[0], (f"progress={configured}",))
    assert progress_of(config) == simulated
