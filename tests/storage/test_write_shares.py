"""The rule by which holders of the same share what is written: all of it once, and evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.boxes import Box, relative, size_of, whole
from hpctrain.storage import write_shares
from hpctrain.storage.write_shares import WriteShares

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@given(SHAPES, st.integers(1, 5), st.integers(5, 400))
def test_every_element_has_one_writer(shapes: list[tuple[int, ...]], holders: int, least_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_shares, "_SMALLEST_SHARED_BYTES", least_bytes)
        of_each = [WriteShares(number, holders) for number in range(holders)]
        for shape in shapes:
            times = np.zeros(shape, int)
            for one in of_each:
                box = one.own(whole(shape), 4)
                if box is not None:
                    times[relative(box, whole(shape))] += 1
            assert np.all(times == 1)


def test_large_ones_are_split_and_small_ones_go_to_those_with_least() -> None:
    large, small = whole((7, 65536)), whole((100,))
    of_each = [WriteShares(number, 3) for number in range(3)]
    sizes = [size_of(one.own(large, 4) or ()) for one in of_each]
    assert max(sizes) - min(sizes) <= 7
    owners: list[list[Box | None]] = [[one.own(small, 4) for one in of_each] for _ in range(3)]
    assert [boxes.index(small) for boxes in owners] == [0, 1, 2]
