"""Base classes of the cuda set's operators, and launches that several operators share.

`row_launch` serves kernels that process images row by row (images.cuh). `ColumnSums` sums the rows of a matrix, for gradients of
biases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from hpctrain.backend import operators
from hpctrain.backend.cuda.device import ALIGNMENT_BYTES, DeviceArray, Extent, pack_width
from hpctrain.backend.cuda.runtime import TAGS, THREADS, CudaRuntime
from hpctrain.backend.operators import Accumulating, PlainOperator, Request
from hpctrain.backend.specs import Shape, Spec, TensorSpec, item_bytes, parameter_dtype
from hpctrain.core.errors import BackendError

NO_BUFFER = DeviceArray(0, (0,), "uint8", None)


def total_bytes(requests: Iterable[Request]) -> int:
    """Return the size in bytes of a buffer that `carve` divides into these arrays."""
    return operators.total_bytes(requests, ALIGNMENT_BYTES)


def carve(buffer: DeviceArray | None, requests: Iterable[Request]) -> list[DeviceArray]:
    """Return arrays of these shapes and dtypes, one after another in `buffer` (uint8), each aligned to ALIGNMENT_BYTES."""
    return operators.carve(NO_BUFFER if buffer is None else buffer, requests, ALIGNMENT_BYTES)


class CudaOperatorBase(PlainOperator):
    """Base of operators on plain NHWC memory of a device.

    Calls enqueue work on the runtime's stream and never wait (except in `CallsHost` operators), so that a program can be
    captured. Values that change from step to step are read from the device's memory, and no argument depends on the context.

    Attributes:
        tag: tag of the activations' dtype in kernel names.
    """

    array_alignment_bytes: ClassVar[int] = ALIGNMENT_BYTES
    no_buffer: ClassVar[DeviceArray] = NO_BUFFER
    saved: Sequence[DeviceArray]
    scratch: Sequence[DeviceArray]

    def __init__(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, inputs, training=training)
        self.runtime, self.tag = runtime, TAGS[self.dtype]


class CudaOperator(Accumulating, CudaOperatorBase):
    """Base of operators whose kernels can add to the input's gradient, as the plan may request."""


_THREADS = 256
_WARP = 32
# Blocks per multiprocessor: far more than run at once, so that few multiprocessors idle at the end of a launch.
_WAVES = 256
_LIMIT = 1 << 30  # so that a count plus one step still fits 32 bits


def row_launch(rows: int, packs: int, multiprocessors: int) -> tuple[Extent, Extent]:
    """Return grid and block for `rows` rows of `packs` packs each.

    A block has 256 threads. Its width is that of a row, rounded up to a power of two between 32 and 256; its remaining threads
    process further rows. The grid is empty if there are no packs.
    """
    width = min(_THREADS, max(_WARP, 1 << (packs - 1).bit_length())) if packs else _WARP
    height = _THREADS // width
    blocks = min(-(-rows // height), _WAVES * multiprocessors) if packs else 0
    return (blocks,), (width, height)


def check_images(name: str, *shapes: Shape) -> None:
    """Raise an error unless 32-bit integers suffice to count the rows, and the elements of a row.

    Raises:
        BackendError: images (N, H, W, C) have too many rows, or too many elements in a row.
    """
    for images, height, width, channels in shapes:
        if max(images * height, width * channels) >= _LIMIT:
            raise BackendError(
                f"Backend cuda's {name} supports batches of fewer than {_LIMIT} rows of fewer than {_LIMIT} elements each, not "
                f"{images} images of {height} rows of {width} x {channels}; train with smaller micro-batches or images."
            )


#: minimum number of rows that a thread sums, if there are enough
_ROWS = 4
_COLUMN_WAVES = 8


class ColumnSums:
    """Column sums of matrices (rows, columns) of `dtype`, computed in the dtype of parameters and in a fixed order.

    Attributes:
        scratch: array that `run` needs.
    """

    def __init__(self, rows: int, columns: int, dtype: str, runtime: CudaRuntime) -> None:
        self._rows, self._columns, self._dtype, self._runtime = rows, columns, dtype, runtime
        # A block is as wide as a warp, or narrower if a row has fewer packs. Its threads then read several rows at once.
        packs = columns // pack_width(item_bytes(dtype), columns)
        self._wide = min(32, 1 << (packs - 1).bit_length())
        blocks = -(-rows // (_ROWS * THREADS // self._wide))
        self._blocks = max(1, min(blocks, _COLUMN_WAVES * runtime.device.multiprocessors * self._wide // packs))
        self.scratch: Request = ((self._blocks if self._blocks > 1 else 0, columns), parameter_dtype(dtype))

    def run(self, x: DeviceArray, sums: DeviceArray, partial: DeviceArray, *, relu: DeviceArray | None = None) -> None:
        """Enqueue the sums over x's rows.

        Args:
            partial: array of the shape and dtype of `scratch`.
            relu: output of a ReLU whose gradient is x, of the shape of x. x is first replaced by the gradient before the ReLU.
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
