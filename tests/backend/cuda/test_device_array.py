"""Device arrays against ndarrays of the same shape: places of views; and nothing that reads elements on the host."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda.device_array import DeviceArray


def _array(*shape: int, dtype: str = "float32") -> DeviceArray:
    return DeviceArray(1 << 12, shape, dtype, object())


def test_sizes() -> None:
    array = _array(2, 3, 4, dtype="bfloat16")
    assert (array.size, array.nbytes, array.itemsize, array.ndim, len(array)) == (24, 48, 2, 3, 2)


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    start=st.none() | st.integers(-6, 6),
    stop=st.none() | st.integers(-6, 6),
)
def test_slices_are_where_those_of_an_ndarray_are(shape: tuple[int, ...], start: int | None, stop: int | None) -> None:
    reference = np.zeros(shape, np.float32)
    array = DeviceArray(reference.ctypes.data, shape, "float32", reference)
    got, wanted = array[start:stop], reference[start:stop]
    assert got.shape == wanted.shape
    assert not wanted.size or got.pointer == wanted.ctypes.data
    assert got.owner is reference


@pytest.mark.parametrize("index", [0, slice(None, None, 2), slice(None, None, -1), (0, 0), ..., None])
def test_other_indices_are_refused(index: Any) -> None:
    with pytest.raises(TypeError, match="in the device's memory"):
        _array(4, 2)[index]


def test_reshape() -> None:
    array = _array(4, 6)
    assert array.reshape(24).shape == array.reshape((24,)).shape == array.reshape([24]).shape == (24,)
    assert array.reshape(2, -1, 3).shape == (2, 4, 3)
    assert array.reshape(2, 12).pointer == array.pointer
    assert array.reshape(2, 12).owner is array.owner
    with pytest.raises(ValueError, match=r"24 elements of shape \(4, 6\) have no shape \(5, 5\)"):
        array.reshape(5, 5)
    for shape in ((5, -1), (-1, -1), (-1, -24)):
        with pytest.raises(ValueError, match="have no shape"):
            array.reshape(shape)
    assert _array(0, 3).reshape(-1, 3).shape == (0, 3)


def test_reshape_of_nothing_to_an_unknown_number() -> None:
    with pytest.raises(ValueError, match="have no shape"):
        _array(0, 3).reshape(-1, 0)


def test_view() -> None:
    assert _array(5, 4, dtype="uint8").view("float32").shape == (5,)
    assert _array(3).view("bfloat16").shape == (6,)
    with pytest.raises(ValueError, match="3 bytes are no whole number of float32 elements"):
        _array(3, dtype="uint8").view("float32")


def _write(array: DeviceArray) -> None:
    array[:] = 0  # type: ignore[index]


@pytest.mark.parametrize(
    "read",
    [
        *(np.asarray, np.array, np.add.reduce, float, int, bool, list, iter, _write),
        lambda array: np.add(array, 1),
        lambda array: array + np.float32(1),
        lambda array: np.float32(1) + array,
        lambda array: 3 in array,
        lambda array: np.copyto(np.zeros(3), array),
    ],
)
def test_elements_are_not_for_the_host(read: Callable[[DeviceArray], object]) -> None:
    with pytest.raises(TypeError):
        read(_array(3))


@pytest.mark.parametrize("compute", [operator.add, operator.mul, operator.matmul, operator.lt])
def test_there_is_no_arithmetic(compute: Callable[[object, object], object]) -> None:
    with pytest.raises(TypeError):
        compute(_array(3), 1)
    with pytest.raises(TypeError):
        compute(_array(3), _array(3))
