"""Examinations: checks and their findings, the course of a rank and of a job, and the report."""

import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import ConfigError
from hpctrain.doctor import files, job, nodes, ranks, report, run
from hpctrain.doctor.check import (
    Check,
    DoctorFinding,
    FindingKind,
    JobView,
    OwnPlace,
    Severity,
    exit_code,
    fine,
    load_training,
)
from hpctrain.doctor.job import CHECKS, JOB_KINDS, STARTS, CheckFailure, Examination, Progression, RankNotes
from hpctrain.doctor.nodes import GpuFacts
from hpctrain.doctor.ranks import CoreFacts, LibraryFacts
from hpctrain.doctor.run import DoctorRank
from hpctrain.launch.keeper import Notebook, RankEnd
from hpctrain.launch.launcher import Launcher
from hpctrain_testing.run import clean_environment
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.doctored import keys, view


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0, 1, 2], ""),
        ([2], " on rank 2 (nid1)"),
        ([0, 1], " on ranks 0-1 (nid0)"),
        ([1, 2], " on ranks 1-2 (2 nodes, the first is nid0)"),
    ],
)
def test_ranks_are_reported_with_their_hosts(ranks: list[int], words: str) -> None:
    assert view(2, 1).on(ranks) == words


def test_names_and_keys_are_unique() -> None:
    names = Counter(check.name for check in CHECKS)
    keys = Counter(kind.key for kinds in (*(check.kinds for check in CHECKS), JOB_KINDS) for kind in kinds)
    assert set(names.values()) == set(keys.values()) == {1}
    assert all(key == key.lower() and " " not in key for key in keys)


def test_every_check_is_made() -> None:
    defined = [value.name for module in (ranks, nodes, files) for value in vars(module).values() if isinstance(value, Check)]
    assert sorted(defined) == sorted(check.name for check in CHECKS)


def test_kinds_say_what_they_mean() -> None:
    for kinds in (*(check.kinds for check in CHECKS), JOB_KINDS):
        for kind in kinds:
            assert kind.severity is not Severity.OK
            assert kind.meaning.endswith(".")
            assert kind.remedy


KIND = FindingKind("kind", Severity.WARNING, "Means.", "Mends.")


@pytest.mark.parametrize("strict", [False, True])
def test_the_exit_code_follows_from_the_worst_finding(strict: bool) -> None:
    worst = Severity.WARNING if strict else Severity.FAULT
    order = list(Severity)
    for count in range(4):
        for severities in itertools.product(Severity, repeat=count):
            bad = any(order.index(severity) >= order.index(worst) for severity in severities)
            found = [DoctorFinding(severity, "It is.") for severity in severities]
            assert exit_code(found, strict=strict) == (2 if bad else 0)


def test_a_finding_has_the_kinds_remedy_unless_it_has_a_better_one() -> None:
    assert KIND.found("It is.") == DoctorFinding(Severity.WARNING, "It is.", "Mends.", "kind")
    assert KIND.found("It is.", "export X=1").fix == "export X=1"


@pytest.mark.parametrize(
    ("error", "sentence", "fix"),
    [
        ("a is 3; set it to 2.", "a is 3.", "Set it to 2."),
        ("a is 3; b is 4; set both.", "a is 3; b is 4.", "Set both."),
        ("a is 3.", "a is 3.", "Mends."),
    ],
)
def test_the_last_part_of_an_errors_sentence_fixes_it(error: str, sentence: str, fix: str) -> None:
    finding = KIND.from_error(error)
    assert (finding.sentence, finding.fix) == (sentence, fix)


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
        assert "checking joined" in phases
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
        (RankEnd(None, "", Progression(STARTS, {})), "hangs", "did not end while starting MPI."),
        (
            RankEnd(-11, "a\nlast words\n", Progression("checking link", {})),
            "ended",
            "SIGSEGV while checking link: last",
        ),
        (RankEnd(1, "", None), "ended", "exited with code 1 while starting Python."),
        (RankEnd(255, "MPIDI_CRAY_init: ..., but GTL library is not linked\n", None), "no-gtl", "the GTL library is not linked."),
        (
            RankEnd(16, "PMIx", Progression(STARTS, {"MPI": MPICH})),
            "wrong-launcher",
            "Open MPI mpiexec has started these ranks, but",
        ),
        (RankEnd(16, "", Progression("ending MPI", {"MPI": MPICH})), "ended", "exited with code 16 while ending MPI"),
    ],
)
def test_the_end_of_a_rank_is_explained(end: RankEnd, key: str, words: str) -> None:
    found, examine = job.explained(PLACE, end)
    assert found.key == key
    assert words in found.sentence
    assert found.sentence.endswith(".")
    assert found.severity is Severity.FAULT
    assert found.fix
    outcome = examine()
    assert outcome.findings["job"] == [found]
    assert "launcher" not in outcome.findings, "the ranks have not been counted"


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


