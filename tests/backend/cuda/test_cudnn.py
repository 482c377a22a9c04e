"""cuDNN, replaced by a fake: graphs of convolutions, and plans that are left out and run."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda import libraries
from hpctrain.backend.cuda.device import ConvolutionKey, DeviceArray
from hpctrain.backend.cuda.libraries import WORKSPACE_LIMIT_BYTES, CudnnPlans, new_handle
from hpctrain.core.errors import BackendError, MissingLibraryError
from tests.support.fake_cudnn import DataType, FakeCudnn, FakeGraph, FakePlan, Heuristic, Note

KEY = ConvolutionKey(
    "forward", (2, 7, 9, 4), (6, 5, 3, 2), (2, 3, 3, 6), (2, 3), (1, 2, 0, 4), (1, 2), 2, "bfloat16", "bfloat16", "bias_relu"
)

READ = {"forward": ("image", "weight"), "input": ("loss", "filter"), "weight": ("image", "loss")}

NAMES = {"forward": "conv_fprop", "input": "conv_dgrad", "weight": "conv_wgrad"}


def built(key: ConvolutionKey) -> FakeGraph:
    cudnn = FakeCudnn()
    graph = libraries.build(cudnn, key, handle=cudnn.handle)
    assert cudnn.graphs == [graph]
    return graph


def elements(settings: dict, index: tuple[int, int, int, int]) -> int:
    """The place in memory of an element with this (n, h, w, c) by the dims and strides of a tensor."""
    n, h, w, c = index
    assert all(0 <= i < limit for i, limit in zip((n, c, h, w), settings["dim"], strict=True))
    return sum(i * stride for i, stride in zip((n, c, h, w), settings["stride"], strict=True))


@pytest.mark.parametrize("kind", ["forward", "input", "weight"])
def test_tensors_are_nhwc_and_krsc_memory_in_the_order_of_run(kind: str) -> None:
    key = replace(KEY, kind=kind, fused="")
    graph = built(key)
    ((operation, arguments),) = graph.operations
    assert operation == NAMES[kind]
    shapes = {"forward": (key.x, key.w), "input": (key.y, key.w), "weight": (key.x, key.y)}[kind]
    for uid, (role, shape, tensor) in enumerate(zip(READ[kind], shapes, graph.tensors, strict=True), start=1):
        assert arguments[role] is tensor
        assert tensor.settings["uid"] == uid
        assert tensor.settings["data_type"] is DataType.BFLOAT16
        last = tuple(size - 1 for size in shape)
        assert elements(tensor.settings, last) == math.prod(shape) - 1
        assert elements(tensor.settings, (0, 0, 0, 1)) == 1
        assert elements(tensor.settings, (0, 0, 1, 0)) == shape[3]
    assert graph.calls == ["validate", "build_operation_graph"]


@pytest.mark.parametrize(("kind", "out"), [("forward", KEY.y), ("input", KEY.x), ("weight", KEY.w)])
def test_the_output_has_all_that_gradients_need_said(monkeypatch, kind: str, out: tuple[int, ...]) -> None:
    """cuDNN infers the dims of no gradient."""
    operations = []
    plain = FakeGraph._operation
    monkeypatch.setattr(FakeGraph, "_operation", lambda *args, **keys: operations.append(plain(*args, **keys)) or operations[-1])
    built(replace(KEY, kind=kind, fused=""))
    n, h, w, c = out
    assert operations[-1].settings == {
        "uid": libraries.OUT,
        "dim": [n, c, h, w],
        "stride": [h * w * c, 1, w * c, c],
        "data_type": DataType.BFLOAT16,
        "output": True,
    }


def test_the_window_keeps_top_and_left_apart_from_bottom_and_right() -> None:
    ((_, arguments), *_) = built(KEY).operations
    assert arguments["pre_padding"] == [1, 0]
    assert arguments["post_padding"] == [2, 4]
    assert arguments["stride"] == [2, 3]
    assert arguments["dilation"] == [1, 2]


@pytest.mark.parametrize(("fused", "operations"), [("", []), ("bias", ["bias"]), ("bias_relu", ["bias", "relu"])])
def test_a_bias_and_a_relu_follow_in_one_graph(fused: str, operations: list[str]) -> None:
    graph = built(replace(KEY, fused=fused))
    assert [name for name, _ in graph.operations] == ["conv_fprop", *operations]
    biases = [tensor.settings for tensor in graph.tensors if tensor.settings.get("uid") == libraries.BIAS]
    assert [(settings["dim"], settings["data_type"]) for settings in biases] == [([1, 6, 1, 1], DataType.BFLOAT16)] * bool(fused)


@pytest.mark.parametrize(("dtype", "name"), [("float32", DataType.FLOAT), ("bfloat16", DataType.BFLOAT16)])
def test_sums_are_float32(dtype: str, name: DataType) -> None:
    arguments = built(replace(KEY, dtype=dtype)).arguments
    assert arguments["io_data_type"] is name
    assert arguments["compute_data_type"] is arguments["intermediate_data_type"] is DataType.FLOAT
    assert arguments["handle"] == 77


def test_float64_is_refused() -> None:
    with pytest.raises(BackendError, match="no convolutions in float64 on GPUs; set precision to float32"):
        libraries.build(FakeCudnn(), replace(KEY, dtype="float64", precision="float64"))


@pytest.mark.parametrize("error", [ImportError("No module named 'cudnn'"), OSError("libcudnn.so.9: cannot open")])
def test_a_missing_library_is_one_sentence(monkeypatch, error: Exception) -> None:
    def refuse(name: str) -> None:
        assert name == "cudnn"
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(MissingLibraryError, match="Convolutions on a GPU need cuDNN and its frontend, which cannot be loaded"):
        libraries.library()


@pytest.mark.parametrize("loaded", [False, True])
def test_cudnn_is_imported_without_pytorch(monkeypatch, tmp_path, loaded: bool) -> None:
    """It would import PyTorch if that is installed. A loaded PyTorch stays, and a later import of PyTorch works."""
    (tmp_path / "torch.py").write_text("")
    text = "try:\n    import torch\nexcept ImportError:\n    torch = None\n"
    (tmp_path / "cudnn.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("cudnn", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # which restores the earlier state at the end
        del sys.modules[name]
    torch = importlib.import_module("torch") if loaded else None
    assert libraries.library().torch is torch
    assert sys.modules.get("torch") is torch
    assert importlib.import_module("torch").__file__ == str(tmp_path / "torch.py")
    (tmp_path / "cudnn.py").write_text("raise ImportError")
    monkeypatch.delitem(sys.modules, "cudnn")
    with pytest.raises(MissingLibraryError):
        libraries.library()
    assert "torch" in sys.modules
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(MissingLibraryError):
        libraries.library()
    assert "torch" not in sys.modules


@given(st.sampled_from([field.name for field in fields(ConvolutionKey)]))
def test_keys_that_differ_have_different_descriptions(name: str) -> None:
    others = {
        "kind": "weight",
        "x": (2, 7, 94, 4),
        "w": (6, 5, 32, 2),
        "y": (2, 33, 3, 6),
        "stride": (23, 3),
        "padding": (12, 2, 0, 4),
        "dilation": (11, 2),
        "groups": 22,
        "dtype": "float32",
        "precision": "tf32",
        "fused": "bias",
    }
    assert libraries.describe(replace(KEY, **{name: others[name]})) != libraries.describe(KEY)
    assert "\n" not in libraries.describe(KEY)


PLANNED_CONVOLUTION = ConvolutionKey(
    "forward", (2, 7, 9, 4), (6, 3, 3, 4), (2, 7, 9, 6), (1, 1), (1, 1, 1, 1), (1, 1), 1, "float32", "float32", "bias"
)

LIST = [
    FakePlan("eng9_k2=1", 100, frozenset({Note.NONDETERMINISTIC})),
    FakePlan("eng4_k2=1", 900, frozenset({Note.TENSOR_CORE})),
    FakePlan("eng5", WORKSPACE_LIMIT_BYTES + 1),
    FakePlan("eng6", 300, works=False),
    FakePlan("eng7", 400, frozenset({Note.WINOGRAD, Note.WINOGRAD_TILE_6x6})),
    FakePlan("eng1_k2=1", 500),
    FakePlan("eng1_k2=1", 500),
    FakePlan("eng2", 700, frozenset({Note.WINOGRAD})),
    FakePlan("eng3", 200),
    FakePlan("eng8", 800),
]


@pytest.fixture
def cudnn(monkeypatch) -> FakeCudnn:
    module = FakeCudnn(plans=list(LIST))
    monkeypatch.setattr(libraries, "library", lambda: module)
    return module


def test_takes_the_first_plan_that_is_left(cudnn) -> None:
    """Float32 without tensor cores; no plan whose sums come in another order each time, or that takes too much memory."""
    plan = CudnnPlans(new_handle(), capability=(9, 0)).plan(PLANNED_CONVOLUTION)
    assert plan.name == "eng1_k2=1"
    assert plan.workspace_bytes == 500
    (graph,) = cudnn.graphs
    assert graph.heuristics == [Heuristic.A, Heuristic.FALLBACK]
    assert graph.limit_bytes == WORKSPACE_LIMIT_BYTES
    assert {Note.NONDETERMINISTIC, Note.TENSOR_CORE} <= graph.left_out


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("bfloat16", "bfloat16")])
def test_tensor_cores_compute_in_other_precisions(cudnn, dtype: str, precision: str) -> None:
    plan = CudnnPlans(new_handle(), capability=(9, 0)).plan(replace(PLANNED_CONVOLUTION, dtype=dtype, precision=precision))
    assert plan.name == "eng4_k2=1"
    assert Note.NONDETERMINISTIC in cudnn.graphs[0].left_out


def test_plans_say_which_gpu_they_are_for(cudnn) -> None:
    """The frontend would otherwise load CUDA's runtime by its bare name, which wheels do not contain."""
    CudnnPlans(new_handle(), capability=(12, 1)).plan(PLANNED_CONVOLUTION)
    assert cudnn.graphs[0].arguments["sm_version"] == 121
    assert cudnn.graphs[0].arguments["handle"] == cudnn.handle


