"""Arrays that the operators of the cuda set are given out of one buffer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.operator import carve, total_bytes

REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 40), max_size=3).map(tuple), st.sampled_from(["float32", "bfloat16", "float64", "uint8"]))
)


@given(requests=REQUESTS)
def test_arrays_are_aligned_apart_and_inside_the_buffer(requests: list[tuple[tuple[int, ...], str]]) -> None:
    buffer = DeviceArray(1 << 20, (total_bytes(requests),), "uint8", object())
    arrays = carve(buffer, requests)
    assert [(array.shape, array.dtype) for array in arrays] == requests
    end = buffer.pointer
    for array in arrays:
        assert array.pointer % ALIGNMENT_BYTES == 0
        assert array.pointer >= end
        assert array.owner is buffer.owner
        end = array.pointer + array.nbytes
    assert end <= buffer.pointer + buffer.nbytes


def test_nothing_is_carved_out_of_nothing() -> None:
    assert carve(None, []) == []
    with pytest.raises(AssertionError, match="smaller than what was declared"):
        carve(None, [((1,), "float32")])
