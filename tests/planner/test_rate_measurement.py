"""Rates from timings: work over time, calls apart."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue
from hpctrain.planner import rate_measurement
from hpctrain.planner.machine import OperatorClass
from hpctrain.planner.operator_work import OperatorWork
from hpctrain.planner.rate_measurement import RateTask, measure, rates

CALL = 1e-5


def test_rates_are_work_over_time_beside_calls() -> None:
    timings = [
        (OperatorWork(OperatorClass.CONVOLUTION, 4_000_000, 10), CALL + 1e-3),
        (OperatorWork(OperatorClass.CONVOLUTION, 8_000_000, 10), CALL + 1e-3),
        (OperatorWork(OperatorClass.PRODUCT, 3_000_000, 10), CALL + 1e-3),
        (OperatorWork(OperatorClass.MEMORY, 0, 5_000_000), CALL + 1e-3),
        (OperatorWork(OperatorClass.MEMORY, 0, 10), CALL / 2),  # shorter than a call: no time
    ]
    found = rates(timings, CALL)
    assert found[OperatorClass.CONVOLUTION].flops_per_second == pytest.approx(6e9)
    assert found[OperatorClass.PRODUCT].flops_per_second == pytest.approx(3e9)
    assert [rate.bytes_per_second for rate in found.values()] == pytest.approx([5_000_010 / 1e-3] * 3)
    assert {rate.call_seconds for rate in found.values()} == {CALL}


def test_a_kernel_set_has_a_rate_of_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    small = RateTask(lambda: catalogue.build("resnet_small", {"depth": 20, "width": 0.25}), 1, 8)
    monkeypatch.setattr(rate_measurement, "_LARGE", (small,))
    monkeypatch.setattr(rate_measurement, "_STEPS", 1)
    met = []
    found = measure(NumpyKernelSet(), 1, lambda: met.append(1))
    assert set(found) == set(OperatorClass)
    assert all(rate.flops_per_second > 0 and rate.bytes_per_second > 0 and rate.call_seconds > 0 for rate in found.values())
    assert len(met) == 2 * 3  # two tasks, each with two warm-up steps