def test_a_plan_is_made_once_for_a_key(cudnn) -> None:
    plans = CudnnPlans(new_handle(), capability=(9, 0))
    assert plans.plan(PLANNED_CONVOLUTION) is plans.plan(replace(PLANNED_CONVOLUTION))
    assert plans.plan(PLANNED_CONVOLUTION) is not plans.plan(replace(PLANNED_CONVOLUTION, fused=""))
    assert len(cudnn.graphs) == 2


def test_runs_on_the_stream_with_plain_numbers(cudnn) -> None:
    plans = CudnnPlans(new_handle(), capability=(9, 0))
    plan, other = plans.plan(PLANNED_CONVOLUTION), plans.plan(replace(PLANNED_CONVOLUTION, kind="weight", fused=""))
    five, six = (SimpleNamespace(raw=SimpleNamespace(ptr=address)) for address in (5, 6))
    arrays = [DeviceArray(pointer, (1,), "float32", None) for pointer in (10, 20, 30, 40, 50)]
    plan.run(five, *arrays)
    other.run(five, *(DeviceArray(pointer, (1,), "float32", None) for pointer in (11, 21, 31)), None)
    plan.run(six, *arrays)
    assert cudnn.executed == [
        (5, {1: 10, 2: 20, 3: 30, 4: 50}, 40, "eng1_k2=1"),
        (5, {1: 11, 2: 21, 3: 31}, 0, "eng1_k2=1"),
        (6, {1: 10, 2: 20, 3: 30, 4: 50}, 40, "eng1_k2=1"),
    ]
    assert cudnn.streams == [5, 6]


