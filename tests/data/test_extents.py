"""Where samples lie: of one size and of several, they cover their block without gap or overlap."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.extents import Extents


def both(sizes, first):
    """Extents of samples of these sizes, and of as many of the first one's size."""
    yield Extents.rising(first, np.cumsum([0, *sizes]).astype(np.int64)), sizes
    yield Extents.fixed(first, len(sizes), sizes[0]), [sizes[0]] * len(sizes)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 5000), st.data())
def test_samples_lie_one_behind_another(sizes, first, data):
    for extents, expected in both(sizes, first):
        samples = np.arange(len(sizes))
        starts = extents.starts(samples)
        assert len(extents) == len(sizes)
        assert extents.sizes(samples).tolist() == expected
        assert starts.tolist() == np.cumsum([0, *expected])[:-1].tolist()
        assert (extents.size_bytes, extents.end) == (sum(expected), first + sum(expected))
        start = data.draw(st.integers(0, extents.size_bytes))
        stop = data.draw(st.integers(0, extents.size_bytes))
        owner = np.repeat(samples, expected)
        assert list(extents.samples_of(start, stop)) == sorted(set(owner[start:stop].tolist()))
        some = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=5)), np.int64)
        assert extents.starts(some).tolist() == starts[some].tolist()
        assert extents.sizes(some).tolist() == [expected[sample] for sample in some]


def test_nothing_has_no_extent():
    assert Extents.fixed(7, 0, 3).size_bytes == 0
    assert list(Extents.fixed(7, 0, 3).samples_of(0, 10)) == []
