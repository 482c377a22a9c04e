"""What `pip install .` installs: built as a wheel, unpacked, and used without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import wheel

TOP = Path(__file__).parents[1]

pytestmark = [pytest.mark.job, pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD)]


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
