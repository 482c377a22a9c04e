"""The benchmark of hashes: it times records of a model, and reports them."""

from __future__ import annotations

import pytest

from benchmarks import hashes
from hpctrain.backend.kernels.onednn.kernel_set import available


@pytest.mark.slow
@pytest.mark.skipif(available() is not None, reason="needs oneDNN")
def test_records_of_a_model_are_timed() -> None:
    values = hashes.measure(["resnet20"])["models"]["resnet20"]
    assert values["tensors"] == 2 * 59 + 2 * 19  # each parameter with its momentum, and 19 batch norms
    assert values["elements"] > 2 * 269_000
    assert min(values["record"]) > 0
    assert len(values["record"]) == len(values["sha256"])


def test_the_report_has_the_medians() -> None:
    of_model = {"elements": 1234, "tensors": 7, "record": [1e-3, 2e-3, 9e-3], "sha256": [3e-3]}
    assert "| a model | 1,234 | 7 | 2.0 | 3.0 |" in hashes.markdown({"models": {"a model": of_model}})
