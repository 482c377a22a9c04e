"""The choice of backend and of a rank's device, with every sentence that refuses one."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import hpctrain_testing.emulator
from hpctrain.backend import choice
from hpctrain.backend.choice import DEVICE_VARIABLE, NodePlace, machine_fault, make_backend
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.core.errors import BackendError, MissingLibraryError
from hpctrain_testing.emulator.device import EmulatedDevice
from tests.support.fake_cupy import IMPORTER, FakeCupy

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables that choose, and no CuPy."""
    for name in (DEVICE_VARIABLE, _VISIBLE):
        monkeypatch.delenv(name, raising=False)
    _have(monkeypatch, cupy=False)
    yield
    sys.modules.pop(IMPORTER, None)


def _have(monkeypatch: pytest.MonkeyPatch, *, cupy: bool = True, cudnn: bool = True, **options: Any) -> FakeCupy:
    """A CuPy with such GPUs, and a cuDNN frontend."""

    def library() -> object:
        if not cudnn:
            raise MissingLibraryError("Convolutions on a GPU need cuDNN and its frontend; install hpctrain[gpu13].")
        return SimpleNamespace(backend_version_string=lambda: "9.19.0")

    fake = FakeCupy(**options)
    fake.install(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cupy else None)
    monkeypatch.setattr(choice.libraries, "library", library)
    return fake


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

    monkeypatch.setattr(choice, "_onednn_missing", lambda: reason)
    monkeypatch.setattr(choice, "_onednn", Fast)
    monkeypatch.setattr(choice, "cupy_is_installed", lambda: False)
    with caplog.at_level(logging.INFO, logger="hpctrain"):
        backend = make_backend()
    assert len(caplog.records) == (0 if reason is None else 1)
    assert backend.name == ("onednn" if reason is None else "numpy")
    assert isinstance(backend.kernels, Fast) == (reason is None)
    assert reason is None or reason in caplog.text


def test_onednn_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_onednn_missing", lambda: "Its library is not installed.")
    with pytest.raises(BackendError, match=r"not installed\. Set backend to numpy, which runs everywhere"):
        make_backend("onednn")


