"""Build a release: `make release TAG=v0.1.0` compares tag, version and changelog, writes build/dist, and tries the wheel.

The trial installs the wheel with the extra `local` into an empty environment, as README.md does, and trains the quickstart's
network on two ranks outside of the checkout. It needs a package index.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from hpctrain.version import __version__
from tests.support import wheel

TOP = Path(__file__).parents[2]
TRIAL = ("hpctrain config copy", "mpiexec -n 2 python -m mpi4py -m hpctrain train configs/quickstart.yaml --smoke")


def fault(tag: str, version: str, changelog: str) -> str:
    """Return a sentence that states why a tag cannot be released; empty if it can."""
    if tag != f"v{version}":
        return f"The tag {tag!r} differs from the version {version} in hpctrain/version.py; use the tag v{version}."
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        return f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'; write it, with the day of the release."
    return ""


def build(target: Path) -> Path:
    """Write the source distribution, and the wheel that is built from it, to `target`. Return the wheel."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        return [Path(shutil.copy(path, target)) for path in wheel.build_sdist(Path(name))][1]


def try_out(built: Path) -> None:
    """Install the wheel into an empty environment, and train with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        subprocess.run([folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", f"{built}[local]"], check=True)
        for command in TRIAL:
            subprocess.run(command.split(), cwd=folder, env=wheel.environment(folder / "venv", folder), check=True)


if __name__ == "__main__":
    reason = fault(sys.argv[1], __version__, (TOP / "CHANGELOG.md").read_text(encoding="utf-8"))
    if reason:
        raise SystemExit(reason)
    try_out(build(TOP / "build" / "dist"))
