"""The MPI library, judged from made-up facts; what launchers call themselves, from scripts that say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.findings import Severity
from hpctrain.doctor.subjects import mpi_library
from hpctrain.doctor.subjects.mpi_library import LibraryFacts
from hpctrain.launch.launcher import Launcher
from tests.support.doctored import configuration, keys, view

FACTS = LibraryFacts((("/venv/bin/mpiexec", "MPICH"),), "/venv/bin/mpiexec", "MPICH Version: 5.0.2")
OTHER = (("/usr/bin/mpiexec", "Open MPI"), ("/venv/bin/mpiexec", "MPICH"))


def test_a_library_in_order_is_named() -> None:
    [found] = mpi_library.judge(view(2), [FACTS, None])
    assert (found.key, found.sentence) == ("", "MPICH Version: 5.0.2, thread level serialized.")


def test_a_missing_library_is_a_fault_with_the_errors_own_advice() -> None:
    error = "MPI cannot be started (no libmpi.so.12); install one with `pip install mpich`."
    [found] = mpi_library.judge(view(1, library=""), [replace(FACTS, error=error)])
    assert (found.key, found.severity, found.mend) == ("no-mpi-library", Severity.FAULT, "Install one with `pip install mpich`.")
    assert keys(mpi_library.judge(view(1, library=""), [LibraryFacts()])) == ["no-mpi-library"]
    assert keys(mpi_library.judge(view(1, library=""), [FACTS])) == [""], "it has not started, but it is there"


@pytest.mark.parametrize(
    ("facts", "mend"),
    [
        (replace(FACTS, launchers=OTHER), "export PATH=/venv/bin:$PATH"),
        (replace(FACTS, launchers=OTHER, beside=""), "export PATH=/venv/bin:$PATH"),
        (replace(FACTS, launchers=OTHER[:1], beside=""), "Use the mpiexec of MPICH."),
        (replace(FACTS, launchers=(("/x/mpiexec", ""), *OTHER), beside="/a b/mpiexec"), "export PATH='/a b':$PATH"),
    ],
)
def test_an_mpiexec_of_another_mpi_is_named_with_the_right_one(facts: LibraryFacts, mend: str) -> None:
    [found] = mpi_library.judge(view(2), [facts, None])
    assert (found.key, found.mend) == ("other-mpiexec", mend)
    assert "(/usr/bin/mpiexec) is of Open MPI, but mpi4py loads MPICH." in found.sentence


def test_launchers_that_say_nothing_are_let_pass() -> None:
    facts = replace(FACTS, launchers=(("/x/mpiexec", ""),))
    assert keys(mpi_library.judge(view(2), [facts, None])) == [""]


@pytest.mark.parametrize("level", ["single", "funneled", "serialized", "multiple"])
@pytest.mark.parametrize("asked", ["", "single"])
@pytest.mark.parametrize("progress", [None, "test", "thread", "posting"])
def test_a_low_thread_level_is_a_fault_where_a_thread_is_wanted(level: str, asked: str, progress: str | None) -> None:
    config = None if progress is None else configuration(f"progress={progress}")
    library = f"MPICH Version: 5.0.2, thread level {level}"
    [found] = mpi_library.judge(view(1, library=library, config=config), [replace(FACTS, level_asked=asked)])
    needed = "thread-level-needed" if progress in ("thread", "posting") else "thread-level"
    assert found.key == (needed if level in ("single", "funneled") else "")
    if found.key:
        assert ("unset MPI4PY_RC_THREAD_LEVEL" if asked else "MPICH_MAX_THREAD_SAFETY=multiple") in found.mend


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mpiexec (Open MPI) 5.0.11", "Open MPI"),
        ("mpiexec (OpenRTE) 4.1.4", "Open MPI"),
        ("HYDRA build details:\n Version: 5.0.2", "MPICH"),
        ("MPI VERSION : CRAY MPICH version 8.1", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021", "Intel MPI"),
        ("something", ""),
    ],
)
def test_families_are_known_by_their_words(text: str, name: str) -> None:
    assert mpi_library.family(text) == name


@pytest.mark.job
@pytest.mark.slow
def test_the_launchers_on_the_path_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, line in (("a", "echo 'mpiexec (Open MPI) 5.0.11'"), ("b", "exit 1")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / folder / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/nowhere")
    facts = mpi_library.gather(OwnPlace(Launcher("none"), None, tmp_path))
    assert facts is not None
    assert facts.launchers == ((f"{tmp_path}/a/mpiexec", "Open MPI"), (f"{tmp_path}/b/mpiexec", ""))
    assert mpi_library.family(facts.library), "the tests' own MPI is known"
    assert mpi_library.gather(OwnPlace(Launcher("x", 2, 1, 2, 1), None, tmp_path)) is None
