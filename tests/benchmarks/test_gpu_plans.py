"""The driver of `make gpu-plans` with a stand-in for cuDNN: what it counts, writes and ends with; the devices' properties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_plans
from benchmarks.gpu.convolutions import convolutions
from hpctrain.backend.cuda import cudnn_graphs
from tests.support.fake_cudnn import FakeCudnn, FakePlan, Note


@pytest.fixture
def cudnn(monkeypatch) -> FakeCudnn:
    module = FakeCudnn(plans=[FakePlan("eng7_k1=2", 4096)])
    monkeypatch.setattr(cudnn_graphs, "library", lambda: module)
    monkeypatch.setattr(gpu_plans, "library", lambda: module)
    return module


def test_plans_every_convolution_on_every_device_in_every_precision(cudnn, tmp_path: Path, capsys) -> None:
    out = tmp_path / "plans.json"
    assert gpu_plans.main(["--models", "small", "resnet20", "--batch", "2", "5", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    asked = {
        precision: {key for model in ("small", "resnet20") for batch in (2, 5) for key in convolutions(model, batch, precision)}
        for precision in ("float32", "tf32", "bfloat16")
    }
    expected = [(device, precision, len(keys)) for precision, keys in asked.items() for device in ("a100", "h100")]
    assert [(row["device"], row["precision"], row["convolutions"]) for row in content["rows"]] == expected
    assert all(row["without_plan"] == 0 and row["largest_workspace_bytes"] == 4096 for row in content["rows"])
    engines = content["engine_and_workspace_bytes"]
    assert engines.keys() == {cudnn_graphs.describe(key) for keys in asked.values() for key in keys}
    assert all(entry == {"a100": ["eng7", 4096], "h100": ["eng7", 4096]} for entry in engines.values())
    assert len(cudnn.graphs) == 2 * len(engines)
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_a_convolution_without_a_plan_is_said_and_is_a_failure(cudnn, tmp_path: Path, capsys) -> None:
    cudnn.plans = [FakePlan("eng7", notes=frozenset({Note.TENSOR_CORE}))]
    out = tmp_path / "plans.json"
    chosen = ["--models", "small", "--batch", "1", "--devices", "h100", "--precisions", "tf32", "float32", "--out", str(out)]
    assert gpu_plans.main(chosen) == 1
    count = len(convolutions("small", 1, "float32"))
    content = json.loads(out.read_text())
    assert [row["without_plan"] for row in content["rows"]] == [0, count]
    assert len(content["without_plan"]) == count
    assert all(sentence in capsys.readouterr().out for sentence in content["without_plan"][:1])
    assert content["without_plan"][0].startswith("h100: cuDNN 9.19.0 has no deterministic plan for forward")


def test_random_geometries_are_counted_apart_and_not_listed(cudnn, tmp_path: Path) -> None:
    out = tmp_path / "plans.json"
    chosen = [
        "--models",
        "small",
        "--batch",
        "1",
        "--devices",
        "h100",
        "--precisions",
        "tf32",
        "--random",
        "7",
        "--out",
        str(out),
    ]
    assert gpu_plans.main([*chosen, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    count = len(convolutions("small", 1, "tf32"))
    assert [(row["of"], row["convolutions"]) for row in content["rows"]] == [("models", count), ("random", 21)]
    assert len(content["engine_and_workspace_bytes"]) == count


def test_devices_say_the_same_things_and_by_default_all_are_planned_for() -> None:
    devices = {path.stem: json.loads(path.read_text()) for path in gpu_plans.PROPERTIES.glob("*.json")}
    assert set(gpu_plans.parse([]).devices) == devices.keys() >= {"h100", "a100"}
    first = devices["h100"]
    assert len(first) == 26
    for properties in devices.values():
        assert properties.keys() == first.keys()
        assert all(type(properties[name]) is type(value) for name, value in first.items())
    assert [devices[name]["deviceVer"] for name in ("h100", "a100")] == [900, 800]
