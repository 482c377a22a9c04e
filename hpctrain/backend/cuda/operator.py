"""The base of the operators of the cuda set, and the launches that several of them share.

`CudaView` operators (flatten, the identity) only give device memory another name. `row_launch` serves kernels that go over
images row by row (images.cuh); `ColumnSums` adds up the rows of a matrix, for gradients of biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES, DeviceArray, Extent, pack_width
from hpctrain.backend.cuda.runtime import TAGS, THREADS, CudaRuntime
from hpctrain.backend.operators import Accumulating, Buffers, InputView, Operator, StepContext
from hpctrain.backend.specs import Shape, Spec, TensorSpec, item_bytes, parameter_dtype
from hpctrain.core.errors import BackendError

Request = tuple[Shape, str]  # shape, dtype


class CudaOperatorBase(Operator):
    """An operator on plain NHWC memory of a device. A subclass's constructor calls `declare` last; `bind` then gives it arrays.

    Calls enqueue work on the runtime's stream and never wait, so that a program can be captured: whatever changes from step to
    step is read from device memory, and no argument depends on the context.

    Attributes:
        tag: of the activations' dtype, in the names of kernels. saved, scratch: the arrays that were declared.
    """

    def __init__(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, runtime: CudaRuntime) -> None:
        self.spec = spec
        self.inputs = tuple(x.plain() for x in inputs)
        self.output = spec.output(*self.inputs)
        self.dtype = self.inputs[0].dtype
        self.training, self.runtime, self.tag = training, runtime, TAGS[self.dtype]
        self.needs_inputs = (False,) * len(inputs)
        self.saved: Sequence[DeviceArray] = ()
        self.scratch: Sequence[DeviceArray] = ()
        self._saved: Sequence[Request] = ()
        self._scratch: Sequence[Request] = ()

    def declare(self, *, saved: Sequence[Request] = (), scratch: Sequence[Request] = ()) -> None:
        """Fix which arrays this operator keeps from forward to backward, and works with inside a call."""
        self._saved, self._scratch = saved, scratch
        self.saved_bytes = total_bytes(saved)
        self.scratch_bytes = total_bytes(scratch)

    def bind(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.saved = carve(buffers.saved, self._saved)
        self.scratch = carve(buffers.scratch, self._scratch)

    def input_grad(self, i: int = 0) -> DeviceArray | None:
        """The buffer of the gradient of input i, None where nobody asks for it."""
        grads = self.buffers.input_grads
        grad: DeviceArray | None = grads[i] if i < len(grads) else None
        return grad

    def accumulates(self, i: int = 0) -> bool:
        """True where the gradient of input i is added to what is there."""
        return i < len(self.buffers.accumulate) and self.buffers.accumulate[i]

    @property
    def output_grad(self) -> DeviceArray:
        """The buffer of the output's gradient."""
        grad = self.buffers.output_grad
        assert isinstance(grad, DeviceArray), f"{type(self).__name__} is bound without a gradient of its output"
        return grad


class CudaOperator(Accumulating, CudaOperatorBase):
    """An operator whose `backward_input` adds where it is asked to, as all do that compute it by a kernel."""


