"""Findings: their order, exit codes, and what an error's sentence becomes."""

from __future__ import annotations

import itertools

import pytest

from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, capital, exit_code, fine

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
    assert KIND.found("It is.", "export X=1").mend == "export X=1"


@pytest.mark.parametrize(
    ("error", "sentence", "mend"),
    [
        ("a is 3; set it to 2.", "a is 3.", "Set it to 2."),
        ("a is 3; b is 4; set both.", "a is 3; b is 4.", "Set both."),
        ("a is 3.", "a is 3.", "Mends."),
    ],
)
def test_the_last_part_of_an_errors_sentence_mends_it(error: str, sentence: str, mend: str) -> None:
    finding = KIND.from_error(error)
    assert (finding.sentence, finding.mend) == (sentence, mend)


def test_all_is_well_without_a_key() -> None:
    assert fine("It is.").key == ""
    assert capital("it is.") == "It is."
    assert capital("grid.rows must be 2.") == "grid.rows must be 2."
    assert capital("") == ""
