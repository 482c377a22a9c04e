"""The table, whatever is found: 80 characters, every finding with its line; and the same as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.doctor import report
from hpctrain.doctor.findings import DoctorFinding, Severity
from hpctrain.doctor.job import Examination
from hpctrain.doctor.subjects.cores import CoreFacts
from hpctrain.doctor.subjects.gpu import GpuFacts
from tests.support.doctored import view

_TEXTS = st.text("abc [/]:*_.", min_size=1, max_size=200).map(lambda text: f"{text}.")


def examination(found: list[DoctorFinding], ranks: int = 2, gpus: int = 0) -> Examination:
    facts = {
        "binding": CoreFacts(frozenset({0, 1}), frozenset({"0", "1"}), 2, {}, "", {}),
        "GPUs": GpuFacts(tuple(map(str, range(gpus)))),
    }
    return Examination(view(ranks), {"launcher": found[:1], "grid": found[1:]}, [facts] * ranks)


@given(st.lists(st.builds(DoctorFinding, st.sampled_from(Severity), _TEXTS, _TEXTS, st.just("key")), min_size=1, max_size=5))
def test_nothing_is_lost_in_80_characters(found: list[DoctorFinding]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        text = _printed(examination(found), patch)
    assert max(map(len, text.splitlines())) <= 80
    squeezed = "".join(text.split())
    for finding in found:
        assert "".join(finding.sentence.split()) in squeezed or len(finding.sentence) > 40
        assert finding.severity.value in text
    assert text.count(" mend ") >= len(found)


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
        ([Severity.REMARK], True, "A training would run well here."),
        ([Severity.WARNING], False, "A training would run here: no faults and 1 warning."),
        ([Severity.WARNING] * 2, True, "Warnings count here: no faults and 2 warnings."),
        ([Severity.FAULT, Severity.WARNING], False, "A training would not run well here: 1 fault and 1 warning."),
    ],
)
def test_the_conclusion_counts(severities: list[Severity], strict: bool, sentence: str) -> None:
    outcome = examination([DoctorFinding(severity, "It is.") for severity in severities])
    assert report.conclusion(outcome, strict=strict) == sentence


def test_a_large_job_has_a_short_map(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_table(examination([DoctorFinding(Severity.OK, "It is.")], ranks=100, gpus=8), strict=False)
    text = capsys.readouterr().out
    assert "84 more ranks" in text
    assert text.count("8 GPUs") == 16


def test_json_has_all_findings_and_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = [DoctorFinding(Severity.FAULT, "It is.", "Mend it.", "key"), DoctorFinding(Severity.OK, "It is well.")]
    report.print_json(examination(found, ranks=20, gpus=1), strict=False)
    content = json.loads(capsys.readouterr().out)
    assert content["exit_code"] == 2
    assert content["findings"][0] == {
        "check": "launcher",
        "severity": "fault",
        "key": "key",
        "sentence": "It is.",
        "mend": "Mend it.",
    }
    assert [place["rank"] for place in content["map"]] == list(range(20))
    assert content["map"][3] == {"rank": 3, "host": "nid0", "node": 0, "cpus": "0-1", "threads": 2, "gpus": ["0"]}
