"""The benchmark of watched weights: it times checks and guards of a model, and reports their shares."""

from __future__ import annotations

import pytest

from benchmarks import checks
from hpctrain.backend.kernels.onednn.kernel_set import available


@pytest.mark.slow
@pytest.mark.skipif(available() is not None, reason="needs oneDNN")
def test_checks_and_guards_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.MODELS, "resnet20", ((32, 32, 3), 2, 10))
    values = checks.measure(["resnet20"])["models"]["resnet20"]
    assert len(values["step_seconds"]) == 3
    assert min(values["check"]["look"]) > 0
    assert 0 < values["share_of_checks"] < 1
    assert 0 < values["share_of_reads"] < 1
    assert values["check"]["checks"] == 2  # 2.2 MB of parameters and momentum, by the MiB


def test_the_report_has_the_shares() -> None:
    of_model = {
        "samples": 8,
        "step_seconds": [1.0, 2.0, 3.0],
        "check": {"look": [1e-3], "message": [1e-4], "checks": 4},
        "read_seconds": [4e-3],
        "guard_seconds": [2e-3],
        "share_of_reads": 2e-3,
        "share_of_checks": 5e-5,
        "share_of_guards": 1e-3,
    }
    text = checks.markdown({"every_steps": 10, "models": {"a model": of_model}})
    assert "| a model, 8 | 2000 | 4.00 | 1.10 | 40 steps | 2.00 | 0.200% | 0.005% | 0.100% |" in text
