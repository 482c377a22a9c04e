"""`hpctrain plan search`: what it prints, what it writes for `train`, and what it refuses."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.config.load import load
from hpctrain.experiment.check import check_names
from hpctrain.experiment.dry_run import prepare
from hpctrain.planner import machine_file
from hpctrain.planner.program_timing import processor_model

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART, GRID = (str(CONFIGS / f"{name}.yaml") for name in ("quickstart", "quickstart-grid"))
SMALL = ("model.width=0.25", "batch=8", "backend=numpy", "--machine", "xc40")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", "search", *arguments])


def found(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    assert content["simulated"] is True
    return content


def test_the_best_come_first_and_the_next_ones_say_why_they_lose() -> None:
    choices = found(QUICKSTART, *SMALL, "--ranks", "4")["choices"]
    assert 2 <= len(choices) <= 5
    seconds = [choice["step_seconds"] for choice in choices]
    assert seconds == sorted(seconds)
    assert [choice["loses"] is None for choice in choices] == [True] + [False] * (len(choices) - 1)
    assert all(choice["grid"][0] * choice["grid"][1] == 4 for choice in choices)


def test_the_table_fits_and_gives_the_command_line() -> None:
    result = run(QUICKSTART, *SMALL, "--ranks", "4", "--best", "3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Simulated: small on 4 ranks, batch 8; images 28 x 28 x 1")
    assert sum(line.startswith("   Against ") for line in lines) == 2
    assert max(map(len, lines[:-1])) <= 100
    command = shlex.split(lines[-1])
    assert command[:8] == ["mpiexec", "-n", "4", "python", "-m", "mpi4py", "-m", "hpctrain"]
    config, source = load(command[9], command[10:])
    check_names(config, source)
    assert config.grid.rows * (config.grid.cols or 0) == 4
    assert config.batch == 8


def test_the_written_file_is_the_first_choice_and_plans(tmp_path: Path) -> None:
    path = tmp_path / "fast.yaml"
    content = found(GRID, *SMALL, "--ranks", "4", "--write", str(path))
    assert content["command"] == f"mpiexec -n 4 python -m mpi4py -m hpctrain train {path}"
    config, source = load(path)
    check_names(config, source)
    keys = content["choices"][0]["keys"]
    assert [config.grid.rows, config.grid.cols] == content["choices"][0]["grid"]
    assert (config.averager.name, config.micro_batches) == (keys["averager"]["name"], keys["micro_batches"])
    assert prepare(config, 4).plan.rows * prepare(config, 4).plan.cols == 4
    assert path.read_text().startswith(f"# {GRID} with the grid, plan and averager that hpctrain plan search chose for 4 ranks\n")
    shown = CliRunner().invoke(cli, ["plan", "show", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "on 4 ranks" in shown.output
    assert run(QUICKSTART, *SMALL, "--ranks", "2", "--write", str(path)).exit_code == 0  # written again


def test_sections_that_are_kept_stay() -> None:
    keep = [word for name in ("grid", "plan", "averager", "micro_batches") for word in ("--keep", name)]
    choices = found(GRID, *SMALL, "averager=bucketed", "micro_batches=2", "--ranks", "4", *keep)["choices"]
    assert len(choices) == 1
    (choice,) = choices
    assert choice["grid"] == [2, 2]
    assert choice["keys"]["plan"] == {"default": "batch", "stage*": "domain", "classifier.*": "model"}
    assert choice["keys"]["averager"]["name"] == "bucketed"
    assert choice["keys"]["micro_batches"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--ranks", "4", "--write", "nowhere/x.yaml"),
            "--write nowhere/x.yaml cannot be written: there is no directory nowhere",
        ),
        (("--ranks", "4", "--write", QUICKSTART), "is the configuration itself, whose comments would be lost"),
        (("--ranks", "4", "--machine", "xc41"), 'the nearest is "xc40"'),
        (("--ranks", "4", "averager=sharted"), 'the nearest is "sharded"'),
        (("--ranks", "100003"), "batch is 8, fewer samples than the 100003 ranks"),
        (("--ranks", "3", "grid.rows=2", "--keep", "grid"), "the nearest legal grid is 1 x 3."),
        (("--ranks", "2", "--measure"), "but machine xc40 was not measured on it"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = run(QUICKSTART, *SMALL, *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_job_that_fits_nowhere_says_what_would_do(tmp_path: Path) -> None:
    small = replace(machine_file.read("xc40"), memory_bytes=100_000)
    machine_file.write(tmp_path / "small.yaml", small)
    result = run(QUICKSTART, *SMALL, "--machine", str(tmp_path / "small.yaml"), "--ranks", "2")
    assert result.exit_code == 2
    assert "fits in no plan on 2 ranks" in result.stderr
    assert "the least that would do is" in result.stderr.replace("\n", " ")


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
