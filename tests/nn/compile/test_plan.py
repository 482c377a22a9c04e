"""Regions of the arena."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.nn.compile.plan import Region

REGIONS = st.builds(Region, st.integers(0, 12), st.integers(0, 6))


@given(REGIONS, REGIONS)
def test_regions_overlap_where_they_share_a_byte(a: Region, b: Region) -> None:
    assert a.overlaps(b) is bool(set(range(a.offset, a.end)) & set(range(b.offset, b.end)))
