"""A package `cupy` whose GPU is this host: memory is the host's, kernels are built by g++, streams do everything at once.

It has the part of CuPy that `hpctrain.backend.cuda.cupy_device` uses, refuses what CuPy would take wrongly, and keeps a record of
calls. So the same operators run through `CupyDevice` as through a GPU. `tests/backend/cuda/test_cupy.py` compares the
signatures with the real package where it is installed.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.device import DeviceArray, bfloat16_bits, bfloat16_values
from hpctrain_testing.emulator import kernels
from hpctrain_testing.emulator.kernels import CpuKernel

#: the module that imports CuPy
IMPORTER = "hpctrain.backend.cuda.cupy_device"

_NUMPY_SCALARS = tuple(np.dtype(code).type for code in "?bhilqBHILQefd")
_DATA_TYPES = {0: np.dtype("float32"), 14: np.dtype("uint16")}
_CUBLAS_INVALID_VALUE = 7


class CUDARuntimeError(RuntimeError):
    """CuPy's error of CUDA calls."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class NcclError(RuntimeError):
    """CuPy's error of NCCL's calls."""


class NVRTCError(RuntimeError):
    """CuPy's error of NVRTC's calls."""


class FakeCupy:
    """The package and what happened to it.

    Attributes:
        calls: (name of a call, its arguments), in their order. modules: by name, for sys.modules.
        gpus: how many there are; a negative number: there is no driver. free_bytes: of the GPU's memory.
        without_nccl: NCCL is not installed. nccl_failing: the call of NCCL's that fails.
        nvrtc: the compiler. capturing: a capture is going on. milliseconds: the time, for events that take it.
        name: of every GPU. uuids: of the GPUs, by their index; a slice of a GPU has one of its own.
        nccl_version: as NCCL's number. event_status: the answer where an event is asked for, CUDA's number.
    """

    def __init__(
        self,
        *,
        gpus: int = 1,
        capability: tuple[int, int] = (9, 0),
        free_bytes: int = 1 << 30,
        without_nccl: bool = False,
        nccl_failing: str = "",
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.gpus, self.capability, self.free_bytes = gpus, capability, free_bytes
        self.capturing = False
        self.name, self.nccl_version = "Fake GPU", 22707
        self.uuids = [bytes([0xA0 + index]) * 16 for index in range(max(gpus, 0))]
        self.nvrtc = FakeNvrtc()
        self.without_nccl, self.nccl_failing = without_nccl, nccl_failing
        self.captured: list[Callable[[], None]] = []
        self.current = -1
        self.milliseconds = 0.0
        self.event_status = 0
        self.cublas = FakeCublas(self._enqueue)
        self.modules = self._modules()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make imports of CuPy, and loads of cuBLAS, give this one from here on."""
        real = ctypes.CDLL
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules.pop(IMPORTER, None)  # not restored: a module that was loaded with a fake must not come back after the test
        monkeypatch.setattr(ctypes, "CDLL", lambda name, *more: self.cublas if name == "libcublas.so.13" else real(name, *more))

    def names(self) -> list[str]:
        """The names of the calls."""
        return [call[0] for call in self.calls]

    def _modules(self) -> dict[str, Any]:
        cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
        cuda.runtime = self._runtime()  # type: ignore[attr-defined]
        cuda.Device, cuda.Memory = self._device, self._memory  # type: ignore[attr-defined]
        cuda.alloc_pinned_memory = self._pinned  # type: ignore[attr-defined]
        cuda.Stream, cuda.Event = self._stream, self._event  # type: ignore[attr-defined]
        cuda.get_elapsed_time = lambda begin, end: end.milliseconds - begin.milliseconds  # type: ignore[attr-defined]
        nccl = ModuleType("cupy.cuda.nccl")
        nccl.available, nccl.NcclError, nccl.NCCL_SUM = not self.without_nccl, NcclError, 0  # type: ignore[attr-defined]
        nccl.NCCL_UINT8, nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64 = 1, 7, 8  # type: ignore[attr-defined]
        nccl.get_version = lambda: self.nccl_version  # type: ignore[attr-defined]
        nccl.get_unique_id, nccl.NcclCommunicator = self._unique_id, self._nccl_group  # type: ignore[attr-defined]
        nccl.groupStart = lambda: self._enqueue("groupStart", lambda: None)  # type: ignore[attr-defined]
        nccl.groupEnd = lambda: self._enqueue("groupEnd", lambda: None)  # type: ignore[attr-defined]
        cuda.nccl = nccl  # type: ignore[attr-defined]
        cuda.function = SimpleNamespace(Module=lambda: _Module(self))  # type: ignore[attr-defined]
        cupy.cuda, cupy.__version__ = cuda, "14.2.0"  # type: ignore[attr-defined]
        libs = ModuleType("cupy_backends.cuda.libs")
        libs.cublas, libs.nvrtc = self.cublas, self.nvrtc  # type: ignore[attr-defined]
        return {
            "cupy": cupy,
            "cupy.cuda": cuda,
            "cupy.cuda.nccl": nccl,
            "cupy_backends": ModuleType("cupy_backends"),
            "cupy_backends.cuda": ModuleType("cupy_backends.cuda"),
            "cupy_backends.cuda.libs": libs,
        }

    def _runtime(self) -> SimpleNamespace:
        return SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=self._count,
            getDeviceProperties=self._properties,
            memGetInfo=lambda: (self.free_bytes, 1 << 30),
            memset=lambda pointer, value, size: self._do("memset", lambda: ctypes.memset(pointer, value, size)),
            memsetAsync=self._memset,
            deviceGetPCIBusId=lambda index: f"0000:0{index}:00.0",
            streamSynchronize=lambda stream: self._do("streamSynchronize", lambda: None, stream),
            memcpyAsync=self._memcpy,
            runtimeGetVersion=lambda: 13020,
            driverGetVersion=lambda: 13000,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyDeviceToDevice=3,
            streamCaptureModeThreadLocal=1,
            eventQuery=self._query,
        )

    def _unique_id(self) -> tuple[int, ...]:
        self._nccl_call("get_unique_id")
        return tuple(range(128))

    def _nccl_group(self, ndev: int, number: tuple[int, ...], rank: int) -> FakeNcclGroup:
        assert number == tuple(range(128))
        self._nccl_call("NcclCommunicator", ndev, rank)
        return FakeNcclGroup(self, ndev)

    def _nccl_call(self, name: str, *details: object) -> None:
        self.calls.append((name, *details))
        if self.nccl_failing == name:
            raise NcclError(f"NCCL_ERROR_SYSTEM_ERROR: {name}")

    def _count(self) -> int:
        if self.gpus < 0:
            raise CUDARuntimeError(35, "cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        if self.gpus == 0:
            raise CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.gpus

    def _properties(self, index: int) -> dict[str, Any]:
        major, minor = self.capability
        return {"name": self.name.encode(), "major": major, "minor": minor, "multiProcessorCount": 2, "uuid": self.uuids[index]}

    def _device(self, index: int) -> SimpleNamespace:
        def use() -> None:
            if index >= self._count():
                raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")
            self.current = index

        return SimpleNamespace(use=use)

    def _do(self, name: str, work: Callable[[], object], *details: object) -> None:
        """A call that CUDA carries out at once, and refuses inside a capture."""
        self.calls.append((name, *details))
        if self.capturing:
            raise CUDARuntimeError(900, "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")
        work()

    def _enqueue(self, name: str, work: Callable[[], object], *details: object) -> None:
        self.calls.append((name, *details))
        if self.capturing:
            self.captured.append(lambda: work() and None)
        else:
            work()

    def _memory(self, size: int) -> _Memory:
        self._do("malloc", lambda: None, size)
        if size > self.free_bytes:
            raise CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        return _Memory(size)

    def _pinned(self, size: int) -> bytearray:
        self._do("hostAlloc", lambda: None, size)
        return bytearray(b"\x7f") * (-(-size // 512) * 512)  # CuPy's pool rounds up, and clears nothing

    def _memset(self, pointer: int, value: int, size: int, stream: int) -> None:
        assert stream, "work on the default stream waits for others"
        self._enqueue("memsetAsync", lambda: ctypes.memset(pointer, value, size))

    def _memcpy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert stream, "a copy on the default stream waits for others"
        self._enqueue("memcpyAsync", lambda: ctypes.memmove(target, source, size), size, kind, stream)

    def _stream(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None) -> _Stream:
        assert non_blocking, "a stream that waits for the default one"
        return _Stream(self)

    def _event(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> Any:
        if not disable_timing:
            return _TimedEvent(self)
        return SimpleNamespace(ptr=1, synchronize=lambda: self._do("eventSynchronize", self._fail))

    def _query(self, event: int) -> int:
        assert event, "an event that was not made"
        self._do("eventQuery", lambda: None)
        return self.event_status

    def _fail(self) -> None:
        if self.event_status:
            raise CUDARuntimeError(self.event_status, "cudaErrorIllegalAddress: an illegal memory access was encountered")


class FakeNvrtc:
    """CuPy's module of NVRTC: a "binary" is a mark, the options and the text, which `_Module` builds by g++.

    Attributes:
        NVRTCError: its error. missing: it is not installed. architectures: that it compiles for. compiled: the options of each
            compilation, in their order. programs: those that are not destroyed yet.
    """

    NVRTCError = NVRTCError

    def __init__(self) -> None:
        self.missing = False
        self.architectures: tuple[int, ...] = (75, 80, 90, 100)
        self.compiled: list[tuple[str, ...]] = []
        self.programs: dict[int, list[Any]] = {}

    def getVersion(self) -> tuple[int, int]:
        if self.missing:
            raise RuntimeError('Failure finding "libnvrtc.so.13": No such file\nand where it was looked for')
        return (0, 0)  # a version of no real NVRTC, as binaries are cached by version

    def getSupportedArchs(self) -> tuple[int, ...]:
        return self.architectures

    def createProgram(self, src: str, name: str, headers: tuple[str, ...], include_names: tuple[str, ...]) -> int:
        assert not headers
        assert not include_names
        self.programs[len(self.programs) + 1] = [src, name, None]
        return len(self.programs)

    def compileProgram(self, prog: int, options: tuple[str, ...]) -> None:
        self.compiled.append(options)
        text, (architecture,) = self.programs[prog][0], [one.split("_")[1] for one in options if one.startswith("-arch=")]
        if int(architecture) not in self.architectures:
            raise NVRTCError("NVRTC_ERROR_INVALID_OPTION (5)")
        if '#include "' in text.replace('#include "cuda_on_cpu.h"', "") or "#error" in text:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        self.programs[prog][2] = options

    def getProgramLog(self, prog: int) -> str:
        name = self.programs[prog][1]
        return "" if self.programs[prog][2] else "".join(f"{name}({line}): error: no such thing\n\n" for line in range(1, 100))

    def getCUBIN(self, prog: int) -> bytes:
        return self._compiled(prog, "sm")

    def getPTX(self, prog: int) -> bytes:
        return self._compiled(prog, "compute")

    def destroyProgram(self, prog: int) -> None:
        del self.programs[prog]

    def _compiled(self, prog: int, kind: str) -> bytes:
        text, _, options = self.programs[prog]
        assert any(one.startswith(f"-arch={kind}_") for one in options), f"NVRTC makes no such binary with {options}"
        return b"\0".join((b"compiled", kind.encode(), text.encode()))


class _Module:
    """A loaded module; its kernels are built here."""

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy, self._text = cupy, ""

    def load(self, cubin: bytes) -> None:
        mark, _, text = cubin.split(b"\0")
        assert mark == b"compiled", "CUDA_ERROR_INVALID_IMAGE"
        self._cupy._do("loadModule", lambda: None)
        self._text = text.decode()

    def get_function(self, name: str) -> Callable[..., None]:
        def enqueue(stream: object, work: Callable[[], None], text: str, kept: Sequence[DeviceArray] = ()) -> None:
            self._cupy._enqueue("launch", work, text)

        kernel = CpuKernel(kernels.build(self._text), name, lambda: 0, enqueue, hex)

        def function(grid: Sequence[int], block: Sequence[int], args: tuple[Any, ...], *, stream: _Stream) -> None:
            assert isinstance(grid, tuple)
            assert isinstance(block, tuple)
            assert all(isinstance(value, _NUMPY_SCALARS) for value in args), f"CuPy guesses the types of {args}"
            assert stream.ptr
            kernel(None, grid, block, *args)

        return function


class FakeNcclGroup:
    """A group of NCCL. Of one GPU, sums and broadcasts are copies; of several ones nothing is done, but calls are kept."""

    def __init__(self, cupy: FakeCupy, size: int) -> None:
        self._cupy, self._size = cupy, size

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        assert op == 0
        self._move("allReduce", sendbuf, recvbuf, count, datatype, stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        assert op == 0
        self._move("reduce", sendbuf, recvbuf, count, datatype, stream, root)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._move("broadcast", sendbuff, recvbuff, count, datatype, stream, root)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._move("send", sendbuf, sendbuf, count, datatype, stream, peer)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._move("recv", recvbuf, recvbuf, count, datatype, stream, peer)

    def check_async_error(self) -> None:
        self._cupy._nccl_call("check_async_error")

    def abort(self) -> None:
        self._cupy._nccl_call("abort")

    def _move(self, name: str, source: int, target: int, count: int, datatype: int, stream: int, *details: int) -> None:
        assert stream, "work on the default stream waits for others"
        self._cupy._nccl_call(name, *details)
        size = count * {1: 1, 7: 4, 8: 8}[datatype]
        self._cupy._enqueue("nccl", lambda: ctypes.memmove(target, source, size) if self._size == 1 else None, size, stream)


class _Memory:
    """Host memory, filled with ones and aligned to 256 bytes."""

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, size)
        self._pages[:] = b"\xff" * size
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))


class _TimedEvent:
    """Takes the time of the fake's own clock, which stands still but for what a test adds to it."""

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy, self.milliseconds = cupy, math.nan

    def record(self, stream: _Stream) -> None:
        assert stream.ptr, "the time of the default stream"
        self._cupy.calls.append(("time",))
        self.milliseconds = self._cupy.milliseconds

    def synchronize(self) -> None:
        self._cupy._do("eventSynchronize", lambda: None)


class _Stream:
    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        self.ptr = id(self)

    def record(self, event: object) -> None:
        assert not isinstance(event, _TimedEvent), "events that take the time are slower"
        self._cupy.calls.append(("record", event))

    def wait_event(self, event: object) -> None:
        self._cupy.calls.append(("wait_event", event))

    def synchronize(self) -> None:
        self._cupy._do("streamSynchronize", lambda: None)

    def begin_capture(self, mode: int) -> None:
        self._cupy.calls.append(("begin_capture", mode))
        self._cupy.capturing, self._cupy.captured = True, []

    def end_capture(self) -> SimpleNamespace:
        self._cupy.calls.append(("end_capture",))
        self._cupy.capturing = False
        work = tuple(self._cupy.captured)

        def launch(stream: _Stream) -> None:
            assert stream.ptr
            self._cupy.calls.append(("graphLaunch",))
            for one in work:
                one()

        return SimpleNamespace(launch=launch)


class FakeCublas:
    """The functions of libcublas that we call, as its documentation defines them, on host memory.

    Attributes:
        failing: a function that fails. enqueue: takes the name of work, and the work.
    """

    def __init__(self, enqueue: Callable[..., None] = lambda name, work: work()) -> None:
        self.enqueue = enqueue
        self.calls: list[str] = []
        self.failing = ""
        self.stream = self.mode = 0
        self.workspace = (0, 0)
        self.compute_type = 0

    def cublasCreate_v2(self, handle: Any) -> int:
        handle._obj.value = 77
        return self._call("create")

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        assert handle.value == 77
        self.stream, self.workspace = stream.value, (0, 0)  # the workspace is that of the library again
        return self._call("setStream")

    def cublasSetWorkspace_v2(self, handle: Any, place: Any, size: Any) -> int:
        self.workspace = (place.value, size.value)
        return self._call("setWorkspace")

    def cublasSetMathMode(self, handle: Any, mode: Any) -> int:
        self.mode = mode.value
        return self._call("setMathMode")

    def cublasGemmEx(
        self,
        handle: Any,
        trans_a: Any,
        trans_b: Any,
        m: Any,
        n: Any,
        k: Any,
        alpha: Any,
        a: Any,
        a_type: Any,
        lda: Any,
        b: Any,
        b_type: Any,
        ldb: Any,
        beta: Any,
        c: Any,
        c_type: Any,
        ldc: Any,
        compute_type: Any,
        algorithm: Any,
    ) -> int:
        assert handle.value == 77
        assert algorithm.value == -1
        status = self._call("gemmEx")
        self.compute_type = compute_type.value
        transposed = (bool(trans_a.value), bool(trans_b.value))
        left = _columns(a, a_type, lda, (k, m) if trans_a.value else (m, k))
        right = _columns(b, b_type, ldb, (n, k) if trans_b.value else (k, n))
        out = _columns(c, c_type, ldc, (m, n))
        if left is None or right is None or out is None:
            return _CUBLAS_INVALID_VALUE
        scales = (alpha._obj.value, beta._obj.value)  # read now, as from the host's memory
        self.enqueue("gemmEx", lambda: _multiply(left, right, out, transposed, scales))
        return status

    def _call(self, name: str) -> int:
        self.calls.append(name)
        return 13 if name == self.failing else 0


def _multiply(
    left: np.ndarray, right: np.ndarray, out: np.ndarray, transposed: tuple[bool, bool], scales: tuple[float, float]
) -> None:
    a, b = (_values(one).T if turn else _values(one) for one, turn in zip((left, right), transposed, strict=True))
    result = scales[0] * (a @ b) + (scales[1] * _values(out) if scales[1] else 0.0)
    out[...] = bfloat16_bits(result) if out.dtype == np.uint16 else result


def _columns(place: Any, data_type: Any, leading: Any, shape: tuple[Any, Any]) -> np.ndarray | None:
    """The column-major matrix at an address; None where the leading dimension is too small."""
    rows, cols = (one.value for one in shape)
    if leading.value < max(1, rows):
        return None
    dtype = _DATA_TYPES[data_type.value]
    raw = (ctypes.c_uint8 * (leading.value * cols * dtype.itemsize)).from_address(place.value)
    whole: np.ndarray = np.ctypeslib.as_array(raw).view(dtype).reshape(cols, leading.value)
    return whole[:, :rows].T


def _values(matrix: np.ndarray) -> np.ndarray:
    return bfloat16_values(matrix) if matrix.dtype == np.uint16 else matrix
