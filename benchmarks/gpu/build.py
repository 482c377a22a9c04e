"""Stage `build`: builds every kernel of every source for the device, and the plans of every convolution of two networks."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.gpu.costs import needed_gradients
from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import ConvolutionKey, Device, DeviceConvolution, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.backend.graph import GraphBuilder
from hpctrain.backend.specs import Conv2dSpec, TensorSpec
from hpctrain.models import catalogue

_LINES_TO_DROP = re.compile(r"^\s*#\s*(include|define EXPORT(_INDEPENDENT)?\().*$", re.MULTILINE)
_MARKS = "#define EXPORT(name) @name@\n#define EXPORT_INDEPENDENT(name) @name@\n"
_PLANS = (("resnet50", 256), ("resnet50", 32), ("vgg16", 64))
_SMALL_PLANS = (("resnet20", 2), ("small", 2))


def run(settings: Settings, report: StageReport) -> None:
    """Build all kernels, then all plans; each that fails is a failed check."""
    device = settings.make_device()
    build_kernels(device, report)
    for model, batch in _SMALL_PLANS if settings.emulated else _PLANS:
        for precision in ("float32",) if settings.emulated else ("bfloat16", "float32"):
            build_plans(device, report, model, batch, precision)


def kernel_names(source: str, *, on_cpu: bool) -> tuple[str, ...]:
    """All kernels of a source, those that its macros make included; `on_cpu`: also those that only the emulated device has.

    Raises:
        SkippedError: there is no C++ preprocessor here.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise SkippedError("the names of the kernels come from a C++ preprocessor, and g++ is not here")
    text = _MARKS + _LINES_TO_DROP.sub("", sources.text(source))
    flags = ["-E", "-P", "-x", "c++", *(["-DON_CPU"] if on_cpu else ["-D__CUDACC_RTC__"]), "-"]
    done = subprocess.run([compiler, *flags], input=text, capture_output=True, text=True, check=True)
    return tuple(dict.fromkeys(re.findall(r"@\s*(\w+)\s*@", done.stdout)))


def build_kernels(device: Device, report: StageReport) -> None:
    """Build every source, by asking for its kernels one after another."""
    seconds = {}
    for source in sources.names():
        begin, failure = time.perf_counter(), ""
        try:
            names = kernel_names(source, on_cpu="float64" in device.dtypes)
        except SkippedError as error:  # plans are still made
            report.note(str(error))
            return
        for name in names:
            try:
                device.kernel(source, name)
            except Exception as error:  # usually of the whole source, which each other kernel would compile again
                failure = f"{name}: {type(error).__name__}: {str(error)[:500]}"
                break
        seconds[source] = time.perf_counter() - begin
        report.check(f"source {source}", not failure, failure or f"{len(names)} kernels")
    report.add("source_seconds", seconds)
    report.note(f"{len(seconds)} sources in {sum(seconds.values()):.1f} s")


class PlanRecorder:
    """A device that records the plans that it is asked for, and returns an empty plan in place of one that it does not have.

    Attributes:
        plans: workspace bytes by key. failures: by key, in words.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.plans: dict[ConvolutionKey, int] = {}
        self.failures: dict[ConvolutionKey, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def convolution(self, key: ConvolutionKey) -> DeviceConvolution:
        """The device's plan, or one that cannot run."""
        try:
            plan = self._device.convolution(key)
        except Exception as error:
            self.failures[key] = f"{type(error).__name__}: {str(error)[:200]}"
            return cast(DeviceConvolution, SimpleNamespace(workspace_bytes=0))
        self.plans[key] = plan.workspace_bytes
        return plan


def make_convolutions(device: Device, model: str, batch: int, precision: Precision) -> PlanRecorder:
    """Make the operators of all convolutions of a training step; return the recorder of the plans that they asked for."""
    recorder = PlanRecorder(device)
    kernels = CudaKernelSet(CudaRuntime(cast(Device, recorder), device.stream("compute"), precision))
    builder = GraphBuilder(TensorSpec((batch, *catalogue.image_shape(model)), kernels.runtime.dtype))
    graph = kernels.fuse(builder.build(catalogue.build(model, {}).lower(builder, 0, "")), training=True)
    needed = needed_gradients(graph)
    for node in graph.nodes:
        if isinstance(getattr(node.spec, "inner", node.spec), Conv2dSpec):
            inputs = tuple(graph.tensors[number] for number in node.inputs)
            kernels.make(node.spec, inputs, training=True, input_gradient=node.inputs[0] in needed)
    return recorder


def build_plans(device: Device, report: StageReport, model: str, batch: int, precision: Precision) -> None:
    """Make the plan of every convolution of a training step."""
    begin = time.perf_counter()
    recorder = make_convolutions(device, model, batch, precision)
    seconds, name = time.perf_counter() - begin, f"{model} {batch} {precision}"
    failures = [f"{key.kind} {key.x} {key.w}: {text}" for key, text in recorder.failures.items()]
    count, largest = len(recorder.plans), max(recorder.plans.values(), default=0)
    report.add(f"plans {name}", {"plans": count, "seconds": seconds, "workspace_bytes": largest, "failures": failures})
    report.check(f"plans of {name}", not failures, failures[0] if failures else f"{count} plans in {seconds:.1f} s")
    report.note(f"{name}: {count} plans")
