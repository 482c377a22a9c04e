"""Means are by sample, rates by the clock."""

import math

import numpy as np
import pytest

from hpctrain.train.metrics import Rate, RunningSums
from hpctrain.train.step_reduction import StepTotals


def test_means_weigh_samples_not_steps() -> None:
    sums = RunningSums()
    for totals in (StepTotals(6.0, 1, 3, 3, 0, 0, np.zeros(0)), None, StepTotals(1.0, 1, 1, 1, 0, 0, np.zeros(0))):
        sums.add(totals)
    assert sums.means() == {"loss": 7 / 4, "top1": 2 / 4, "top5": 4 / 4}


def test_no_sample_has_no_mean() -> None:
    assert all(math.isnan(value) for value in RunningSums().means().values())


def test_the_rate_counts_from_the_restart() -> None:
    now = [10.0]
    rate = Rate(lambda: now[0])
    rate.add(5)
    now[0] = 12.0
    assert rate.per_second() == pytest.approx(2.5)
    rate.restart()
    assert rate.per_second() == 0.0
    rate.add(9)
    now[0] = 15.0
    assert rate.per_second() == pytest.approx(3.0)
