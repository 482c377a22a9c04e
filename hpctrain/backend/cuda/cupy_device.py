"""A GPU through CuPy: memory, streams, events, kernels compiled by NVRTC, graphs, and links between GPUs by NCCL.

No other module imports CuPy. CuPy's arrays and memory pools are not used: each array is its own allocation, which is freed with
the last reference to it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from hpctrain.backend.arithmetic import Peers
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import (
    Argument,
    ConvolutionKey,
    DeviceArray,
    DeviceConvolution,
    DeviceEvent,
    DeviceStream,
    Extent,
    Precision,
)
from hpctrain.backend.cuda.libraries import WORKSPACE_BYTES, CudnnPlans, MatrixProducts, new_handle
from hpctrain.core.errors import BackendError
from hpctrain.core.text import size_text

_FIRST_WITH_SLICES = 23000  # NCCL 2.30 identifies devices by UUID, earlier versions by PCI bus, which slices of a GPU share


class CupyLinks:
    """Implementation of `DeviceLinks` by NCCL, on the stream at address `pointer`. The constructor waits for all `peers`.

    Raises:
        BackendError: NCCL cannot connect the GPUs.
    """

    def __init__(self, peers: Peers, pointer: int) -> None:
        self._library: Any = _nccl()
        self._pointer = pointer
        self._types = {"float32": self._library.NCCL_FLOAT32, "float64": self._library.NCCL_FLOAT64}
        number, fault = None, None
        if peers.rank == 0:
            try:
                number = self._library.get_unique_id()
            except self._library.NcclError as error:  # broadcast below, since the other ranks wait for the number
                fault = str(error)
        number, fault = peers.broadcast_object((number, fault))
        try:
            self._group: Any = None if fault is not None else self._library.NcclCommunicator(peers.size, number, peers.rank)
        except self._library.NcclError as error:
            fault = str(error)
        if fault is not None:
            raise BackendError(f"NCCL cannot connect the GPUs of these {peers.size} ranks ({fault}); set transport to staged.")

    @contextmanager
    def together(self) -> Iterator[None]:
        self._library.groupStart()
        try:
            yield
        finally:  # until then NCCL starts no work, not even of later groups
            self._library.groupEnd()

    def send(self, array: DeviceArray, to: int) -> None:
        self._group.send(array.pointer, array.nbytes, self._library.NCCL_UINT8, to, self._pointer)

    def receive(self, array: DeviceArray, source: int) -> None:
        self._group.recv(array.pointer, array.nbytes, self._library.NCCL_UINT8, source, self._pointer)

    def broadcast(self, array: DeviceArray, root: int) -> None:
        self._group.broadcast(array.pointer, array.pointer, array.nbytes, self._library.NCCL_UINT8, root, self._pointer)

    def sum_to_all(self, array: DeviceArray) -> None:
        datatype = self._types[array.dtype]
        self._group.allReduce(array.pointer, array.pointer, array.size, datatype, self._library.NCCL_SUM, self._pointer)

    def sum_to_one(self, send: DeviceArray, recv: DeviceArray, root: int) -> None:
        datatype = self._types[send.dtype]
        self._group.reduce(send.pointer, recv.pointer, send.size, datatype, self._library.NCCL_SUM, root, self._pointer)

    def fault(self) -> str | None:
        try:
            self._group.check_async_error()
        except self._library.NcclError as error:
            return str(error)
        return None

    def abort(self) -> None:
        self._group.abort()


def nccl_fault(device: str) -> str | None:
    """Return the reason why NCCL cannot be used here, as a clause; None if it can.

    Args:
        device: name of this process's device. The name of a slice of a GPU contains "MIG".
    """
    library = _nccl()
    if library is None:
        return "CuPy finds no NCCL, which the package nvidia-nccl-cu12 or nvidia-nccl-cu13 contains"
    if "MIG" in device and (version := int(library.get_version())) < _FIRST_WITH_SLICES:
        number = f"{version // 10000}.{version // 100 % 100}"
        return f"NCCL {number} treats all slices of a GPU (MIG) as one device (2.30 or later is required)"
    return None


def _nccl() -> Any:
    """Return CuPy's module for NCCL; None if NCCL's library is missing."""
    _load_wheel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns if the library is missing
        try:
            from cupy.cuda import nccl
        except ImportError:
            return None
    return nccl if nccl.available else None


def _load_wheel() -> None:
    """Load NCCL from an installed wheel, so that CuPy's module finds the library by its name."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA is installed
        return
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            with suppress(OSError):  # CuPy then reports the missing library
                ctypes.CDLL(os.fspath(library), mode=ctypes.RTLD_GLOBAL)


