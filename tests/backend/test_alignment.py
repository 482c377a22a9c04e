"""Sizes rounded up to the alignment of buffers."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.alignment import ALIGNMENT_BYTES, aligned


@given(st.integers(0, 1 << 40))
def test_a_size_is_rounded_up_to_the_next_multiple(size_bytes: int) -> None:
    rounded = aligned(size_bytes)
    assert rounded % ALIGNMENT_BYTES == 0
    assert 0 <= rounded - size_bytes < ALIGNMENT_BYTES
    assert aligned(rounded) == rounded