_TEXTS = st.text("abc [/]:*_.", min_size=1, max_size=200).map(lambda text: f"{text}.")


def examination(found: list[DoctorFinding], ranks: int = 2, gpus: int = 0) -> Examination:
    facts = {
        "binding": CoreFacts(frozenset({0, 1}), frozenset({"0", "1"}), 2, {}, "", {}),
        "GPUs": GpuFacts(tuple(map(str, range(gpus)))),
    }
    return Examination(view(ranks), {"binding": found[:1], "grid": found[1:]}, [facts] * ranks)


@given(st.lists(st.builds(DoctorFinding, st.sampled_from(Severity), _TEXTS, _TEXTS, st.just("key")), min_size=1, max_size=5))
def test_nothing_is_lost_in_80_characters(found: list[DoctorFinding]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        text = _printed(examination(found), patch)
    assert max(map(len, text.splitlines())) <= 80
    squeezed = "".join(text.split())
    for finding in found:
        assert "".join(finding.sentence.split()) in squeezed or len(finding.sentence) > 40
        assert finding.severity.value in text
    assert text.count(" fix ") >= len(found)


def _printed(outcome: Examination, patch: pytest.MonkeyPatch, *, strict: bool = False) -> str:
    import io

    stream = io.StringIO()
    patch.setattr("sys.stdout", stream)
    report.print_table(outcome, strict=strict)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("severities", "strict", "sentence"),
    [
        ([Severity.OK], False, "A training would run well here."),
        ([Severity.REMARK], True, "A training would run here: 1 remark."),
        ([Severity.WARNING], False, "A training would run here: no faults and 1 warning."),
        ([Severity.WARNING] * 2, True, "Warnings count here: no faults and 2 warnings."),
        ([Severity.FAULT, Severity.WARNING], False, "A training would not run well here: 1 fault and 1 warning."),
    ],
)
def test_the_conclusion_counts(severities: list[Severity], strict: bool, sentence: str) -> None:
    outcome = examination([DoctorFinding(severity, "It is.") for severity in severities])
    assert report.conclusion(outcome, strict=strict) == sentence


def test_a_job_without_findings_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    well = {check.name: [fine("It is well.")] for check in CHECKS}
    report.print_table(replace(examination([], ranks=100, gpus=8), findings=well), strict=False)
    assert len(capsys.readouterr().out.splitlines()) <= 23


def test_json_has_all_findings_and_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = [DoctorFinding(Severity.FAULT, "It is.", "Fix it.", "key"), DoctorFinding(Severity.OK, "It is well.")]
    report.print_json(examination(found, ranks=20, gpus=1), strict=False)
    content = json.loads(capsys.readouterr().out)
    assert content["exit_code"] == 2
    assert content["findings"][0] == {
        "check": "binding",
        "severity": "fault",
        "key": "key",
        "sentence": "It is.",
        "fix": "Fix it.",
    }
    assert [place["rank"] for place in content["map"]] == list(range(20))
    assert content["map"][3] == {"rank": 3, "host": "nid0", "node": 0, "cpus": "0-1", "threads": 2, "gpus": ["0"]}


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DoctorRank]:
    """A rank of four on two nodes, which does not wait."""
    monkeypatch.setattr(run, "LATER_SECONDS", 0.0)

    def make(rank: int, read: Any = None) -> DoctorRank:
        launcher = Launcher("MPICH hydra mpiexec", 4, rank, 2, rank % 2, "PMI_RANK")
        return DoctorRank(launcher, read, False, False, 5.0, 0.0)

    return make


