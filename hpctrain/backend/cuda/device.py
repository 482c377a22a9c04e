"""The interface between kernels and a GPU: one narrow protocol of a device, and arrays in its memory.

Implementations are `CupyDevice`, a GPU, and the emulated device of the tests, which runs the same CUDA sources on the CPU. Work
is enqueued on streams, each of which executes its work in order. Only `synchronize` of streams and events, and allocation, wait.
All code above this interface is the same for both implementations.

A `DeviceArray` consists of an address, a shape and a dtype. It is not an ndarray, so that no host code computes with it. On the
host, bfloat16 is represented by uint16, the upper half of a float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import numpy as np

from hpctrain.backend.arithmetic import DeviceLinks, Peers
from hpctrain.backend.specs import item_bytes


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return float32 or float64 values rounded to bfloat16, as uint16.

    Values are rounded to nearest even, float64 first to float32. NaN becomes 0x7FFF.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), np.uint16(0x7FFF), rounded)


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    """Return the exact float32 values of bfloat16 bits (uint16)."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


Shape = tuple[int, ...]


class DeviceArray:
    """C-contiguous elements in a device's memory, which the array keeps alive.

    `view`, `reshape` and slices of the first dim with step 1 return views. Only kernels and the device's `upload` and `download`
    read or write elements; all other operations of the host on elements raise TypeError.

    Args:
        pointer: address on the device.
        owner: object that keeps the memory alive.
    """

    __slots__ = ("dtype", "itemsize", "owner", "pointer", "shape", "size")

    def __init__(self, pointer: int, shape: Shape, dtype: str, owner: Any) -> None:
        self.pointer, self.shape, self.dtype, self.owner = pointer, shape, dtype, owner
        self.size = math.prod(shape)
        self.itemsize = item_bytes(dtype)

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return self.size * self.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> DeviceArray:
        if not isinstance(index, slice) or index.step not in (None, 1):
            self._refuse()
        start, stop, _ = index.indices(self.shape[0])
        row = math.prod(self.shape[1:]) * self.itemsize
        return DeviceArray(self.pointer + start * row, (max(0, stop - start), *self.shape[1:]), self.dtype, self.owner)

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return all elements in another shape, in which -1 is the remaining size. Raise a ValueError if the sizes differ."""
        wanted: Shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if wanted.count(-1) == 1 and (known := -math.prod(wanted)):
            wanted = tuple(self.size // known if n == -1 else n for n in wanted)
        if -1 in wanted or math.prod(wanted) != self.size:
            raise ValueError(f"Cannot reshape {self.shape} to {wanted}; the number of elements must stay {self.size}.")
        return DeviceArray(self.pointer, wanted, self.dtype, self.owner)

    def view(self, dtype: str) -> DeviceArray:
        """Return the same bytes as a flat array of another dtype. Raise a ValueError unless they are whole items of it."""
        count, rest = divmod(self.nbytes, item_bytes(dtype))
        if rest:
            raise ValueError(f"Cannot view {self.nbytes} bytes as {dtype}; they must be a multiple of {item_bytes(dtype)} bytes.")
        return DeviceArray(self.pointer, (count,), dtype, self.owner)

    def __repr__(self) -> str:
        return f"DeviceArray({self.shape}, {self.dtype}, at {self.pointer:#x})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"Elements of {self!r} are in the device's memory; copy them by the arithmetic's `to_host`.")

    __array__ = __array_ufunc__ = __setitem__ = __iter__ = __float__ = __int__ = __bool__ = __contains__ = _refuse


#: argument of a kernel: an array on the device (None: a null pointer), or a NumPy scalar of exactly the parameter's type
Argument = DeviceArray | np.generic | None
Extent = tuple[int, ...]  # of a grid or a block, up to three dims

#: alignment of all device memory, sufficient for cuDNN and 16-byte loads
ALIGNMENT_BYTES = 256

#: alignment of the arrays of a convolution's plan
PLAN_ALIGNMENT_BYTES = 16

Precision = Literal["float64", "float32", "tf32", "bfloat16"]


class DeviceEvent(Protocol):
    """A mark in a stream's work."""

    @property
    def done(self) -> bool:
        """Whether the work before the latest record is done; true before the first record."""

    def synchronize(self) -> None:
        """Wait on the host until `done`."""


class DeviceStream(Protocol):
    """A queue of work that is executed in order."""

    name: str

    def record(self, event: DeviceEvent) -> None:
        """Record `event` after all work enqueued so far."""

    def wait(self, event: DeviceEvent) -> None:
        """Make later work wait for the work before the latest record of `event`. The host does not wait."""

    def synchronize(self) -> None:
        """Wait on the host until all work is done."""


class DeviceKernel(Protocol):
    """A compiled kernel."""

    def __call__(self, stream: DeviceStream, grid: Extent, block: Extent, *arguments: Argument) -> None:
        """Enqueue the kernel. Every argument must have the size of the kernel's parameter."""


