"""Parts of the MPI communicator with a scripted MPI: handles and buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.comm.base import piece
from hpctrain.comm.mpi import MpiBuffers, MpiHandle, dtype_char, not_empty


class Clock:
    """Nanoseconds that only scripted calls advance."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    scripted = Clock()
    monkeypatch.setattr("hpctrain.comm.mpi.time.perf_counter_ns", scripted)
    monkeypatch.setattr(MpiHandle, "_shortest_ns", 400)
    return scripted


class TimedRequest:
    """Moves data in its first calls, and in none after them."""

    def __init__(self, clock: Clock, moving: int) -> None:
        self._clock, self._moving, self.calls = clock, moving, 0

    def Test(self) -> bool:
        self.calls += 1
        self._clock.now += 5_000 if self.calls <= self._moving else 1_500
        return False


@pytest.mark.parametrize(("moving", "calls"), [(0, 1), (1, 2), (5, 6), (200, 64)])
def test_a_test_calls_mpi_while_data_moves(clock: Clock, moving: int, calls: int) -> None:
    """With a single call, the link would idle during the next operator; calls without end would stop the program."""
    request = TimedRequest(clock, moving)
    assert not MpiHandle(request, "allgather").test()
    assert request.calls == calls


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
