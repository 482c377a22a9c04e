"""The course of an examination: facts alone and together, failures of checks, and ranks that ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.doctor import job
from hpctrain.doctor.check import Check, JobView, OwnPlace
from hpctrain.doctor.findings import DoctorFinding, Severity, fine
from hpctrain.doctor.job import STARTS, CheckFailure, Progression, RankNotes
from hpctrain.doctor.subjects.mpi_library import LibraryFacts
from hpctrain.doctor.watch import Notebook, RankEnd
from hpctrain.launch.launcher import Launcher
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.doctored import keys, view

PLACE = OwnPlace(Launcher("Open MPI mpiexec", 2, 0, 2, 0), None, Path("runs"))
MPICH = LibraryFacts(library="MPICH Version: 5.0.2")


def _sum(view_of_job: JobView, facts: Sequence[Any]) -> list[DoctorFinding]:
    return [fine(f"{sum(facts)} on {len(view_of_job.nodes)}")]


ALONE = Check("alone", "itself", (), lambda place: 10, _sum)
JOINED = Check("joined", "all", (), lambda place: place.world.rank, _sum, joined=True)


def _broken(place: object) -> int:
    raise OSError(5, "Input/output error", "x.h5")


BROKEN = Check("broken", "nothing", (), _broken, _sum)


def test_every_rank_gathers_and_the_first_one_judges() -> None:
    def program(comm: ThreadCommunicator) -> list[str] | None:
        checks = (ALONE, JOINED)
        own = job.gather_alone(PLACE, checks)
        phases: list[str] = []
        outcome = job.examine_together(PLACE, comm, own, "MPI", phases.append, 30, checks)
        assert "looking at joined" in phases
        return None if outcome is None else [finding.sentence for finding in outcome.all_findings]

    assert run_virtual(3, program) == [["30 on 1", "3 on 1"], None, None]


def test_a_check_that_cannot_be_made_is_a_warning_with_its_reason() -> None:
    facts = job.gather_alone(PLACE, (BROKEN, ALONE))
    assert facts["alone"] == 10
    outcome = job.judge(view(1, 1), [facts, {"broken": 3, "alone": 1}], (BROKEN, ALONE))
    [failed] = outcome.findings["broken"]
    assert failed.key == "check-failed"
    assert "on rank 0 (nid0): OSError: [Errno 5] Input/output error: 'x.h5'." in failed.sentence
    assert outcome.findings["alone"] == [fine("11 on 2")]


def test_checks_without_facts_are_left_out() -> None:
    assert list(job.judge(view(1), [{"alone": 1}], (BROKEN, ALONE)).findings) == ["alone"]


@pytest.mark.parametrize(
    ("end", "key", "words"),
    [
        (RankEnd(None, "", Progression(STARTS, {})), "hangs", "did not end while it was starting MPI."),
        (
            RankEnd(-11, "a\nlast words\n", Progression("looking at progress", {})),
            "ended",
            "SIGSEGV while it was looking at progress: last",
        ),
        (RankEnd(1, "", None), "ended", "left with exit code 1 while it was starting Python."),
        (RankEnd(255, "MPIDI_CRAY_init: ..., but GTL library is not linked\n", None), "no-gtl", "the GTL library is not linked."),
        (
            RankEnd(16, "PMIx", Progression(STARTS, {"MPI": MPICH})),
            "wrong-launcher",
            "Open MPI mpiexec has started these ranks, but",
        ),
        (RankEnd(16, "", Progression("ending MPI", {"MPI": MPICH})), "ended", "left with exit code 16 while it was ending MPI"),
    ],
)
def test_the_end_of_a_rank_is_explained(end: RankEnd, key: str, words: str) -> None:
    found, examine = job.explained(PLACE, end)
    assert found.key == key
    assert words in found.sentence
    assert found.sentence.endswith(".")
    assert found.severity is Severity.FAULT
    assert found.mend
    outcome = examine()
    assert outcome.findings["job"] == [found]
    assert "launcher" not in outcome.findings, "nobody has counted the ranks"


def test_a_library_that_cannot_be_loaded_is_judged_with_its_reason() -> None:
    for facts in ({"MPI": MPICH}, {"MPI": CheckFailure("no")}, {}):
        outcome = job.examine_alone(PLACE, facts, error="MPI cannot be started (no file); install one.")
        assert keys(outcome.findings["MPI"]) == ["no-mpi-library"]


def test_notes_tell_phase_and_facts() -> None:
    written: list[Progression] = []

    class Kept(Notebook):
        def write(self, note: object) -> None:
            assert isinstance(note, Progression)
            written.append(note)

    notes = RankNotes(Kept(), None)
    notes.phase("looking")
    notes.facts, notes.library = {"MPI": MPICH}, "MPICH"
    notes.phase("ending MPI", concluded=True)
    assert written == [Progression("looking", {}), Progression("ending MPI", {"MPI": MPICH}, "MPICH", None, True)]
