"""Stage `ladder`: everything that a training needs from a GPU, one rung after another.

The traceback of a rung that fails goes to the log. Only rungs that need its result fail with it. If the rung `device` fails, the
other stages are skipped.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.build import kernel_names
from benchmarks.gpu.facts import output_of
from benchmarks.gpu.operator_run import OperatorRun
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda import libraries
from hpctrain.backend.cuda import sources as sources_rest
from hpctrain.backend.cuda.device import ConvolutionKey, Device, DeviceArray, DeviceStream, bfloat16_bits, bfloat16_values
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import BatchNormSpec

#: libraries whose files are recorded: those that this process has loaded, and those that the system's loader finds
_LIBRARIES = re.compile(r"\S*lib(?:cuda|cudart|cublas\w*|cudnn\w*|nccl|nvrtc[\w-]*|torch\w*)\.so\S*")
_PACKAGES = re.compile(r"cupy|nvidia|cuda|torch|numpy|mpi|pydantic|h5py", re.IGNORECASE)
_TOLERANCE = 1e-2  # of bfloat16


class Ladder:
    """The rungs in their order. Each is a method that returns a finding for the report, or raises."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @cached_property
    def _device(self) -> Device:
        if self._settings.emulated:
            return self._settings.make_device()
        from hpctrain.backend.cuda.cupy_device import CupyDevice

        return CupyDevice(0)

    @cached_property
    def _stream(self) -> DeviceStream:
        return self._device.stream("compute")

    def driver(self) -> Any:
        """Return the output of nvidia-smi."""
        return output_of(["nvidia-smi"])

    def packages(self) -> Any:
        """Return the versions of Python and of the packages in `_PACKAGES`."""
        found = {item.metadata["Name"]: item.version for item in distributions() if _PACKAGES.search(item.metadata["Name"] or "")}
        return {"python": sys.version.split()[0], **dict(sorted(found.items()))}

    def libraries_of_the_system(self) -> Any:
        """Return the libraries of CUDA that the system's loader finds by name."""
        return _LIBRARIES.findall(output_of(["ldconfig", "-p"]))

    def cupy(self) -> Any:
        """Import CuPy; return the seconds and the GPUs that it sees."""
        if self._settings.emulated:
            return "not needed by the emulated device"
        begin = time.perf_counter()
        import cupy

        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "gpus": cupy.cuda.runtime.getDeviceCount(), "driver": cupy.cuda.runtime.driverGetVersion()}

    def device(self) -> Any:
        """Make the device, which loads cuBLAS and NVRTC, and return its properties."""
        return {"name": self._device.name, "capability": self._device.capability, "bytes": self._device.memory_bytes}

    def zeroed_memory(self) -> Any:
        """Check that allocated memory is zero."""
        found = self._download(self._device.allocate(1 << 20))
        assert not found.any(), f"{np.count_nonzero(found)} bytes are not zero"
        return f"{found.size} bytes"

    def pinned_copies(self) -> Any:
        """Copy bytes to the device, within it and back, and wait for an event."""
        values = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
        first, second, event = self._upload(values), self._device.allocate(values.size), self._device.event()
        self._device.copy(self._stream, second, first)
        self._stream.record(event)
        event.synchronize()
        assert event.done, "an event that was waited for is not done"
        np.testing.assert_array_equal(self._download(second), values)
        return f"{values.size} bytes there and back"

    def module(self) -> Any:
        """Compile and load one source, and launch one kernel."""
        x = np.linspace(-1, 1, 4096, dtype=np.float32)
        array = self._upload(x.view(np.uint8)).view("float32")
        begin = time.perf_counter()
        kernel = self._device.kernel("elementwise", "relu_forward_f32_w4")
        seconds = time.perf_counter() - begin
        kernel(self._stream, (8,), (128,), array, array, np.int64(1024))
        np.testing.assert_array_equal(self._download(array).view(np.float32), np.maximum(x, 0))
        return {"seconds": seconds}

    def product(self) -> Any:
        """Compare a bfloat16 product of cuBLAS that adds to float32 sums."""
        random = np.random.default_rng(1)
        bits = [bfloat16_bits(random.standard_normal(shape)).reshape(shape) for shape in ((96, 64), (64, 128))]
        a, b = (self._upload(one.reshape(-1).view(np.uint8)).view("bfloat16").reshape(one.shape) for one in bits)
        c = self._device.allocate(4 * 96 * 128).view("float32").reshape(96, 128)
        for accumulate in (False, True):
            self._device.gemm(self._stream, a, b, c, accumulate=accumulate, precision="bfloat16")
        left, right = (bfloat16_values(one).reshape(one.shape).astype(np.float64) for one in bits)
        return self._compare(self._download(c.reshape(-1).view("uint8")).view(np.float32).reshape(96, 128), 2 * left @ right)

    def cudnn(self) -> Any:
        """Import cuDNN's frontend, which must not load PyTorch; return the seconds and the version."""
        if self._settings.emulated:
            return "not needed by the emulated device"
        begin = time.perf_counter()
        library = libraries.library()
        seconds, torch = time.perf_counter() - begin, "torch" in sys.modules
        assert not torch, f"PyTorch is loaded, in {seconds:.1f} s"
        return {"seconds": seconds, "version": library.backend_version_string()}

    def handle(self) -> Any:
        """Make a handle of cuDNN."""
        if self._settings.emulated:
            return "not needed by the emulated device"
        from hpctrain.backend.cuda.libraries import new_handle

        return hex(new_handle())

    def plan(self) -> Any:
        """Make and run one plan."""
        return self._convolve(lambda work: work())

    def captured_plan(self) -> Any:
        """Run the same plan in a captured graph."""

        def capture(work: Callable[[], None]) -> None:
            with self._device.capture(self._stream) as graph:
                work()
            graph.launch(self._stream)

        return self._convolve(capture)

    def sources(self) -> Any:
        """Load one kernel of each source, even if others fail; return the seconds by source."""
        seconds, faults = {}, []
        for source in sources_rest.names():
            begin = time.perf_counter()
            try:
                self._device.kernel(source, kernel_names(source, on_cpu="float64" in self._device.dtypes)[0])
            except Exception as error:
                faults.append(f"{source}: {type(error).__name__}: {str(error)[:300]}")
            seconds[source] = round(time.perf_counter() - begin, 2)
        assert not faults, "; ".join(faults)
        return seconds

    def subnormals(self) -> Any:
        """Check that products of subnormal numbers, such as a dead channel's momentum, have the bits of the host."""
        kernels = CudaKernelSet(CudaRuntime(self._device, self._stream, "float32"))
        array, zeros = (kernels.arithmetic.zeros(256, "float32") for _ in range(2))
        values = (np.arange(1, 257) * 1e-42).astype(np.float32)
        kernels.arithmetic.from_host(array, values)
        kernels.arithmetic.average_into(array, zeros, 0.75)
        np.testing.assert_array_equal(kernels.arithmetic.to_host(array), values * np.float32(0.75))
        return f"{values[0]:.1e} to {values[-1]:.1e}"

    def operator(self) -> Any:
        """Compare a batch norm's forward in bfloat16."""
        spec, random = BatchNormSpec(64, relu=True), np.random.default_rng(3)
        x = bfloat16_values(bfloat16_bits(random.standard_normal((8, 14, 14, 64)))).astype(np.float64).reshape(8, 14, 14, 64)
        parameters = {"weight": np.ones(64), "bias": np.zeros(64)}
        kernels = CudaKernelSet(CudaRuntime(self._device, self._stream, "bfloat16"))
        found = OperatorRun(kernels, spec, [x], parameters, "bfloat16").forward()["output"]
        return self._compare(found, OperatorRun(NumpyKernelSet(), spec, [x], parameters, "float64").forward()["output"])

    def loaded_libraries(self) -> Any:
        """Return the files of CUDA's libraries that this process has loaded."""
        maps = Path("/proc/self/maps").read_text()
        return sorted({match for match in _LIBRARIES.findall(maps) if match.startswith("/")})

    def _convolve(self, run: Callable[[Callable[[], None]], None]) -> str:
        n, side, channels, filters = 4, 14, 64, 32
        key = ConvolutionKey(
            "forward",
            (n, side, side, channels),
            (filters, 1, 1, channels),
            (n, side, side, filters),
            (1, 1),
            (0,) * 4,
            (1, 1),
            1,
            "bfloat16",
            "bfloat16",
        )
        random = np.random.default_rng(2)
        bits = [bfloat16_bits(random.standard_normal(shape)).reshape(shape) for shape in (key.x, key.w)]
        x, w = (self._upload(one.reshape(-1).view(np.uint8)).view("bfloat16").reshape(one.shape) for one in bits)
        y = self._device.allocate(2 * n * side * side * filters).view("bfloat16").reshape(key.y)
        plan = self._device.convolution(key)
        workspace = self._device.allocate(plan.workspace_bytes) if plan.workspace_bytes else None
        run(lambda: plan.run(self._stream, x, w, y, workspace))
        image, filters_ = (bfloat16_values(one).reshape(one.shape).astype(np.float64) for one in bits)
        found = bfloat16_values(self._download(y.reshape(-1).view("uint8")).view(np.uint16)).reshape(key.y)
        return self._compare(found, np.einsum("nhwc,kc->nhwk", image, filters_[:, 0, 0]))

    @staticmethod
    def _compare(found: np.ndarray, expected: np.ndarray) -> str:
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        assert error <= _TOLERANCE, f"off by {error:.2e} of {_TOLERANCE:.0e}"
        return f"off by {error:.1e}"

    def _upload(self, values: np.ndarray) -> DeviceArray:
        host, array = self._device.pinned(values.size), self._device.allocate(values.size)
        host[:] = values
        self._device.upload(self._stream, array, host)
        self._stream.synchronize()
        return array

    def _download(self, array: DeviceArray) -> np.ndarray:
        host = self._device.pinned(array.nbytes)
        self._device.download(self._stream, host, array)
        self._stream.synchronize()
        return host


