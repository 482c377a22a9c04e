"""The choice of backend, and its refusals."""

import logging

import pytest

from hpctrain.backend import backend as module
from hpctrain.backend.backend import make_backend
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import BackendError


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_computes_in_both_dtypes(dtype: str) -> None:
    backend = make_backend("numpy", dtype)
    assert (backend.name, backend.dtype) == ("numpy", dtype)
    assert isinstance(backend.kernels, NumpyKernelSet)


def test_auto_takes_numpy_for_float64_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hpctrain"):
        assert make_backend("auto", "float64").name == "numpy"
    assert len(caplog.records) == 1
    assert "float64" in caplog.text


@pytest.mark.parametrize("reason", [None, "Its library is not installed."])
def test_auto_takes_onednn_for_float32_where_it_loads(
    reason: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fast(NumpyKernelSet):
        name = "onednn"

    monkeypatch.setattr(module, "_onednn_missing", lambda: reason)
    monkeypatch.setattr(module, "_onednn", Fast)
    with caplog.at_level(logging.INFO, logger="hpctrain"):
        backend = make_backend()
    assert len(caplog.records) == 1
    assert backend.name == ("onednn" if reason is None else "numpy")
    assert isinstance(backend.kernels, Fast) == (reason is None)
    assert reason is None or reason in caplog.text


def test_onednn_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_onednn_missing", lambda: "Its library is not installed.")
    with pytest.raises(BackendError, match=r"not installed\. Backend numpy works everywhere"):
        make_backend("onednn")


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [("tpu", "float32", "no backend 'tpu'; the backends are auto, numpy, onednn"), ("numpy", "float16", "float32 and float64")],
)
def test_unknown_names_and_dtypes_are_refused(name: str, dtype: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        make_backend(name, dtype)


def test_onednn_refuses_float64() -> None:
    if module._onednn_missing() is not None:
        pytest.skip("oneDNN is not installed")
    with pytest.raises(BackendError, match="float32, not in float64; backend numpy computes in float64"):
        make_backend("onednn", "float64")
