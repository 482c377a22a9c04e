"""Arrays in the form in which mpi4py takes them: those of the host as they are, those of a device by their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.comm.base import Array

#: NumPy's characters of the dtypes of a device; bfloat16 travels as its bits
_CHARS = {"float32": "f", "float64": "d", "bfloat16": "H", "uint8": "B"}


class MpiBuffers:
    """Makes the arguments of MPI calls. The library has to read a device's memory where arrays of one are given.

    Args:
        mpi: the module of mpi4py, which `comm.mpi` alone imports.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._types = {
            "f": mpi.FLOAT,
            "d": mpi.DOUBLE,
            "i": mpi.INT32_T,
            "l": mpi.INT64_T,
            "q": mpi.INT64_T,
            "B": mpi.UINT8_T,
            "H": mpi.UINT16_T,
        }

    def whole(self, array: Array) -> tuple[Any, Any]:
        """All elements of a C-contiguous array, with MPI's datatype."""
        datatype = self._types[dtype_char(array)]
        if isinstance(array, DeviceArray):
            return self._mpi.buffer.fromaddress(array.pointer, array.nbytes), datatype
        assert array.flags.c_contiguous, "a buffer is C-contiguous"
        return array, datatype

    def others_parts(self, array: Array, counts: Sequence[int], rank: int) -> tuple[Any, tuple[list[int], list[int]], Any]:
        """A buffer in pieces, of which this rank's own is left out and keeps its place."""
        buffer, datatype = self.whole(array)
        places = list(accumulate(counts, initial=0))[:-1]
        return buffer, ([0 if other == rank else count for other, count in enumerate(counts)], places), datatype


def dtype_char(array: Array) -> str:
    """NumPy's character of an array's dtype; that of its bits for bfloat16."""
    return _CHARS[array.dtype] if isinstance(array, DeviceArray) else str(array.dtype.char)


def piece(array: Array, counts: Sequence[int], rank: int) -> Array:
    """A rank's piece of a buffer, 1-D, over the same memory."""
    begin = sum(counts[:rank])
    return array.reshape(-1)[begin : begin + counts[rank]]


def not_empty(array: Array) -> Array:
    """The array, or another one without elements that begins where no other array does.

    Open MPI takes equal addresses for "in place", also of an empty buffer that begins where the other one does.
    """
    if array.size:
        return array
    dtype = dtype_char(array)
    return np.empty(1, dtype)[:0]
