"""A device that is this CPU: it runs the CUDA sources, built by g++, and makes errors likely that are possible on a GPU."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType

import numpy as np

from hpctrain.backend.arithmetic import Peers
from hpctrain.backend.cuda.device import ConvolutionKey, DeviceArray, DeviceStream, Precision
from hpctrain_testing.emulator import kernels
from hpctrain_testing.emulator.kernels import CpuKernel
from hpctrain_testing.emulator.links import EmulatedLinks
from hpctrain_testing.emulator.memory import EmulatedDeviceError, Heap, PinnedMemory, borrowed, bytes_of
from hpctrain_testing.emulator.products import NumpyConvolution, check_product, product
from hpctrain_testing.emulator.streams import (
    DeviceCounters,
    EmulatedEvent,
    EmulatedGraph,
    EmulatedStream,
    StreamTable,
    Work,
    caller,
    capturing,
)

#: maximum number of arrays per piece of work that a wait checks; later waits check the others
_CHECKED_ARRAYS_PER_WORK = 8


class EmulatedDevice:
    """Emulated implementation of `Device`. A program must end with `finish`.

    Args:
        seed: seed of the orders of blocks, threads and the streams' work.
        ignored_wait: number of a wait of a stream or the host that is omitted; see `waits`. The results of a program that needs
            the wait are then wrong for most seeds.

    Attributes:
        identity: unique identity of the device.
        counters: counters of enqueued work, waits and allocations.
    """

    name = "emulated"
    capability = (9, 0)
    multiprocessors = 2
    memory_bytes = 1 << 40
    versions: Mapping[str, str] = MappingProxyType({"device": name})
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")

    def __init__(self, seed: int = 0, *, ignored_wait: int | None = None) -> None:
        self.identity = f"emulated {uuid.uuid4().hex}"
        self.counters = DeviceCounters()
        self._random = random.Random(seed)
        self._streams = StreamTable(self._random, self.counters, partial(self._check_memory, always=False), ignored_wait)
        self._heap, self._pinned = Heap(self.run_all), PinnedMemory()
        self._kernels: dict[tuple[str, str, str | None], CpuKernel] = {}
        self._convolutions: dict[ConvolutionKey, NumpyConvolution] = {}
        self._recent: Counter[str] = Counter()  # work since the latest check of memory

    @property
    def waits(self) -> tuple[str, ...]:
        """Descriptions of all waits so far; their indices are the possible values of `ignored_wait`."""
        return tuple(self._streams.waits)

    def seal(self) -> None:
        """Count later allocations as late, in `counters.late_allocations`."""
        self.counters.sealed = True

    def finish(self) -> None:
        """Verify at exit that no device work is pending.

        Raises:
            EmulatedDeviceError: some work was never waited for, or bytes next to an array were overwritten.
        """
        self._check_memory()
        queues = [queue for queue in self._streams.scheduler.queues if queue.pending]
        if queues:
            left = "; ".join(f"{queue.name}: {', '.join(work.text for work in queue.pending)}" for queue in queues)
            raise EmulatedDeviceError(f"The program has not waited for the work on {left}.")

    def run_all(self) -> None:
        """Do all work and check the memory; do nothing if some work has failed."""
        if not self._streams.scheduler.failed:
            self._streams.scheduler.run_all()
            self._check_memory()

    def allocate(self, size_bytes: int) -> DeviceArray:
        self._streams.refuse_in_capture("allocate memory")
        self.counters.allocated(size_bytes, caller())
        return self._heap.allocate(size_bytes)

    def pinned(self, size_bytes: int) -> np.ndarray:
        self._streams.refuse_in_capture("allocate pinned memory")
        self.counters.allocated(size_bytes, caller())
        return self._pinned.allocate(size_bytes)

    def stream(self, name: str) -> EmulatedStream:
        return self._streams.stream(name)

    def event(self) -> EmulatedEvent:
        return self._streams.event()

    def kernel(self, source: str, name: str, *, text: str | None = None) -> CpuKernel:
        """Return a kernel; see `Device.kernel`.

        Args:
            text: text of a source outside the package; None for a source of the package.
        """
        key = (source, name, text)
        if key not in self._kernels:
            self._streams.refuse_in_capture(f"load the kernel {name}")
            library = kernels.library(source) if text is None else kernels.build(text)
            seed = partial(self._random.getrandbits, 63)
            self._kernels[key] = CpuKernel(library, name, seed, self._enqueue, self._heap.describe)
        return self._kernels[key]

    def _enqueue(
        self,
        stream: DeviceStream,
        action: Callable[[], None],
        text: str,
        keep_alive: Sequence[DeviceArray] = (),
        *,
        reads: tuple[np.ndarray, ...] = (),
        writes: tuple[np.ndarray, ...] = (),
        goes_on: Callable[[], bool] | None = None,
    ) -> None:
        assert isinstance(stream, EmulatedStream), f"{stream!r} is not of this device"

        def run() -> None:
            self._recent[text] += 1
            action()

        self._streams.enqueue(stream, Work(text, run, keep_alive=keep_alive, reads=reads, writes=writes, goes_on=goes_on))

    def _check_memory(self, *, always: bool = True) -> None:
        """Raise if memory is damaged.

        Args:
            always: whether to check even if little work was done since the last check.
        """
        if not always and self._heap.arrays > _CHECKED_ARRAYS_PER_WORK * self._recent.total():
            return
        recent, self._recent = self._recent, Counter()
        if damages := self._heap.damages():
            raise EmulatedDeviceError(f"{'; '.join(damages)}, by one of: {', '.join(sorted(recent))}.")

    def upload(self, stream: DeviceStream, target: DeviceArray, source: np.ndarray) -> None:
        raw, place = self._pinned.require(source), borrowed(target)
        _require_equal(target.nbytes, source.nbytes)
        self.counters.uploaded_bytes[stream.name] += source.nbytes
        self._enqueue(stream, lambda: np.copyto(self._bytes(place), raw), "upload", (target,), reads=(raw,))

    def download(self, stream: DeviceStream, target: np.ndarray, source: DeviceArray) -> None:
        raw, place = self._pinned.require(target), borrowed(source)
        _require_equal(target.nbytes, source.nbytes)
        self.counters.downloaded_bytes[stream.name] += source.nbytes
        self._enqueue(stream, lambda: np.copyto(raw, self._bytes(place)), "download", (source,), writes=(raw,))

    def copy(self, stream: DeviceStream, target: DeviceArray, source: DeviceArray) -> None:
        _require_equal(target.nbytes, source.nbytes)
        to, of = borrowed(target), borrowed(source)
        self._enqueue(stream, lambda: np.copyto(self._bytes(to), self._bytes(of)), "copy", (target, source))

    def _bytes(self, array: DeviceArray) -> np.ndarray:
        self._heap.require(array)
        return bytes_of(array)

    def convolution(self, key: ConvolutionKey) -> NumpyConvolution:
        if key not in self._convolutions:
            self._streams.refuse_in_capture("build the plan of a convolution")
            self._convolutions[key] = NumpyConvolution(key, self._enqueue, self._heap.require)
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
        check_product(a, b, c, transpose_a=transpose_a, transpose_b=transpose_b, precision=precision)
        left, right, out = (borrowed(array) for array in (a, b, c))

        def work() -> None:
            self._heap.require(left, right, out)
            product(left, right, out, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate)

        self._enqueue(stream, work, "gemm", (a, b, c))

    def capture(self, stream: DeviceStream) -> AbstractContextManager[EmulatedGraph]:
        assert isinstance(stream, EmulatedStream), f"{stream!r} is not of this device"
        return capturing(self._streams, stream)

    def link_fault(self) -> str | None:
        return None

    def join(self, peers: Peers, stream: DeviceStream) -> EmulatedLinks:
        return EmulatedLinks(peers, stream, self._enqueue, self._heap.require)

    def memory_used(self) -> int:
        return self._heap.used_bytes


def _require_equal(target_bytes: int, source_bytes: int) -> None:
    if target_bytes != source_bytes:
        raise ValueError(
            f"Source and target of a copy must have the same number of bytes, not {source_bytes} and {target_bytes}."
        )
