"""Owned segments lie one behind the other in an optimiser's state, whatever lies between them in the flat buffers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.arithmetic import UpdateRun
from hpctrain.nn.parameter import Segment
from hpctrain.optim.packing import Packing


def _segment(start: int, stop: int) -> Segment:
    return Segment("a", start, stop, 0, True)


@given(st.sets(st.integers(0, 40), min_size=2), st.data())
def test_places_are_those_of_the_elements_in_order(cuts: set[int], data: st.DataObject) -> None:
    owned = [_segment(a, b) for a, b in pairwise(sorted(cuts)) if data.draw(st.booleans())]
    elements = np.concatenate([np.arange(s.start, s.stop) for s in owned] or [np.arange(0)])
    packing = Packing(data.draw(st.permutations(owned)))
    assert packing.size == elements.size
    for segment in owned:
        low = data.draw(st.integers(segment.start, segment.stop - 1))
        part = segment.part(low, segment.stop)
        assert np.array_equal(elements[packing.place(part)], np.arange(low, segment.stop))
        run = packing.placed(UpdateRun(low, segment.stop, 0.5, 0.25))
        assert elements[run.start + run.offset] == low
        assert (run.stop, run.gradient_scale, run.decay) == (segment.stop, 0.5, 0.25)


def test_what_is_not_owned_has_no_place() -> None:
    packing = Packing([_segment(3, 5), _segment(8, 9)])
    assert packing.place(_segment(4, 4)).start == packing.place(_segment(4, 4)).stop
    for segment in (_segment(2, 4), _segment(4, 6), _segment(4, 9)):
        with pytest.raises(AssertionError, match="not owned"):
            packing.place(segment)
    with pytest.raises(AssertionError, match="overlap"):
        Packing([_segment(3, 5), _segment(4, 9)])
