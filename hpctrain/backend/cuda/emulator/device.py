"""A device that is this CPU: the CUDA sources built by g++, memory behind guard pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from hpctrain.backend.cuda.device import (
    CapturedGraph,
    ConvolutionKey,
    DeviceConvolution,
    DeviceEvent,
    DeviceKernel,
    DeviceStream,
    Precision,
)
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator import build
from hpctrain.backend.cuda.emulator.convolution import NumpyConvolution
from hpctrain.backend.cuda.emulator.kernel import CpuKernel
from hpctrain.backend.cuda.emulator.memory import Heap, on_host
from hpctrain.backend.cuda.emulator.rounding import read, write


class EmulatedStream:
    """Does everything at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, event: DeviceEvent) -> None:
        pass

    def wait(self, event: DeviceEvent) -> None:
        pass

    def synchronize(self) -> None:
        pass


class EmulatedEvent:
    """Is done at once."""

    done = True

    def synchronize(self) -> None:
        pass


class EmulatedDevice:
    """Implements `Device`. seed: of the orders of blocks and threads; 0: ascending, 1: descending."""

    name = "emulated"
    capability = (9, 0)
    multiprocessors = 2
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")

    def __init__(self, seed: int = 0) -> None:
        self._seed, self._random = seed, random.Random(seed)
        self._heap = Heap()
        self._kernels: dict[tuple[str, str], DeviceKernel] = {}
        self._convolutions: dict[ConvolutionKey, DeviceConvolution] = {}

    def allocate(self, size_bytes: int) -> DeviceArray:
        return self._heap.allocate(size_bytes)

    def pinned(self, size_bytes: int) -> np.ndarray:
        return np.zeros(size_bytes, np.uint8)

    def stream(self, name: str) -> EmulatedStream:
        return EmulatedStream(name)

    def event(self) -> EmulatedEvent:
        return EmulatedEvent()

    def kernel(self, source: str, name: str) -> DeviceKernel:
        if (source, name) not in self._kernels:
            self._kernels[source, name] = CpuKernel(build.library(source), name, self._order, self._enqueue)
        return self._kernels[source, name]

    def _order(self) -> int:
        return self._seed if self._seed < 2 else self._random.randrange(2, 1 << 31)

    def _enqueue(self, stream: DeviceStream, work: Callable[[], None], text: str) -> None:
        work()

    def upload(self, stream: DeviceStream, target: DeviceArray, source: np.ndarray) -> None:
        self._enqueue(stream, lambda: np.copyto(on_host(target).reshape(-1).view(np.uint8), _raw(source)), "upload")

    def download(self, stream: DeviceStream, target: np.ndarray, source: DeviceArray) -> None:
        self._enqueue(stream, lambda: np.copyto(_raw(target), on_host(source).reshape(-1).view(np.uint8)), "download")

    def copy(self, stream: DeviceStream, target: DeviceArray, source: DeviceArray) -> None:
        assert target.nbytes == source.nbytes, f"{source!r} does not fit {target!r}"
        self._enqueue(stream, lambda: np.copyto(_bytes(target), _bytes(source)), "copy")

    def convolution(self, key: ConvolutionKey) -> DeviceConvolution:
        if key not in self._convolutions:
            self._convolutions[key] = NumpyConvolution(key, self._enqueue)
        return self._convolutions[key]

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
        def work() -> None:
            left, right = read(a), read(b)
            product = (left.T if transpose_a else left) @ (right.T if transpose_b else right)
            write(c, product + read(c) if accumulate else product)

        self._enqueue(stream, work, "gemm")

    def capture(self, stream: DeviceStream) -> AbstractContextManager[CapturedGraph]:
        raise NotImplementedError

    def memory_used(self) -> int:
        return self._heap.used_bytes


def _raw(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _bytes(array: DeviceArray) -> np.ndarray:
    return on_host(array).reshape(-1).view(np.uint8)
