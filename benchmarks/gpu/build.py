"""Stage 2: every kernel of every source is built for the device, and every convolution of two networks gets its plans."""

from __future__ import annotations

import re
import shutil
import subprocess
import time

from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import ConvolutionKey, Device, Precision
from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec
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
    """Every source, by asking for one kernel of it after another."""
    seconds = {}
    for source in sources.names():
        begin, failure, names = time.perf_counter(), "", kernel_names(source, on_cpu="float64" in device.dtypes)
        for name in names:
            try:
                device.kernel(source, name)
            except Exception as error:
                failure = failure or f"{name}: {type(error).__name__}: {str(error)[:500]}"
        seconds[source] = time.perf_counter() - begin
        report.check(f"source {source}", not failure, failure or f"{len(names)} kernels")
    report.add("source_seconds", seconds)
    report.note(f"{len(seconds)} sources in {sum(seconds.values()):.1f} s")


def keys(model: str, batch: int, precision: Precision) -> dict[ConvolutionKey, str]:
    """All convolutions of a training step, and the layer that has each first."""
    builder = GraphBuilder(TensorSpec((batch, *catalogue.image_shape(model))))
    graph = builder.build(catalogue.build(model, {}).lower(builder, 0, ""))
    dtype = "float32" if precision == "tf32" else precision
    layers: dict[ConvolutionKey, str] = {}
    for node in graph.nodes:
        if not isinstance(node.spec, Conv2dSpec):
            continue
        x, y, window = graph.tensors[node.inputs[0]].shape, graph.tensors[node.output].shape, node.spec.window
        where = (window.stride, window.padding, window.dilation, node.spec.groups, dtype, precision)
        first: tuple = () if node.inputs[0] == 0 else ("input",)
        for kind in ("forward", "weight", *first):
            fused = "bias" if kind == "forward" and node.spec.bias else ""
            layers.setdefault(ConvolutionKey(kind, x, node.spec.weight_shape, y, *where, fused), node.name)
    return layers


def build_plans(device: Device, report: StageReport, model: str, batch: int, precision: Precision) -> None:
    """The plan of every convolution of a training step."""
    begin, failures, largest, wanted = time.perf_counter(), [], 0, keys(model, batch, precision)
    for key, layer in wanted.items():
        try:
            largest = max(largest, device.convolution(key).workspace_bytes)
        except Exception as error:
            failures.append(f"{layer} {key.kind}: {type(error).__name__}: {str(error)[:200]}")
    seconds = time.perf_counter() - begin
    name = f"{model} {batch} {precision}"
    report.add(f"plans {name}", {"plans": len(wanted), "seconds": seconds, "workspace_bytes": largest, "failures": failures})
    report.check(f"plans of {name}", not failures, failures[0] if failures else f"{len(wanted)} plans in {seconds:.1f} s")
    report.note(f"{name}: {len(wanted)} plans")