def _aligned_bytes(request: Request) -> int:
    shape, dtype = request
    return -(-math.prod(shape) * item_bytes(dtype) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def total_bytes(requests: Iterable[Request]) -> int:
    """Bytes of a buffer that `carve` divides into these arrays."""
    return sum(map(_aligned_bytes, requests))


def carve(buffer: DeviceArray | None, requests: Iterable[Request]) -> list[DeviceArray]:
    """Arrays of these shapes and dtypes, one after another in `buffer` (uint8), each aligned to ALIGNMENT_BYTES."""
    arrays, start = [], 0
    for shape, dtype in requests:
        size = math.prod(shape) * item_bytes(dtype)
        memory = DeviceArray(0, (0,), "uint8", None) if buffer is None else buffer[start : start + size]
        assert memory.nbytes == size, "the buffer is smaller than what was declared"
        arrays.append(memory.view(dtype).reshape(shape))
        start += _aligned_bytes((shape, dtype))
    return arrays


class CudaView(InputView, Operator):
    """The output is the input's memory under the output's shape."""

    def __init__(self, spec: Spec, x: TensorSpec) -> None:
        self.spec, self.inputs = spec, (x.plain(),)
        self.output = spec.output(x.plain())

    def forward(self, context: StepContext) -> None:
        return None

    def backward_input(self) -> None:
        return None


_THREADS = 256
_WARP = 32
# Far more than fit at once, so that the last blocks of a launch are few among many.
_WAVES = 256
_LIMIT = 1 << 30  # and a step beyond is still a number of 32 bits


def row_launch(rows: int, packs: int, multiprocessors: int) -> tuple[Extent, Extent]:
    """Return grid and block for `rows` rows of `packs` packs each.

    A block is as wide as a row, between 32 and 256 threads, and processes as many rows at a time as then fit. The grid is
    empty if there are no packs.
    """
    width = min(_THREADS, max(_WARP, 1 << (packs - 1).bit_length())) if packs else _WARP
    height = _THREADS // width
    blocks = min(-(-rows // height), _WAVES * multiprocessors) if packs else 0
    return (blocks,), (width, height)


def check_images(name: str, *shapes: Shape) -> None:
    """Raise unless a kernel can count rows, and elements of a row, with 32 bits.

    Raises:
        BackendError: images (N, H, W, C) whose rows, or elements of a row, a kernel cannot count with 32 bits.
    """
    for images, height, width, channels in shapes:
        if max(images * height, width * channels) >= _LIMIT:
            raise BackendError(
                f"The cuda kernel set's {name} takes batches of fewer than {_LIMIT} rows of fewer than {_LIMIT} elements each, "
                f"not {images} images of {height} rows of {width} x {channels}; train with smaller micro-batches or images."
            )


#: rows that a thread sums at least, where there are so many
_ROWS = 4
_COLUMN_WAVES = 8


class ColumnSums:
    """Plans the sums of (rows, columns) of `dtype`, in the dtype of parameters. In a fixed order, so always the same bits.

    Attributes:
        scratch: what `run` works with.
    """

    def __init__(self, rows: int, columns: int, dtype: str, runtime: CudaRuntime) -> None:
        self._rows, self._columns, self._dtype, self._runtime = rows, columns, dtype, runtime
        # A block is as wide as a warp, narrower where a row has fewer packs: its threads then read several rows at once.
        packs = columns // pack_width(item_bytes(dtype), columns)
        self._wide = min(32, 1 << (packs - 1).bit_length())
        blocks = -(-rows // (_ROWS * THREADS // self._wide))
        self._blocks = max(1, min(blocks, _COLUMN_WAVES * runtime.device.multiprocessors * self._wide // packs))
        self.scratch: Request = ((self._blocks if self._blocks > 1 else 0, columns), parameter_dtype(dtype))

    def run(self, x: DeviceArray, sums: DeviceArray, partial: DeviceArray, *, relu: DeviceArray | None = None) -> None:
        """Enqueue the sums over x's rows; `partial` is of the shape and dtype of `scratch`.

        Args:
            relu: the output of a ReLU, of the shape of x, its output's gradient: x becomes that of its input first, in place.
        """
        arrays = (x,) if relu is None else (x, relu)
        if self._blocks == 1:
            self._launch(arrays, sums, self._rows, 1)
            return
        self._launch(arrays, partial, self._rows, self._blocks)
        self._launch((partial,), sums, self._blocks, 1)

    def _launch(self, arrays: tuple[DeviceArray, ...], sums: DeviceArray, rows: int, blocks: int) -> None:
        width = pack_width(arrays[0].itemsize, self._columns, arrays)
        grid = (-(-self._columns // (width * self._wide)), blocks)
        block = (self._wide, THREADS // self._wide)
        name = f"column_sums{'_relu' * (len(arrays) - 1)}_{TAGS[arrays[0].dtype]}_w{width}"
        self._runtime.launch("column_sums", name, grid, block, *arrays, sums, np.int64(rows), np.int64(self._columns))