_runtime = cupy.cuda.runtime
_FIRST_WITH_BFLOAT16 = 8  # compute capability
_NO_MEMORY, _NO_DEVICE = 2, 100  # cudaErrorMemoryAllocation, cudaErrorNoDevice
_SUCCESS, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady


class CupyEvent:
    """Implementation of `DeviceEvent`."""

    def __init__(self) -> None:
        self.raw = cupy.cuda.Event(disable_timing=True)

    @property
    def done(self) -> bool:
        status = int(_runtime.eventQuery(self.raw.ptr))
        if status not in (_SUCCESS, _NOT_READY):
            self.raw.synchronize()  # raises the GPU's error, which would otherwise surface only at a deadline
        return status == _SUCCESS

    def synchronize(self) -> None:
        self.raw.synchronize()


class CupyStream:
    """Implementation of `DeviceStream`, whose work never waits implicitly for other streams, not even for CUDA's default one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.raw = cupy.cuda.Stream(non_blocking=True)

    def record(self, event: DeviceEvent) -> None:
        self.raw.record(_event(event))

    def wait(self, event: DeviceEvent) -> None:
        self.raw.wait_event(_event(event))

    def synchronize(self) -> None:
        self.raw.synchronize()


class CupyKernel:
    """Implementation of `DeviceKernel`."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        self._name, self._function = name, function

    def __call__(self, stream: DeviceStream, grid: Extent, block: Extent, *arguments: Argument) -> None:
        values = tuple(_by_value(self._name, place, argument) for place, argument in enumerate(arguments))
        self._function(grid, block, values, stream=_stream(stream))


class CupyGraph:
    """Implementation of `CapturedGraph`.

    Attributes:
        raw: CuPy's graph; None until the capture has ended.
    """

    def __init__(self) -> None:
        self.raw: Any = None

    def launch(self, stream: DeviceStream) -> None:
        self.raw.launch(stream=_stream(stream))


