"""What `pip install .` installs, its version, a release, and what workflows, hooks and continuous integration run."""

from __future__ import annotations

import re
import subprocess
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import hpctrain
from hpctrain.version import __version__
from tests.support import release, wheel

TOP = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel.build(tmp_path_factory.mktemp("build"))).extractall(site)
    return site


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


#: imports all modules; those that compare with PyTorch need it
_IMPORT_ALL = """
import importlib, pkgutil, hpctrain_testing
for module in pkgutil.walk_packages(hpctrain_testing.__path__, "hpctrain_testing."):
    try:
        print(importlib.import_module(module.name).__file__)
    except ModuleNotFoundError as error:
        assert error.name in ("torch", "torchvision"), error
"""


@pytest.mark.job
@pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD)
def test_hpctrain_testing_needs_no_checkout(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    wheel.install(wheel.build(tmp_path / "of-hpctrain"), environment)
    wheel.install_into(wheel.build_instruments(tmp_path), environment)
    command = [environment / "bin" / "python", "-c", _IMPORT_ALL]
    variables = wheel.environment(environment, tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert {"run.py", "lab.py", "faults.py", "communicator.py"} <= {Path(line).name for line in done.stdout.splitlines()}
    assert all(Path(line).is_relative_to(environment) for line in done.stdout.splitlines())


@pytest.mark.job
@pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD)
def test_the_source_distribution_makes_the_same_wheel(installed: Path, tmp_path: Path) -> None:
    """Alone finds a file that the source distribution lacks, from which packagers build."""
    _, made = wheel.build_sdist(tmp_path)
    with zipfile.ZipFile(made) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert contents == {str(path.relative_to(installed)): path.read_bytes() for path in installed.rglob("*") if path.is_file()}


@pytest.mark.job
@pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD)
def test_the_fast_kernels_are_installed_where_they_run(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    (onednn,) = [line for line in lines if line.startswith("Requires-Dist: onednn")]
    assert onednn.endswith('; platform_machine == "x86_64" and sys_platform == "linux"')
    (mpich,) = [line for line in (TOP / "requirements.txt").read_text().splitlines() if line.startswith("mpich")]
    assert f'Requires-Dist: {mpich}; extra == "local"' in lines
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")}
    assert extras == {"local", "export", "onnx", "parity", "gpu12", "gpu13", "dev"}


def test_there_is_one_version() -> None:
    assert hpctrain.__version__ == __version__ == version("hpctrain")
    citation = _loaded(TOP / "CITATION.cff")
    assert citation["version"] == __version__
    assert f"\n## [{__version__}] - {citation['date-released']}\n" in (TOP / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tag", "heading", "words"),
    [
        ("v1.2.3", "## [1.2.3] - 2026-11-26", ""),
        ("1.2.3", "## [1.2.3] - 2026-11-26", "use the tag v1.2.3"),
        ("v1.2.30", "## [1.2.3] - 2026-11-26", "differs from the version 1.2.3"),
        ("v1.2.3", "## [1.2.3] - not yet released", "no heading '## [1.2.3] - YYYY-MM-DD'"),
        ("v1.2.3", "## [1x2.3] - 2026-11-26", "no heading"),
    ],
)
def test_a_release_has_the_version_of_its_tag_and_a_day(tag: str, heading: str, words: str) -> None:
    """Alone finds a release whose tag names another version than that of the sources."""
    reason = release.fault(tag, "1.2.3", f"# Changelog\n\n{heading}\n\ntext\n")
    assert words in reason
    assert bool(reason) == bool(words)


WORKFLOWS = sorted((TOP / ".github" / "workflows").glob("*.yml"))
WORKFLOW, HOOKS = TOP / ".github" / "workflows" / "tests.yml", TOP / ".pre-commit-config.yaml"
FORMS = sorted((TOP / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def _loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _targets(line: str) -> list[str]:
    """Return the targets of a line that calls make once, without its variables."""
    program, *words = line.split()
    assert program == "make", f"{line!r} is no target of the Makefile"
    targets = [word for word in words if "=" not in word]
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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_with_few_rights(path: Path) -> None:
    """Alone finds a renamed target, and text from outside that a workflow would insert into a shell command."""
    workflow = _loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    if commands == ["${{ matrix.command }}"]:
        commands = job["strategy"]["matrix"]["command"]
    assert commands
    for command in commands:
        assert "$" not in command
        assert all(map(_exists, _targets(command))), command
    for step in job["steps"]:
        assert ("run" in step) != bool(re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "")))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_of_issues_are_forms(path: Path) -> None:
    """Alone finds a form that GitHub would not show: a field without a name, or two of one name."""
    form = _loaded(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields) >= 1


def test_the_workflow_runs_all_on_each_python_and_each_mpi() -> None:
    (job,) = _loaded(WORKFLOW)["jobs"].values()
    matrix = job["strategy"]["matrix"]
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={matrix['python'][0]}"
    assert set(re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))) <= set(matrix["python"])
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


@pytest.mark.parametrize("path", [*WORKFLOWS, *FORMS, HOOKS, TOP / ".ci" / "run"], ids=lambda path: path.name)
def test_no_host_is_named(path: Path) -> None:
    assert not re.search(r"https?:|\.(com|org|io|net)\b", path.read_text())
