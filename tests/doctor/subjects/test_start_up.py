"""The slowest rank's start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.start_facts import StartFacts
from hpctrain.doctor.subjects import start_up
from hpctrain.launch.launcher import Launcher
from tests.support.doctored import view


@pytest.mark.parametrize(("seconds", "key"), [(4.9, ""), (5.1, "slow-import")])
def test_the_slowest_rank_counts(seconds: float, key: str) -> None:
    facts = [StartFacts(1.0, 0.7, 800), StartFacts(seconds, 0.7, 12_345), None]
    [found] = start_up.judge(view(1, 1, 1), facts)
    assert found.key == key
    assert found.sentence == f"Rank 1 (nid1) took {seconds:.1f} s to load, 0.7 s of them computing; it opened 12,345 files."


def test_what_was_not_measured_is_not_judged() -> None:
    assert start_up.judge(view(1), [None])[0].key == ""
    assert start_up.gather(OwnPlace(Launcher("none"), None, Path("runs"))) is None