class CupyDevice:
    """Implementation of `Device`. The constructor makes the GPU the current one of the calling thread.

    Args:
        index: index of the GPU among those that this process sees.

    Raises:
        BackendError: there is no such GPU, CUDA cannot use it, or a library of CUDA cannot be loaded.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            cupy.cuda.Device(index).use()
            properties = _runtime.getDeviceProperties(index)
            self.memory_bytes = int(_runtime.memGetInfo()[1])
            # Slices of a GPU (MIG) share its bus ID, but each has its own UUID.
            self.identity = f"{platform.node()} {_runtime.deviceGetPCIBusId(index)} {bytes(properties['uuid']).hex()}"
        except _runtime.CUDARuntimeError as error:
            raise BackendError(f"GPU {index} cannot be used ({error}); set CUDA_VISIBLE_DEVICES to another one.") from error
        self.name = properties["name"].decode()
        self.capability = (int(properties["major"]), int(properties["minor"]))
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.dtypes: tuple[str, ...] = ("float32", "bfloat16") if self.capability[0] >= _FIRST_WITH_BFLOAT16 else ("float32",)
        self._modules: dict[tuple[str, str | None], Any] = {}  # by source and text; None: the package's own text
        self._kernels: dict[tuple[str, str, str | None], CupyKernel] = {}
        self._products: dict[int, MatrixProducts] = {}
        self._plans: CudnnPlans | None = None
        self._cublas, self._nvrtc = _load_libraries()
        self.versions: Mapping[str, str] = {
            "device": self.name,
            "cupy": cupy.__version__,
            "cuda": str(_runtime.runtimeGetVersion()),
            "driver": str(_runtime.driverGetVersion()),
        }

    def allocate(self, size_bytes: int) -> DeviceArray:
        if not size_bytes:
            return DeviceArray(0, (0,), "uint8", None)
        try:
            memory = cupy.cuda.Memory(size_bytes)  # cudaMalloc: aligned to 256 bytes; cudaFree at the last reference
        except _runtime.CUDARuntimeError as error:
            if error.status != _NO_MEMORY:
                raise
            free, total = _runtime.memGetInfo()
            raise BackendError(
                f"{self.name} cannot allocate {size_text(size_bytes)}: {size_text(free)} of its {size_text(total)} of memory are "
                "free; reduce batch, or increase micro_batches."
            ) from error
        _runtime.memset(memory.ptr, 0, size_bytes)
        # The memset must end before other streams use the memory. Do not wait for those: NCCL's may depend on this process.
        _runtime.streamSynchronize(0)
        return DeviceArray(memory.ptr, (size_bytes,), "uint8", memory)

    def pinned(self, size_bytes: int) -> np.ndarray:
        if not size_bytes:
            return np.zeros(0, np.uint8)
        memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(size_bytes), np.uint8, size_bytes)
        memory[:] = 0
        return memory

    def stream(self, name: str) -> CupyStream:
        return CupyStream(name)

    def event(self) -> CupyEvent:
        return CupyEvent()

    def kernel(self, source: str, name: str, *, text: str | None = None) -> CupyKernel:
        """Return the kernel `name` of <source>.cu. The source's binary is loaded at the first request.

        Args:
            text: text to compile instead of the package's source.

        Raises:
            BackendError: the source cannot be compiled; see `sources.binary`.
        """
        key = (source, name, text)
        if key not in self._kernels:
            if (source, text) not in self._modules:
                module = cupy.cuda.function.Module()
                module.load(sources.binary(self._nvrtc, source, text or sources.text(source), self.capability))
                self._modules[source, text] = module
            self._kernels[key] = CupyKernel(name, self._modules[source, text].get_function(name))
        return self._kernels[key]

    def upload(self, stream: DeviceStream, target: DeviceArray, source: np.ndarray) -> None:
        self._copy(stream, target.pointer, _address(source), target.nbytes, source.nbytes, _runtime.memcpyHostToDevice)

    def download(self, stream: DeviceStream, target: np.ndarray, source: DeviceArray) -> None:
        self._copy(stream, _address(target), source.pointer, target.nbytes, source.nbytes, _runtime.memcpyDeviceToHost)

    def copy(self, stream: DeviceStream, target: DeviceArray, source: DeviceArray) -> None:
        kind = _runtime.memcpyDeviceToDevice
        self._copy(stream, target.pointer, source.pointer, target.nbytes, source.nbytes, kind)

    @staticmethod
    def _copy(stream: DeviceStream, target: int, source: int, size_bytes: int, source_bytes: int, kind: int) -> None:
        if size_bytes != source_bytes:
            raise ValueError(f"Cannot copy {source_bytes} bytes to {size_bytes} bytes; both sizes must be equal.")
        if size_bytes:
            _runtime.memcpyAsync(target, source, size_bytes, kind, _stream(stream).ptr)

    def convolution(self, key: ConvolutionKey) -> DeviceConvolution:
        if self._plans is None:
            self._plans = CudnnPlans(new_handle(), capability=self.capability)
        return self._plans.plan(key)

    def gemm(
        self,
        stream: DeviceStream,
        a: DeviceArray,
        b: DeviceArray,
        c: DeviceArray,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
        precision: Precision,
    ) -> None:
        pointer = _stream(stream).ptr
        if not a.size and not accumulate:  # sums over no elements, for which cuBLAS writes nothing
            if c.size:
                _runtime.memsetAsync(c.pointer, 0, c.nbytes, pointer)
            return
        if pointer not in self._products:
            self._products[pointer] = MatrixProducts(self._cublas, pointer, self.allocate(WORKSPACE_BYTES))
        options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "accumulate": accumulate}
        self._products[pointer].run(a, b, c, **options, precision=precision)

    @contextmanager
    def capture(self, stream: DeviceStream) -> Iterator[CupyGraph]:
        raw, graph = _stream(stream), CupyGraph()
        collects = gc.isenabled()
        gc.disable()  # a collection may free device memory, which makes the capture invalid
        try:
            # CuPy's default mode permits allocations, which a launch of the graph would not repeat.
            raw.begin_capture(mode=_runtime.streamCaptureModeThreadLocal)
            try:
                yield graph
            except BaseException:
                with suppress(_runtime.CUDARuntimeError):  # the error has already made the capture invalid
                    raw.end_capture()
                raise
            graph.raw = raw.end_capture()
        finally:
            if collects:
                gc.enable()

    def link_fault(self) -> str | None:
        return nccl_fault(self.name)

    def join(self, peers: Peers, stream: DeviceStream) -> CupyLinks:
        return CupyLinks(peers, _stream(stream).ptr)

    def memory_used(self) -> int:
        free, total = _runtime.memGetInfo()
        return int(total - free)


def gpu_count() -> int:
    """Return the number of GPUs that this process sees.

    Raises:
        BackendError: CUDA cannot be used, for example because no driver supports its version; the message is CUDA's reason.
    """
    try:
        return int(_runtime.getDeviceCount())
    except _runtime.CUDARuntimeError as error:
        if error.status == _NO_DEVICE:
            return 0
        raise BackendError(str(error)) from error


def _by_value(kernel: str, place: int, argument: Argument) -> np.generic:
    """Return an argument with the bytes that the kernel expects. CuPy would convert a Python int to int64, and crash at None."""
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, DeviceArray):
        return np.uint64(argument.pointer)
    if isinstance(argument, np.generic):
        return argument
    raise TypeError(f"Argument {place} of {kernel} is {type(argument).__name__}; it must be a device array or a NumPy scalar.")


def _stream(stream: DeviceStream) -> Any:
    assert isinstance(stream, CupyStream), f"{stream!r} is not a stream of this GPU"
    return stream.raw


def _event(event: DeviceEvent) -> Any:
    assert isinstance(event, CupyEvent), f"{event!r} is not an event of this GPU"
    return event.raw


def _address(array: np.ndarray) -> int:
    """Return the address of a C-contiguous array of the host."""
    if not array.flags.c_contiguous:
        raise ValueError("Copies to and from a device need C-contiguous arrays; use np.ascontiguousarray first.")
    return int(array.ctypes.data)


def _load_libraries() -> tuple[ctypes.CDLL, Any]:
    """Load cuBLAS and NVRTC. Return cuBLAS's library and CuPy's module for NVRTC.

    CuPy finds them in wheels and toolkits. cuDNN, which uses both, later opens them by name and finds the loaded ones.

    Raises:
        BackendError: one of them cannot be loaded.
    """
    try:
        from cupy_backends.cuda.libs import cublas, nvrtc

        nvrtc.getVersion()
        assert cublas is not None
        return ctypes.CDLL(f"libcublas.so.{_runtime.runtimeGetVersion() // 1000}"), nvrtc
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BackendError(
            f"CUDA's libraries cuBLAS and NVRTC cannot be loaded ({reason}); install hpctrain[gpu13], or hpctrain[gpu12] for "
            "CUDA 12."
        ) from error
