"""The sentence on how much progress modes hide, and the measurement on virtual ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hpctrain.comm.progress_mode import OverlapMeasurement, ProgressMode
from hpctrain.doctor.subjects import progress
from tests.support.doctored import view


def measured(hidden: Mapping[ProgressMode, float]) -> OverlapMeasurement:
    """Of 20 ms of messages under 20 ms of computing, these shares are hidden."""
    return OverlapMeasurement(0.02, 0.02, 5e-3, 1 << 20, {mode: (0.04 - 0.02 * share,) for mode, share in hidden.items()})


def test_what_each_mode_hides_is_told_in_words() -> None:
    hidden = {ProgressMode.TEST: 0.8, ProgressMode.NONE: 0.0, ProgressMode.THREAD: 1.2}
    [found] = progress.judge(view(2), [measured(hidden), None])
    assert found.key == ""
    assert "messages move by themselves while layers compute: nothing" in found.sentence
    assert "messages move whenever a layer is done: 80%" in found.sentence
    assert "a thread moves messages while layers compute: 100%" in found.sentence


@pytest.mark.parametrize(("best", "key"), [(0.2, "nothing-hides"), (-0.5, "nothing-hides"), (0.3, "")])
def test_where_nothing_is_hidden_is_a_warning(best: float, key: str) -> None:
    [found] = progress.judge(view(2), [measured({ProgressMode.TEST: best, ProgressMode.NONE: -1.0}), None])
    assert found.key == key


def test_one_rank_has_nothing_to_hide() -> None:
    assert progress.judge(view(1), [None])[0].key == ""
