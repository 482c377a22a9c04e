"""What `pip install .` installs, its version, and what the workflow, the hooks and the continuous integration run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import hpctrain
from hpctrain.version import __version__
from tests.support import wheel

TOP = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel.build(tmp_path_factory.mktemp("build"))).extractall(site)
    return site


def _hpctrain(installed: Path, directory: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "hpctrain", *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.job
@pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD)
def test_everything_that_is_used_is_installed(installed: Path) -> None:
    assert [path.name for path in installed.iterdir() if path.suffix != ".dist-info"] == ["hpctrain"]
    packaged = installed / "hpctrain"
    modules = {path.relative_to(TOP / "hpctrain") for path in (TOP / "hpctrain").rglob("*.py")}
    assert {path.relative_to(packaged) for path in packaged.rglob("*.py")} == modules
    assert (packaged / "py.typed").is_file()
    for folder in ("configs", "configs/machines", "jobs", "jobs/sites"):
        originals = {path.name: path.read_bytes() for path in (TOP / folder).glob("*.*") if path.suffix != ".md"}
        assert {path.name: path.read_bytes() for path in (packaged / "examples" / folder).glob("*.*")} == originals


@pytest.mark.job
@pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD)
def test_the_instruments_are_a_distribution_of_their_own(tmp_path: Path) -> None:
    folder = TOP / "hpctrain_testing"
    zipfile.ZipFile(wheel.build_instruments(tmp_path)).extractall(tmp_path)
    packaged = tmp_path / "hpctrain_testing"
    for pattern in ("*.py", "*.h"):
        sources = {path.relative_to(folder) for path in folder.rglob(pattern) if path.relative_to(folder).parts[0] != "build"}
        assert {path.relative_to(packaged) for path in packaged.rglob(pattern)} == sources
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert f"Version: {__version__}\n" in metadata.read_text()
    assert f"Requires-Dist: hpctrain=={__version__}\n" in metadata.read_text()


@pytest.mark.job
@pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD)
def test_the_fast_kernels_are_installed_where_they_run(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    (onednn,) = [line for line in lines if line.startswith("Requires-Dist: onednn")]
    assert onednn.endswith('; platform_machine == "x86_64" and sys_platform == "linux"')
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")}
    assert extras == {"local", "export", "onnx", "parity", "gpu12", "gpu13", "dev"}


@pytest.mark.job
@pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD)
def test_the_examples_of_an_installation_can_be_copied_and_checked(installed: Path, tmp_path: Path) -> None:
    code = "import hpctrain; print(hpctrain.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    used = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert used.stdout.startswith(str(installed))  # not this repository
    _hpctrain(installed, tmp_path, "config", "copy")
    assert (tmp_path / "jobs" / "slurm.sbatch").is_file()
    assert "ok: " in _hpctrain(installed, tmp_path, "config", "check", "configs/quickstart.yaml")
    script = _hpctrain(installed, tmp_path, "submit", "configs/quickstart.yaml", "--site", "slurm", "--dry-run")
    assert "TRAIN=(configs/quickstart.yaml)" in script


def test_there_is_one_version() -> None:
    assert hpctrain.__version__ == __version__ == version("hpctrain")


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
