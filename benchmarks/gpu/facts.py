"""Stage 1: which device, which software, and what a copy, a matrix product and a launch cost."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from benchmarks.gpu.settings import Settings
from benchmarks.gpu.stage_report import StageReport
from hpctrain.bench.machine import machine

_PACKAGES = (
    "numpy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "nvidia-cuda-nvrtc",
    "nvidia-nccl-cu13",
    "mpi4py",
    "mpich",
    "torch",
)
_PROGRAMS = {
    "nvidia_smi": [
        "nvidia-smi",
        "--format=csv",
        "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit",
    ],
    "gxx": ["g++", "--version"],
    "nvcc": ["nvcc", "--version"],
}
_COPY_BYTES = 1 << 30
_PRODUCT_SIZE = 8192
_FACTORS = (2654435761, 2246822519)
_LAUNCHES, _REPEATS = 200, 9
_NOTHING = 'extern "C" __global__ void nothing() {}'


def run(settings: Settings, report: StageReport) -> None:
    """Record the facts; on a GPU also its speeds, which must be positive and finite to count as checked."""
    report.add("machine", {name: value for name, value in machine().items() if name != "node"})
    report.add("versions", versions(_PACKAGES))
    for name, command in _PROGRAMS.items():
        report.add(name, output_of(command))
    device = settings.make_device()
    facts = {name: getattr(device, name) for name in ("name", "capability", "multiprocessors", "dtypes")}
    report.add("device_facts", facts)
    report.check("the device says what it is", bool(device.name) and device.multiprocessors > 0, device.name)
    report.note(f"{device.name}, {device.multiprocessors} multiprocessors")
    if settings.emulated:
        report.note("an emulated device has no speed")
        return
    measure(report)


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of what is installed; None where it is not."""
    numbers: dict[str, str | None] = {}
    for package in packages:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            numbers[package] = None
    return numbers


def output_of(command: Sequence[str], seconds: float = 20.0) -> str:
    """The output of a program, or why there is none."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not here"
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    return done.stdout if done.returncode == 0 else f"code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"


def measure(report: StageReport) -> None:
    """Speeds by CuPy alone, so that they stand whatever this package does."""
    import cupy

    figures: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
        ("copy", "TB/s", copy_rate),
        ("product", "TFLOP/s", product_rate),
        ("launch", "us", launch_microseconds),
        ("graph_launch", "us", graph_launch_microseconds),
        ("graph_kernel", "us", graph_kernel_microseconds),
    )
    report.add("cuda", {"runtime": cupy.cuda.runtime.runtimeGetVersion(), "driver": cupy.cuda.runtime.driverGetVersion()})
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    report.add(
        "cuda_properties",
        {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in properties.items()
            if isinstance(value, int | float | str) or name == "name"
        },
    )
    for name, unit, function in figures:
        try:
            value = function(cupy)
        except Exception as error:  # the others may still be measured
            report.check(f"{name} is measured", False, f"{type(error).__name__}: {error}")
            continue
        report.add(name, {"value": value, "unit": unit})
        report.check(f"{name} has a finite speed", bool(np.isfinite(value)) and value > 0.0, f"{value:.4g} {unit}")
        report.note(f"{name.replace('_', ' ')} {value:.3g} {unit}")
    try:
        report.add("cudnn_device_properties", cudnn_properties())
    except Exception as error:
        report.check("cuDNN describes the device", False, f"{type(error).__name__}: {error}")


def cudnn_properties() -> Any:
    """This device in the words of cuDNN: with them, plans are made without the device."""
    import cudnn

    text = cudnn.create_device_properties(0).serialize()
    return json.loads(text if isinstance(text, str) else bytes(text).decode())


def event_seconds(cupy: Any, work: Callable[[], None], repeats: int = _REPEATS) -> float:
    """Median seconds of `work` on the device, by its own events, after one turn to warm up."""
    stream, seconds = cupy.cuda.get_current_stream(), []
    for _ in range(repeats + 1):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return float(np.median(seconds[1:]))


def host_seconds(cupy: Any, work: Callable[[], None], repeats: int = _REPEATS) -> float:
    """Median seconds until `work` is enqueued; the device is idle before."""
    seconds = []
    for _ in range(repeats + 1):
        cupy.cuda.get_current_stream().synchronize()
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    cupy.cuda.get_current_stream().synchronize()
    return float(np.median(seconds[1:]))


def copy_rate(cupy: Any) -> float:
    """TB/s of a copy within the device, counting bytes read and written."""
    source, target = (cupy.ones(_COPY_BYTES, cupy.uint8) for _ in range(2))
    return (
        2
        * _COPY_BYTES
        / event_seconds(
            cupy, lambda: target.data.copy_from_device_async(source.data, _COPY_BYTES, cupy.cuda.get_current_stream())
        )
        / 1e12
    )


def product_rate(cupy: Any) -> float:
    """TFLOP/s of a large float16 product with sums in float32: bfloat16 has the same rate."""
    numbers = cupy.arange(_PRODUCT_SIZE**2, dtype=cupy.uint32).reshape(_PRODUCT_SIZE, -1)
    # Digits that look random: products of zeros or of equal numbers take less power, and so less time.
    a, b = (((numbers * cupy.uint32(factor) >> 20).astype(cupy.float32) / 2048 - 1).astype(cupy.float16) for factor in _FACTORS)
    out = cupy.empty_like(a)
    return 2 * _PRODUCT_SIZE**3 / event_seconds(cupy, lambda: cupy.matmul(a, b, out=out)) / 1e12


def launch_microseconds(cupy: Any) -> float:
    """The host's time to launch an empty kernel."""
    return host_seconds(cupy, lambda: _launch_many(cupy)) / _LAUNCHES * 1e6


def graph_launch_microseconds(cupy: Any) -> float:
    """The host's time to launch a graph of many empty kernels."""
    graph, stream = _graph(cupy)
    return host_seconds(cupy, lambda: graph.launch(stream)) * 1e6


def graph_kernel_microseconds(cupy: Any) -> float:
    """The device's time for each empty kernel in a graph."""
    graph, stream = _graph(cupy)
    with stream:
        return event_seconds(cupy, lambda: graph.launch(stream)) / _LAUNCHES * 1e6


def _launch_many(cupy: Any) -> None:
    kernel = cupy.RawKernel(_NOTHING, "nothing")
    for _ in range(_LAUNCHES):
        kernel((1,), (32,), ())


def _graph(cupy: Any) -> tuple[Any, Any]:
    _launch_many(cupy)  # compiled before the capture
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        _launch_many(cupy)
        return stream.end_capture(), stream