@pytest.mark.parametrize(("rank", "spoken"), [(0, 0), (1, 0), (2, 1), (3, 0)])
def test_the_first_rank_of_each_other_node_says_how_it_ended(
    rank_of: Callable[..., DoctorRank], capsys: pytest.CaptureFixture[str], rank: int, spoken: int
) -> None:
    assert rank_of(rank).explain(RankEnd(-11, "", Progression(STARTS, {}))) == 2
    printed = capsys.readouterr()
    assert printed.err.count("was ended by SIGSEGV while starting MPI") == spoken
    assert printed.out.count("A training would not run well here: 1 fault") == (rank == 0)


def test_an_end_after_the_report_leaves_the_report_alone(rank_of: Callable[..., DoctorRank], capsys) -> None:
    assert rank_of(0).explain(RankEnd(None, "", Progression("ending MPI", {}, concluded=True))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "hpctrain: After its report, the doctor did not end while ending MPI.\n"


def test_a_fault_of_the_configuration_is_kept_until_all_ranks_can_say_it(rank_of: Callable[..., DoctorRank]) -> None:
    def read() -> None:
        raise ConfigError("x.yaml: It is wrong; fix it.")

    rank = rank_of(0, read)
    assert isinstance(rank._configuration(), ConfigError)
    with pytest.raises(ConfigError, match="It is wrong"):
        run._refuse(rank._configuration())
    run._refuse(None)


def test_the_time_to_load_modules_counts_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module_of_a_test.py").write_text("import time\ntime.sleep(0.2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_training(time.monotonic() - 1.0, ["slow_module_of_a_test"]) >= 1.2


_PROGRAM = """
import json, os, signal, sys, time
from hpctrain.launch.keeper import run_watched

def work(notebook):
    notebook.write({"number": 1})
    notebook.write({"number": 2, "long": "x" * 300000})
    sys.stderr.write("words\\n" * WORDS)
    sys.stderr.flush()
    DEED

def explain(end):
    print(json.dumps([end.code, end.in_words, end.note and end.note["number"], end.words[-6:], len(end.words)]), flush=True)
    return 7

sys.exit(run_watched(work, explain, SECONDS))
"""


def watch(deed: str, words: int = 1, seconds: float = 60) -> tuple[int, list[Any] | None, str, float]:
    """(exit code, what `explain` was given, standard error, seconds) of a program whose rank does this."""
    program = _PROGRAM.replace("DEED", deed).replace("WORDS", str(words)).replace("SECONDS", str(seconds))
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    note = json.loads(done.stdout) if done.stdout else None
    return done.returncode, note, done.stderr, time.monotonic() - begin


@pytest.mark.job
@pytest.mark.parametrize(
    ("deed", "code", "end"),
    [
        *((deed, code, None) for deed, code in (("return 0", 0), ("return 2", 2), ("sys.exit(2)", 2), ("sys.exit()", 0))),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 7, [-11, "was ended by SIGSEGV", 2, "words\n", 6]),
        ("os._exit(16)", 7, [16, "exited with code 16", 2, "words\n", 6]),
        ("sys.exit(3)", 7, [3, "exited with code 3", 2, "words\n", 6]),
    ],
)
def test_a_conclusion_is_passed_on_and_any_other_end_is_explained(deed: str, code: int, end: list[Any] | None) -> None:
    assert watch(deed)[:3] == (code, end, "words\n")


@pytest.mark.job
def test_an_error_and_a_hanging_rank_are_explained_and_all_output_is_passed_on() -> None:
    code, note, errors, _ = watch("1 / 0")
    assert (code, note and note[:3]) == (7, [1, "exited with code 1", 2])
    assert "ZeroDivisionError" in errors
    code, note, _, seconds = watch("time.sleep(100)", seconds=4)
    assert (code, note and note[:3], seconds < 60) == (7, [None, "did not end", 2], True)
    _, note, errors, _ = watch("os._exit(16)", words=50_000)
    assert errors == "words\n" * 50_000
    assert note is not None
    assert note[4] <= 1 << 14, "the last ones are kept"


@pytest.mark.job
def test_an_unread_notebook_takes_every_note() -> None:
    Notebook().write({"number": 1})
    assert RankEnd(None, "", None).in_words == "did not end"
