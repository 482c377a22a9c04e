"""`hpctrain --version`: what would run, without starting it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpctrain.version import __version__
from tests.support.jobs import clean_environment


def _versions(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "--version"],
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.job
def test_mpi_and_kernels_are_named() -> None:
    own, packages, mpi, kernels = _versions()
    assert own == f"hpctrain {__version__}"
    assert "numpy 2." in packages
    assert mpi.startswith(("MPI: MPICH Version: ", "MPI: Open MPI v"))
    assert kernels.startswith(("kernels: onednn 3.", "kernels: numpy. oneDNN cannot be used: "))


@pytest.mark.job
@pytest.mark.parametrize(
    ("variable", "line"),
    [("MPI4PY_LIBMPI", "MPI: none. "), ("HPCTRAIN_ONEDNN_LIBRARY", "kernels: numpy. oneDNN cannot be used: ")],
)
def test_a_library_that_is_not_there_is_told_and_the_rest_printed(variable: str, line: str) -> None:
    lines = _versions(**{variable: "/nowhere/library.so"})
    assert len(lines) == 4
    assert any(each.startswith(line) for each in lines), lines
