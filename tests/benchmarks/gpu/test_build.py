"""Names of kernels and keys of convolutions, as the build stage finds them."""

from __future__ import annotations

import pytest

from benchmarks.gpu.build import kernel_names, make_convolutions
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import ConvolutionKey, DeviceConvolution
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.errors import BackendError


@pytest.mark.job
@pytest.mark.parametrize("source", sources.names())
def test_every_name_is_a_kernel_and_float64_is_for_the_cpu(source: str) -> None:
    names, on_gpu = kernel_names(source, on_cpu=True), kernel_names(source, on_cpu=False)
    device = EmulatedDevice()
    for name in names:
        device.kernel(source, name)
    assert on_gpu
    assert set(on_gpu) < set(names) or not any("f64" in name for name in names)
    assert not any("f64" in name for name in on_gpu)


@pytest.mark.parametrize("model", ["vgg16", "resnet20"])
def test_every_convolution_asks_for_its_plans(model: str) -> None:
    """Three for each shape; the images' gradient is not asked for."""
    recorder = make_convolutions(EmulatedDevice(), model, 2, "bfloat16")
    assert not recorder.failures
    assert {key.kind for key in recorder.plans} == {"forward", "weight", "input"}
    shapes = {(key.x, key.w) for key in recorder.plans}
    first = [key for key in recorder.plans if key.x[3] == 3]
    assert sorted(key.kind for key in first) == ["forward", "weight"]
    assert len(recorder.plans) == 3 * len(shapes) - 1


def test_a_plan_that_is_missing_is_told_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice()
    plan = device.convolution

    def without_weight_gradients(key: ConvolutionKey) -> DeviceConvolution:
        if key.kind == "weight":
            raise BackendError("no plan")
        return plan(key)

    monkeypatch.setattr(device, "convolution", without_weight_gradients)
    recorder = make_convolutions(device, "small", 2, "float32")
    assert set(recorder.failures.values()) == {"BackendError: no plan"}
    assert {key.kind for key in recorder.failures} == {"weight"}
    assert {key.kind for key in recorder.plans} == {"forward", "input"}
