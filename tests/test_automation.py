"""The public workflow, the hooks before a commit and the continuous integration run what the Makefile has and the README says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

TOP = Path(__file__).parents[1]
WORKFLOW, HOOKS = TOP / ".github" / "workflows" / "tests.yml", TOP / ".pre-commit-config.yaml"


def _loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _targets(line: str) -> list[str]:
    """Targets of a line that is one call of make."""
    program, *targets = line.split()
    assert program == "make", f"{line!r} is no target of the Makefile"
    assert targets
    return targets


def _exists(target: str) -> bool:
    rules = re.findall(r"^([\w%-]+):(?!=)", (TOP / "Makefile").read_text(), re.MULTILINE)
    return any(re.fullmatch(rule.replace("%", r"\d+"), target) for rule in rules)


def _depends_on(target: str) -> set[str]:
    """Targets that a target names, and those that they name."""
    rule = re.search(rf"^{target}:(.*)$", (TOP / "Makefile").read_text(), re.MULTILINE)
    named = rule[1].split() if rule else []
    return {target}.union(*(_depends_on(name) for name in named if _exists(name)))


def test_the_workflow_runs_all_on_each_python_and_each_mpi() -> None:
    (job,) = _loaded(WORKFLOW)["jobs"].values()
    matrix = job["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12"]
    assert f'requires-python = ">={matrix["python"][0]}"' in (TOP / "pyproject.toml").read_text()
    targets = [target for command in matrix["command"] for target in _targets(command)]
    assert all(map(_exists, targets))
    assert set().union(*map(_depends_on, targets)) >= {"lint", *(_depends_on("test") - {"test"})}
    assert [step["run"] for step in job["steps"] if "run" in step] == ["${{ matrix.command }}"]


def test_the_hooks_are_the_parts_of_lint() -> None:
    (repository,) = _loaded(HOOKS)["repos"]
    assert repository["repo"] == "local"
    targets = [target for hook in repository["hooks"] for target in _targets(hook["entry"])]
    assert {"lint", *targets} == _depends_on("lint")
    assert all((hook["language"], hook["pass_filenames"]) == ("system", False) for hook in repository["hooks"])


def test_continuous_integration_runs_the_readmes_command() -> None:
    lines = (TOP / ".ci" / "run").read_text().splitlines()
    called = [target for line in lines if line.startswith("make") for target in _targets(line)]
    assert all(map(_exists, called))
    assert {"lint", "test"} <= set(called)
    assert re.search(r"^make test\b", (TOP / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", [WORKFLOW, HOOKS, TOP / ".ci" / "run"], ids=lambda path: path.name)
def test_no_host_is_named(path: Path) -> None:
    assert not re.search(r"https?:|\.(com|org|io|net)\b", path.read_text())
