"""The waist between kernels and a GPU: all that this package asks of a device, in one narrow protocol.

Two implementations: `CupyDevice`, a GPU, and `EmulatedDevice`, this CPU with the same CUDA sources. Work is enqueued on a stream
and done in its order; nothing waits but `synchronize` of streams and events, and allocation. All above is the same code on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.device_messages import DeviceLinks, Peers

#: what a kernel takes: a place in the device's memory (None: nowhere), or a NumPy scalar of the parameter's very type
Argument = DeviceArray | np.generic | None
Extent = tuple[int, ...]  # of a grid or a block, up to three dims

#: alignment of all device memory: what cuDNN and 16-byte loads ask for, and more
ALIGNMENT_BYTES = 256

#: where the arrays of a convolution's plan begin: at multiples of it
PLAN_ALIGNMENT_BYTES = 16

Precision = Literal["float64", "float32", "tf32", "bfloat16"]


class DeviceEvent(Protocol):
    """A mark in a stream's work."""

    @property
    def done(self) -> bool:
        """The work before the latest record is done (True before the first)."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until `done`."""
        ...


class DeviceStream(Protocol):
    """A queue of work, done in order."""

    name: str

    def record(self, event: DeviceEvent) -> None:
        """Mark all work so far."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Work from here on begins after what the event marks now; the host goes on."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until all work is done."""
        ...


class DeviceKernel(Protocol):
    """A compiled kernel."""

    def __call__(self, stream: DeviceStream, grid: Extent, block: Extent, *arguments: Argument) -> None:
        """Enqueue it. Every argument has the size of the kernel's parameter."""
        ...


@runtime_checkable
class CapturedGraph(Protocol):
    """Work that was captured instead of done; `launch` enqueues all of it at once, as often as wanted."""

    def launch(self, stream: DeviceStream) -> None: ...


@dataclass(frozen=True)
class ConvolutionKey:
    """All that the choice of a convolution's plan depends on. Shapes are NHWC and KRSC (C by group).

    kind: "forward" writes y from (x, w); "input" writes dx from (dy, w); "weight" writes dw from (x, dy).
    fused: of "forward": y = x * w + bias, and then the ReLU.
    dtype: of x, w, y and their gradients. precision: of the products; sums are float32 (float64 for float64).
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
    """The plan of one convolution, built once."""

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
        """Enqueue it: (x, w) -> y, (dy, w) -> dx or (x, dy) -> dw, by the key's kind. `out` is written, never added to.

        All arrays have the key's dtype, the bias too, and begin at multiples of PLAN_ALIGNMENT_BYTES.
        """
        ...


class LinkMaker(Protocol):
    """The part of a device that joins others."""

    def fault(self) -> str | None:
        """Why this device cannot exchange arrays with others by itself, in one clause; None where it can."""
        ...

    def join(self, peers: Peers, stream: DeviceStream) -> DeviceLinks:
        """This device's links to those of its peers, whose work is enqueued on that stream. Collective; waits for all of them."""
        ...


class Device(Protocol):
    """A GPU, or what stands in for one.

    Attributes:
        name: as the vendor gives it. identity: no other device has it, on any node. capability: (major, minor).
        multiprocessors: that run blocks at once.
        dtypes: that kernels compute in. memory_bytes: of the whole device.
        versions: of the libraries that it computes by, and its name as "device", for a run's records.
        groups: joins it with others.
    """

    name: str
    identity: str
    capability: tuple[int, int]
    multiprocessors: int
    dtypes: tuple[str, ...]
    memory_bytes: int
    versions: Mapping[str, str]

    @property
    def groups(self) -> LinkMaker: ...

    def allocate(self, size_bytes: int) -> DeviceArray:
        """Zeroed uint8 memory, aligned to ALIGNMENT_BYTES."""
        ...

    def pinned(self, size_bytes: int) -> np.ndarray:
        """uint8 host memory that copies to and from the device may use without waiting."""
        ...

    def stream(self, name: str) -> DeviceStream: ...

    def event(self) -> DeviceEvent: ...

    def kernel(self, source: str, name: str) -> DeviceKernel:
        """The kernel `name` of kernels/<source>.cu, compiled at first use."""
        ...

    def upload(self, stream: DeviceStream, target: DeviceArray, source: np.ndarray) -> None:
        """Enqueue a copy from pinned memory, which stays as it is until the stream has come so far."""
        ...

    def download(self, stream: DeviceStream, target: np.ndarray, source: DeviceArray) -> None:
        """Enqueue a copy to pinned memory, to be read once the stream has come so far."""
        ...

    def copy(self, stream: DeviceStream, target: DeviceArray, source: DeviceArray) -> None:
        """Enqueue a copy of equally many bytes within the device."""
        ...

    def convolution(self, key: ConvolutionKey) -> DeviceConvolution:
        """The plan for a key, from a cache.

        Raises:
            BackendError: no plan exists.
        """
        ...

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
        """Enqueue c := op(a) op(b), plus c where `accumulate`; row-major matrices. a and b share a dtype, c may be float32."""
        ...

    def capture(self, stream: DeviceStream) -> AbstractContextManager[CapturedGraph]:
        """Inside: what is enqueued on `stream` is recorded and not done. Allocating and waiting are refused."""
        ...

    def memory_used(self) -> int:
        """Bytes of the device's memory that are in use."""
        ...


def grid_for(items: int, block: int, multiprocessors: int, *, waves: int = 8) -> Extent:
    """The grid of a kernel that strides over `items`: as many blocks as they fill, up to `waves` for each multiprocessor."""
    return (min(-(-items // block), waves * multiprocessors),)


def pack_width(dtype_bytes: int, channels: int, arrays: Sequence[DeviceArray | None] = ()) -> int:
    """Elements that one thread moves at once: 16 bytes of them where rows and addresses allow it, else one."""
    width = 16 // dtype_bytes
    fits = channels % width == 0 and all(array is None or array.pointer % 16 == 0 for array in arrays)
    return width if fits else 1
