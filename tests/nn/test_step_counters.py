"""Counters of one step of five networks (see tests/support/step_counters.py) are at most their golden numbers.

A change that lowers a counter updates its number here. A change that raises one must still be faster with 1 and with 2 threads,
and its commit message states the times.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hpctrain.backend.onednn.binding import processor_flags
from hpctrain.backend.onednn.kernel_set import available
from tests.support.step_counters import step_counters_with

COUNTERS = (
    "kernels",
    "copied_bytes",
    "products",
    "numpy_products",
    "python_calls",
    "allocated_bytes",
    "messages",
    "message_bytes",
)
GOLDEN = {
    "resnet20": (235, 15341216, 0, 0, 1227, 57000, 60, 1090016),
    "resnet34": (515, 41804512, 162, 0, 3965, 613000, 111, 87327000),
    "vgg13": (162, 7086464, 0, 4, 840, 53700, 27, 36347480),
    "resnet50": (510, 49386240, 27, 0, 3022, 918000, 162, 27883160),
    "resnext50_32x4d": (518, 18756096, 0, 0, 2770, 613000, 162, 7991768),
}
#: Factors, because sizes of Python's objects and its calls differ between versions.
ALLOWED = {"allocated_bytes": 1.05, "python_calls": 1.05}


def risen(measured: Mapping[str, Mapping[str, int]]) -> list[str]:
    return [
        f"{name}: {counter} is {measured[name][counter]:,}, at most {golden:,} is allowed"
        for name, numbers in GOLDEN.items()
        for counter, golden in zip(COUNTERS, numbers, strict=True)
        if measured[name][counter] > golden * ALLOWED.get(counter, 1.0)
    ]


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_does_no_more_than_before(threads: int) -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    if "avx2" not in processor_flags():
        pytest.skip("The processor lacks AVX2.")
    assert not risen(step_counters_with(threads))
