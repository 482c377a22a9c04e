"""Two jobs write to one run at the same time. `make faults` tries many more such pairs, also on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.job_pairs import Pair, Tally, reference_of, run_pairs

pytestmark = [pytest.mark.job, pytest.mark.slow]


def test_neither_crashes_and_no_checkpoint_is_lost(tmp_path: Path) -> None:
    pairs: list[Pair] = [("step", False, 1), ("write", True, 2)]
    tally = Tally()
    run_pairs(tmp_path, pairs, None, reference_of(tmp_path / "reference"), tally)
    assert not any(tally.faults.values()), tally.faults
    assert tally.pairs.total() == len(pairs)