@runtime_checkable
class CapturedGraph(Protocol):
    """Work that was captured instead of executed. `launch` enqueues all of it at once, any number of times."""

    def launch(self, stream: DeviceStream) -> None: ...


@dataclass(frozen=True)
class ConvolutionKey:
    """All properties on which the choice of a convolution's plan depends. Shapes are NHWC and KRSC (C per group).

    Attributes:
        kind: "forward" writes y from (x, w); "input" writes dx from (dy, w); "weight" writes dw from (x, dy).
        x, w, y: shapes of the input, the weight and the output.
        dtype: dtype of x, w, y and their gradients.
        precision: precision of products; sums are float32 (float64 for float64).
        fused: operations after "forward": "bias", or "bias_relu" for bias and ReLU.
    """

    kind: Literal["forward", "input", "weight"]
    x: Extent
    w: Extent
    y: Extent
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]  # top, bottom, left, right
    dilation: tuple[int, int]
    groups: int
    dtype: str
    precision: Precision
    fused: Literal["", "bias", "bias_relu"] = ""


class DeviceConvolution(Protocol):
    """Plan of the convolution of one `ConvolutionKey`. A device builds it once and reuses it.

    Attributes:
        workspace_bytes: size of the workspace in bytes.
    """

    workspace_bytes: int

    def run(
        self,
        stream: DeviceStream,
        a: DeviceArray,
        b: DeviceArray,
        out: DeviceArray,
        workspace: DeviceArray | None,
        bias: DeviceArray | None = None,
    ) -> None:
        """Enqueue (x, w) -> y, (dy, w) -> dx or (x, dy) -> dw, by the key's kind. `out` is overwritten.

        All arrays, including the bias, have the key's dtype and begin at multiples of PLAN_ALIGNMENT_BYTES.
        """


class Device(Protocol):
    """A GPU, or the emulated device.

    Attributes:
        name: the vendor's name of the device.
        identity: name of the device, unique over all nodes.
        capability: compute capability (major, minor).
        multiprocessors: number of multiprocessors.
        dtypes: dtypes that kernels compute in.
        memory_bytes: size of the whole memory.
        versions: versions of the device's libraries, and the device's name as "device", for a run's records.
    """

    name: str
    identity: str
    capability: tuple[int, int]
    multiprocessors: int
    dtypes: tuple[str, ...]
    memory_bytes: int
    versions: Mapping[str, str]

    def allocate(self, size_bytes: int) -> DeviceArray:
        """Return zeroed uint8 memory, aligned to ALIGNMENT_BYTES."""

    def pinned(self, size_bytes: int) -> np.ndarray:
        """Return zeroed uint8 memory of the host for asynchronous copies to and from the device."""

    def stream(self, name: str) -> DeviceStream: ...

    def event(self) -> DeviceEvent: ...

    def kernel(self, source: str, name: str) -> DeviceKernel:
        """Return the kernel `name` of <source>.cu, compiled at its first use."""

    def upload(self, stream: DeviceStream, target: DeviceArray, source: np.ndarray) -> None:
        """Enqueue a copy from pinned memory, which must not change until the copy is done."""

    def download(self, stream: DeviceStream, target: np.ndarray, source: DeviceArray) -> None:
        """Enqueue a copy to pinned memory, which must not be read before the copy is done."""

    def copy(self, stream: DeviceStream, target: DeviceArray, source: DeviceArray) -> None:
        """Enqueue a copy within the device, between arrays of the same number of bytes."""

    def convolution(self, key: ConvolutionKey) -> DeviceConvolution:
        """Return the plan for a key, from a cache.

        Raises:
            BackendError: there is no plan for the key.
        """

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
        """Enqueue c := op(a) op(b), plus c if `accumulate`, for row-major matrices. a and b share a dtype; c may be float32."""

    def capture(self, stream: DeviceStream) -> AbstractContextManager[CapturedGraph]:
        """Record the work that is enqueued on `stream` inside this context, instead of executing it.

        Allocation and waits are not allowed inside the context.
        """

    def link_fault(self) -> str | None:
        """Return the reason why this device cannot exchange arrays with others directly, as a clause; None if it can."""

    def join(self, peers: Peers, stream: DeviceStream) -> DeviceLinks:
        """Link this device to those of `peers`. The links enqueue their work on `stream`. Collective; waits for all peers."""

    def memory_used(self) -> int:
        """Return the number of bytes of the device's memory that all processes use."""


def grid_for(items: int, block: int, multiprocessors: int, *, waves: int = 8) -> Extent:
    """Return the grid for `items`, of which a block processes `block` at a time; at most `waves` blocks per multiprocessor."""
    return (min(-(-items // block), waves * multiprocessors),)


def pack_width(dtype_bytes: int, channels: int, arrays: Sequence[DeviceArray | None] = ()) -> int:
    """Return how many elements a thread moves at once: 16 bytes if `channels` and addresses are multiples of them, else one."""
    width = 16 // dtype_bytes
    fits = channels % width == 0 and all(array is None or array.pointer % 16 == 0 for array in arrays)
    return width if fits else 1