def test_no_plan_is_one_sentence(cudnn) -> None:
    cudnn.plans = LIST[:4]
    with pytest.raises(BackendError, match=r"cuDNN 9\.19\.0 has no deterministic plan for forward.bias x 2x7x9x4 .* 512 MiB .*;"):
        CudnnPlans(new_handle(), capability=(9, 0)).plan(PLANNED_CONVOLUTION)
    cudnn.refusal = "No valid engine configs\nfor CONV"
    with pytest.raises(BackendError, match=r"in a workspace of at most 512 MiB \(No valid engine configs\); try a smaller batch"):
        CudnnPlans(new_handle(), capability=(9, 0)).plan(PLANNED_CONVOLUTION)


def test_plans_for_a_device_that_is_not_here_are_made_by_its_properties_and_never_run(cudnn) -> None:
    plans = CudnnPlans(properties={"deviceVer": 903, "deviceName": "H100"})
    plan = plans.plan(PLANNED_CONVOLUTION)
    arguments = cudnn.graphs[0].arguments
    assert arguments["sm_version"] == 90
    assert arguments["device_property"].text == '{"deviceVer": 903, "deviceName": "H100"}'
    assert "handle" not in arguments
    with pytest.raises(AssertionError, match="cannot be run"):
        plan.run(None, *(DeviceArray(0, (1,), "float32", None) for _ in range(5)))
