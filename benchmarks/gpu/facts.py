"""Stage `facts`: which device, which software, and what a copy, a matrix product and a launch cost."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from benchmarks.gpu.settings import Settings
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda import libraries
from hpctrain.backend.cuda.device import bfloat16_bits
from hpctrain.bench.machine import machine_facts

if TYPE_CHECKING:
    from hpctrain.backend.cuda.cupy_device import CupyDevice

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
_LAUNCHES, _REPEATS = 200, 9
_NOTHING = 'extern "C" __global__ void nothing() {}'


def run(settings: Settings, report: StageReport) -> None:
    """Record the facts and, on a GPU, its speeds; a check fails if a speed is not positive and finite."""
    report.add("machine", {name: value for name, value in machine_facts().items() if name != "node"})
    report.add("versions", versions(_PACKAGES))
    for name, command in _PROGRAMS.items():
        report.add(name, output_of(command))
    print(json.dumps(report.content, indent=1), flush=True)  # in the log before a device that may fail
    device = settings.make_device()
    facts = {name: getattr(device, name) for name in ("name", "capability", "multiprocessors", "dtypes")}
    report.add("device_facts", facts)
    report.check("the device says what it is", bool(device.name) and device.multiprocessors > 0, device.name)
    report.note(f"{device.name}, {device.multiprocessors} multiprocessors")
    if settings.emulated:
        report.note("an emulated device has no speed")
        return
    add_properties(report)
    measure(Bench(cast("CupyDevice", device)), report)


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the version of each package; None if it is not installed."""
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


def add_properties(report: StageReport) -> None:
    """Record what CUDA and cuDNN say of the device; with the latter, plans are made without the device."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    kept = {name: value for name, value in properties.items() if isinstance(value, int | float)}
    report.add("cuda_properties", kept | {"name": properties["name"].decode()})
    try:
        text = libraries.library().create_device_properties(0).serialize()
        report.add("cudnn_device_properties", json.loads(text if isinstance(text, str) else bytes(text).decode()))
    except Exception as error:
        report.check("cuDNN describes the device", False, f"{type(error).__name__}: {error}")


class Bench:
    """Measures speeds of a GPU by its events or by the host's clock: medians of 9 turns after one to warm up."""

    def __init__(self, device: CupyDevice) -> None:
        self._device, self._stream = device, device.stream("facts")
        self._nothing = device.kernel("nothing", "nothing", text=_NOTHING)

    def copy(self) -> float:
        """Return TB/s of a copy within the device, counting bytes read and written."""
        source, target = (self._device.allocate(_COPY_BYTES) for _ in range(2))
        return 2 * _COPY_BYTES / self._event_seconds(lambda: self._device.copy(self._stream, target, source)) / 1e12

    def product(self) -> float:
        """Return TFLOP/s of a large bfloat16 product of random numbers; zeros would take less power, and so less time."""
        shape, random = (_PRODUCT_SIZE, _PRODUCT_SIZE), np.random.default_rng(0)
        a, b, c = (self._device.allocate(2 * _PRODUCT_SIZE**2).view("bfloat16").reshape(shape) for _ in range(3))
        host = self._device.pinned(a.nbytes)
        host.view(np.uint16)[:] = bfloat16_bits(random.standard_normal(_PRODUCT_SIZE**2, np.float32))
        for array in (a, b):
            self._device.upload(self._stream, array, host)
        seconds = self._event_seconds(lambda: self._device.gemm(self._stream, a, b, c, precision="bfloat16"))
        return 2 * _PRODUCT_SIZE**3 / seconds / 1e12

    def upload(self) -> float:
        """Return GB/s from pinned memory to the device."""
        host, target = self._device.pinned(_COPY_BYTES), self._device.allocate(_COPY_BYTES)
        return _COPY_BYTES / self._event_seconds(lambda: self._device.upload(self._stream, target, host)) / 1e9

    def launch(self) -> float:
        """Return the host's microseconds to launch an empty kernel."""
        return self._host_seconds(self._launch_many) / _LAUNCHES * 1e6

    def graph_launch(self) -> float:
        """Return the host's microseconds to launch a graph of 200 empty kernels."""
        graph = self._graph()
        return self._host_seconds(lambda: graph.launch(self._stream)) * 1e6

    def graph_kernel(self) -> float:
        """Return the device's microseconds for each empty kernel of a graph."""
        graph = self._graph()
        return self._event_seconds(lambda: graph.launch(self._stream)) / _LAUNCHES * 1e6

    def _launch_many(self) -> None:
        for _ in range(_LAUNCHES):
            self._nothing(self._stream, (1,), (32,))

    def _graph(self) -> Any:
        self._launch_many()
        with self._device.capture(self._stream) as graph:
            self._launch_many()
        return graph

    def _event_seconds(self, work: Callable[[], None]) -> float:
        return self._device.median_seconds(self._stream, work)

    def _host_seconds(self, work: Callable[[], None]) -> float:
        seconds = []
        for _ in range(_REPEATS + 1):
            self._stream.synchronize()
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
        self._stream.synchronize()
        return float(np.median(seconds[1:]))


_SPEEDS = {
    "copy": "TB/s",
    "product": "TFLOP/s",
    "upload": "GB/s",
    "launch": "us",
    "graph_launch": "us",
    "graph_kernel": "us",
}


def measure(bench: Bench, report: StageReport) -> None:
    """Measure each speed; add a failed check for one that cannot be measured."""
    for name, unit in _SPEEDS.items():
        try:
            value = getattr(bench, name)()
        except Exception as error:  # the others may still be measured
            traceback.print_exc()
            report.check(f"{name} is measured", False, f"{type(error).__name__}: {error}")
            continue
        report.add(name, {"value": value, "unit": unit})
        report.check(f"{name} has a finite speed", bool(np.isfinite(value)) and value > 0.0, f"{value:.4g} {unit}")
        report.note(f"{name.replace('_', ' ')} {value:.3g} {unit}")
