"""The registry of checks: names and keys are told apart, and every kind of finding says what it means and what mends it."""

from __future__ import annotations

import pkgutil
from collections import Counter

from hpctrain.doctor import subjects
from hpctrain.doctor.checks import CHECKS, JOB_KINDS
from hpctrain.doctor.findings import Severity


def test_names_and_keys_are_unique() -> None:
    names = Counter(check.name for check in CHECKS)
    keys = Counter(kind.key for kinds in (*(check.kinds for check in CHECKS), JOB_KINDS) for kind in kinds)
    assert set(names.values()) == set(keys.values()) == {1}
    assert all(key == key.lower() and " " not in key for key in keys)


def test_every_subject_has_a_check() -> None:
    judged = {check.judge.__module__.rpartition(".")[2] for check in CHECKS}
    assert judged == {module.name for module in pkgutil.iter_modules(subjects.__path__)}


def test_kinds_say_what_they_mean() -> None:
    for kinds in (*(check.kinds for check in CHECKS), JOB_KINDS):
        for kind in kinds:
            assert kind.severity is not Severity.OK
            assert kind.meaning.endswith(".")
            assert kind.remedy


def test_checks_that_need_all_ranks_come_in_one_order() -> None:
    assert [check.name for check in CHECKS if check.joined] == ["progress", "versions", "sharing", "data files", "clocks"]