RUNGS: tuple[Callable[[Ladder], Any], ...] = (
    Ladder.driver,
    Ladder.packages,
    Ladder.libraries_of_the_system,
    Ladder.cupy,
    Ladder.device,
    Ladder.zeroed_memory,
    Ladder.pinned_copies,
    Ladder.module,
    Ladder.product,
    Ladder.cudnn,
    Ladder.handle,
    Ladder.plan,
    Ladder.captured_plan,
    Ladder.sources,
    Ladder.subnormals,
    Ladder.operator,
    Ladder.loaded_libraries,
)


def run(settings: Settings, report: StageReport) -> None:
    """Run all rungs. Each adds a check."""
    ladder, findings = Ladder(settings), dict[str, Any]()
    report.add("variables", {name: value for name, value in os.environ.items() if re.match("CUDA|NVIDIA|CUPY|LD_|XDG", name)})
    for rung in RUNGS:
        name, begin = rung.__name__.replace("_", " "), time.perf_counter()
        print(f"---- {name}", flush=True)
        try:
            found = rung(ladder)
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            report.check(name, False, f"{type(error).__name__}: {first[:500]}")
            continue
        print(found, flush=True)
        findings[name] = found
        report.add("findings", findings)
        report.check(name, True, f"{time.perf_counter() - begin:.2f} s")
    report.note(f"{len(findings)} of {len(RUNGS)} rungs")
