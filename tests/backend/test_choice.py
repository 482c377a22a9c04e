"""The choice of backend, and its refusals."""

from __future__ import annotations

import logging

import pytest

from hpctrain.backend import choice as module
from hpctrain.backend.choice import DEVICE_VARIABLE, NodePlace, machine_fault, make_backend
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.core.errors import BackendError


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
    monkeypatch.setattr(module, "cupy_is_installed", lambda: False)
    with caplog.at_level(logging.INFO, logger="hpctrain"):
        backend = make_backend()
    assert len(caplog.records) == (0 if reason is None else 1)
    assert backend.name == ("onednn" if reason is None else "numpy")
    assert isinstance(backend.kernels, Fast) == (reason is None)
    assert reason is None or reason in caplog.text


def test_onednn_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_onednn_missing", lambda: "Its library is not installed.")
    with pytest.raises(BackendError, match=r"not installed\. Set backend to numpy, which runs everywhere"):
        make_backend("onednn")


def test_a_machine_without_the_library_cannot_compute_float32_with_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the training does not start is not called able."""
    monkeypatch.setattr(module, "_onednn_missing", lambda: "Its library is not installed.")
    fault = machine_fault("onednn", "float32")
    assert fault is not None
    assert fault.startswith("The training cannot run here: Backend onednn cannot be used: Its library is not installed.")
    assert machine_fault("numpy", "bfloat16") is None


@pytest.mark.parametrize(
    ("dtype", "precision", "activations"),
    [
        ("float32", "float32", "float32"),
        ("float32", "tf32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float64",) * 2 + ("",),
    ],
)
def test_cuda_computes_in_its_precision(dtype: str, precision: str, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "hpctrain_testing.emulator")
    backend = make_backend("cuda", dtype, precision if activations else "float32")
    assert isinstance(backend.kernels, CudaKernelSet)
    assert backend.dtype == (activations or "float64")
    assert backend.kernels.runtime.precision == precision
    assert backend.description == f"cuda on emulated, {precision}"


def test_auto_takes_a_gpu_where_one_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "hpctrain_testing.emulator")  # so that there is something to make
    places: list[NodePlace] = []

    def nothing_missing(place: NodePlace) -> None:
        places.append(place)

    monkeypatch.setattr(module, "missing", nothing_missing)
    assert make_backend("auto", "float32", "bfloat16").name == "cuda"
    assert make_backend("auto", "float64").name == "numpy"
    assert places == [NodePlace()]


def test_auto_needs_a_gpu_for_a_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing", lambda place: "There is no GPU.")
    with pytest.raises(
        BackendError, match=r"which only backend cuda supports; set it to float32, or use a GPU\. There is no GPU\."
    ):
        make_backend("auto", "float32", "tf32")
