"""Trainings that are killed and resumed, some of them while a checkpoint is written: `make faults` kills many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kills import WRITERS, moments, run_writer
from tests.support.signal_storm import prepare

pytestmark = [pytest.mark.job, pytest.mark.slow]


@pytest.mark.parametrize("name", WRITERS)
def test_killed_trainings_end_with_the_bits_of_an_undisturbed_one(tmp_path: Path, name: str) -> None:
    prepare(tmp_path, images=256, epochs=3)
    tally = run_writer(tmp_path, name, WRITERS[name], kills=1, in_writes=1, seed=5)
    assert tally.faults == []
    assert min(tally.kills.total(), tally.in_writes, tally.compared) >= 1


def test_moments_are_as_many_as_asked_for() -> None:
    chosen = moments(9, 4, 2.0, seed=1)
    assert (len(chosen), chosen.count(None)) == (9, 4)
    assert all(0 <= moment <= 2 for moment in chosen if moment is not None)