def test_a_machine_without_the_library_cannot_compute_float32_with_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the training does not start is not called able."""
    monkeypatch.setattr(choice, "_onednn_missing", lambda: "Its library is not installed.")
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

    monkeypatch.setattr(choice, "missing", nothing_missing)
    assert make_backend("auto", "float32", "bfloat16").name == "cuda"
    assert make_backend("auto", "float64").name == "numpy"
    assert places == [NodePlace()]


def test_auto_needs_a_gpu_for_a_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "missing", lambda place: "There is no GPU.")
    with pytest.raises(
        BackendError, match=r"which only backend cuda supports; set it to float32, or use a GPU\. There is no GPU\."
    ):
        make_backend("auto", "float32", "tf32")


@pytest.mark.parametrize("argument", ["", ":", ":0", ":17"])
def test_the_environment_names_a_module_that_makes_the_device(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, f"hpctrain_testing.emulator{argument}")
    assert isinstance(choice.make_device("float64", NodePlace()), EmulatedDevice)
    assert choice.missing(NodePlace()) is not None, "auto never takes it"


def test_the_module_is_given_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpctrain_testing.emulator, "make_device", lambda argument: argument)
    monkeypatch.setenv(DEVICE_VARIABLE, "hpctrain_testing.emulator:17:4")
    assert choice.make_device("float32", NodePlace()) == "17:4"


@pytest.mark.parametrize("value", ["", "gpu", ":3", "hpctrain_testing", "hpctrain_testing.emulators:1"])
def test_other_modules_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, value)
    sentence = rf"HPCTRAIN_CUDA_DEVICE is '{value}', which names no module with a function make_device"
    with pytest.raises(BackendError, match=sentence):
        choice.make_device("float32", NodePlace())


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", "1234567890"])
def test_what_is_no_seed_is_refused(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, f"hpctrain_testing.emulator:{seed}")
    with pytest.raises(BackendError, match=rf"an emulated device must be an integer of at most 9 digits, not '{seed}'"):
        choice.make_device("float32", NodePlace())


@pytest.mark.parametrize(
    ("there", "place", "sentence"),
    [
        (
            {"cupy": False},
            NodePlace(),
            r"needs CuPy, which is not installed; install hpctrain\[gpu13\].*or set backend to onednn",
        ),
        (
            {"gpus": -1},
            NodePlace(),
            r"CUDA cannot be used here \(cudaErrorInsufficientDriver.*; if an NVIDIA driver for its version is missing, install",
        ),
        ({"gpus": 0}, NodePlace(), r"finds no GPU for this process \(CUDA_VISIBLE_DEVICES is not set\); request one"),
        ({"cudnn": False}, NodePlace(), r"need cuDNN and its frontend; install hpctrain\[gpu13\]"),
    ],
)
def test_no_gpu_can_be_used(there: Any, place: NodePlace, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, **there)
    with pytest.raises(BackendError, match=sentence) as caught:
        choice.make_device("float32", place)
    assert choice.missing(place) == str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gpu_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch)
    assert choice.missing(NodePlace()) is None
    versions = choice.make_device("float32", NodePlace()).versions
    assert versions == {"device": "Fake GPU", "cupy": "14.2.0", "cuda": "13020", "driver": "13000", "cudnn": "9.19.0"}
    for precision in ("float32", "tf32", "bfloat16"):
        assert choice.make_device(precision, NodePlace()).name == "Fake GPU"  # type: ignore[arg-type]


def test_what_a_gpu_does_not_compute_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, capability=(7, 5))
    with pytest.raises(BackendError, match=r"Fake GPU does not compute in bfloat16: its compute capability is 7\.5.*float32"):
        choice.make_device("bfloat16", NodePlace())
    with pytest.raises(BackendError, match=r"does not compute in float64 on Fake GPU; set dtype to float32, or backend to numpy"):
        choice.make_device("float64", NodePlace())
    assert choice.make_device("tf32", NodePlace()).dtypes == ("float32",)


@pytest.mark.parametrize(
    ("count", "place", "index"),
    [
        (1, NodePlace(), 0),
        (1, NodePlace(4, 3, 4), 0),  # each rank sees its own
        (4, NodePlace(), 0),
        (4, NodePlace(8, 2, 4), 2),
        (4, NodePlace(3, 2, 3), 2),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_where_it_sees_several(count: int, place: NodePlace, index: int) -> None:
    assert choice.gpu_index(count, place) == index


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(BackendError, match=r"The 3 ranks of this node see only 2 GPUs; start at most 2 ranks per node"):
        choice.gpu_index(2, NodePlace(3, 0, 3))


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, None), ("", ""), ("0", "0"), ("3,5", "5"), (" GPU-a , GPU-b,", "GPU-b"), ("MIG-x", "MIG-x")],
)
def test_one_of_several_visible_gpus_is_left(visible: str | None, left: str | None) -> None:
    environ = {} if visible is None else {_VISIBLE: visible}
    choice.narrow(environ, NodePlace(2, 1, 2))
    assert environ.get(_VISIBLE) == left


def test_the_environment_is_narrowed_before_cupy_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _have(monkeypatch, gpus=4)
    monkeypatch.setenv(_VISIBLE, "4,5,6,7")
    seen: list[str] = []

    def count() -> int:
        seen.append(choice.os.environ[_VISIBLE])
        return 1

    monkeypatch.setattr(fake.modules["cupy"].cuda.runtime, "getDeviceCount", count)
    choice.make_device("float32", NodePlace(1, 2, 4))
    assert seen == ["6"]
    assert fake.current == 0


def test_a_rank_that_sees_all_gpus_without_the_variable_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _have(monkeypatch, gpus=4)
    choice.make_device("float32", NodePlace(1, 2, 4))
    assert fake.current == 2
    assert _VISIBLE not in choice.os.environ
