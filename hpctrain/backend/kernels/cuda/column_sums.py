"""Sums over the rows of a matrix: gradients of biases."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.device import pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.dtypes import item_bytes, parameter_dtype
from hpctrain.backend.cuda.operator import Request
from hpctrain.backend.kernels.cuda.runtime import TAGS, THREADS, CudaRuntime

#: rows that a thread sums at least, where there are so many
_ROWS = 4
_WAVES = 8


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
        self._blocks = max(1, min(blocks, _WAVES * runtime.device.multiprocessors * self._wide // packs))
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
