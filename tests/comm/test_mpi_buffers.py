"""Arrays as arguments of MPI calls, with a library that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.comm.mpi_buffers import MpiBuffers, dtype_char, not_empty, piece

NAMES = ("FLOAT", "DOUBLE", "INT32_T", "INT64_T", "UINT8_T", "UINT16_T")


def _buffers() -> MpiBuffers:
    library: Any = SimpleNamespace(**{name: name for name in NAMES})
    library.buffer = SimpleNamespace(fromaddress=lambda address, size: (address, size))
    return MpiBuffers(library)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float32", "FLOAT"), ("float64", "DOUBLE"), ("uint8", "UINT8_T"), ("bfloat16", "UINT16_T")],
)
def test_arrays_of_a_device_are_addresses(dtype: str, name: str) -> None:
    array = DeviceArray(4096, (3, 2), dtype, None)
    assert _buffers().whole(array) == ((4096, array.nbytes), name)
    assert _buffers().whole(array.reshape(-1)[2:4])[0] == (4096 + 2 * array.itemsize, 2 * array.itemsize)


def test_arrays_of_the_host_are_themselves() -> None:
    for dtype, name in (("int32", "INT32_T"), ("int64", "INT64_T"), ("uint16", "UINT16_T")):
        array = np.zeros(3, dtype)
        assert _buffers().whole(array) == (array, name) or _buffers().whole(array)[0] is array
    with pytest.raises(AssertionError, match="C-contiguous"):
        _buffers().whole(np.zeros((3, 2), np.float32)[:, 0])


def test_pieces() -> None:
    array = np.arange(6.0)
    _, (counts, places), datatype = _buffers().others_parts(array, [1, 3, 2], 1)
    assert (counts, places, datatype) == ([1, 0, 2], [0, 1, 4], "DOUBLE")
    np.testing.assert_array_equal(piece(array, [1, 3, 2], 1), [1.0, 2.0, 3.0])
    assert piece(DeviceArray(64, (6,), "float32", None), [1, 3, 2], 2).pointer == 64 + 16


def test_an_empty_buffer_begins_where_no_other_does() -> None:
    array = np.zeros(4)
    assert not_empty(array) is array
    for empty in (array[:0], DeviceArray(64, (0,), "bfloat16", None)):
        other = not_empty(empty)
        assert (other.size, dtype_char(other)) == (0, dtype_char(empty))
        assert other.ctypes.data != array.ctypes.data
