"""What `pip install .` installs: built as a wheel, unpacked, and used without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]

# An older one cannot read pyproject.toml, and pip would fetch a newer one. `make check` installs it.
OLD = int(version("setuptools").split(".")[0]) < 77
pytestmark = [pytest.mark.job, pytest.mark.skipif(OLD, reason="setuptools is older than 77; run make check")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The content of the wheel. Built from a copy, because a build leaves files in its directory."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in ("hpctrain", "configs", "jobs"):
        shutil.copytree(TOP / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(TOP / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--wheel-dir", wheels, source], check=True, timeout=100)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(site)
    yield site
    shutil.rmtree(source)


def _hpctrain(installed: Path, directory: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "hpctrain", *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_that_is_used_is_installed(installed: Path) -> None:
    packaged = installed / "hpctrain"
    modules = {path.relative_to(TOP / "hpctrain") for path in (TOP / "hpctrain").rglob("*.py")}
    assert {path.relative_to(packaged) for path in packaged.rglob("*.py")} == modules
    assert (packaged / "py.typed").is_file()
    for folder in ("configs", "configs/machines", "jobs", "jobs/sites"):
        originals = {path.name: path.read_bytes() for path in (TOP / folder).glob("*.*") if path.suffix != ".md"}
        assert {path.name: path.read_bytes() for path in (packaged / "examples" / folder).glob("*.*")} == originals


def test_the_fast_kernels_are_installed_where_they_run(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    (onednn,) = [line for line in lines if line.startswith("Requires-Dist: onednn")]
    assert onednn.endswith('; platform_machine == "x86_64" and sys_platform == "linux"')
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")}
    assert extras == {"local", "export", "onnx", "parity", "gpu12", "gpu13", "dev"}


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
