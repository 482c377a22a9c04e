"""Partitions give every element one owner; what is needed may overlap."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.boxes import even_intervals, relative, whole
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout, LayoutKind


def _owners(found: Layout) -> np.ndarray:
    """How many ranks hold each element."""
    held = np.zeros(found.shape, int)
    for box in found.boxes:
        held[relative(box, whole(found.shape))] += 1
    return held


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 5), st.integers(1, 9))
def test_every_element_has_one_owner(counts: list[int], height: int, width: int, channels: int) -> None:
    shape, ranks = (sum(counts), height, width, channels), len(counts)
    made = [
        layout.samples(shape, counts),
        layout.channels(shape, even_intervals(channels, ranks)),
        layout.tiles(shape, (ranks, 1)),
        layout.tiles(shape, (1, ranks)),
    ]
    for found in made:
        assert found.is_partition
        assert len(found.boxes) == ranks
        assert (_owners(found) == 1).all()


def test_tiles_count_along_the_rows_first() -> None:
    found = layout.tiles((2, 5, 7, 3), (2, 3))
    assert [(box[1], box[2]) for box in found.boxes] == [
        ((0, 3), (0, 3)), ((0, 3), (3, 5)), ((0, 3), (5, 7)),
        ((3, 5), (0, 3)), ((3, 5), (3, 5)), ((3, 5), (5, 7)),
    ]  # fmt: skip
    assert (_owners(found) == 1).all()


@pytest.mark.parametrize("channels", [1, 8])
def test_images_of_one_height_are_cut_alike(channels: int) -> None:
    a, b = layout.tiles((2, 9, 4, 3), (4, 1)), layout.tiles((2, 9, 4, channels), (4, 1))
    assert [box[1] for box in a.boxes] == [box[1] for box in b.boxes]


def test_what_is_needed_is_no_partition() -> None:
    everything = layout.everything((2, 3), 3)
    assert not everything.is_partition
    assert (_owners(everything) == 3).all()
    assert everything.kind is LayoutKind.NEEDED


def test_layouts_agree_where_all_ranks_hold_the_same() -> None:
    shape = (4, 2, 2, 6)
    assert layout.samples(shape, (2, 2)).same_boxes(layout.needed(shape, layout.samples(shape, (2, 2)).boxes))
    assert not layout.samples(shape, (2, 2)).same_boxes(layout.samples(shape, (3, 1)))
