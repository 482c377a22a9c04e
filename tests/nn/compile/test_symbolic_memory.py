"""Memory that holds names: only the last write of exactly these bytes can be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.nn.compile.plan import Region
from hpctrain.nn.compile.symbolic_memory import InvalidPlanError, SymbolicMemory, activation, gradient

REGIONS = st.builds(Region, st.integers(0, 12), st.integers(1, 8))


@given(st.lists(REGIONS, max_size=12))
def test_it_holds_what_an_array_of_bytes_holds(writes: list[Region]) -> None:
    memory, cells = SymbolicMemory(), [-1] * 20
    for number, region in enumerate(writes):
        memory.write(region, activation(number), f"step {number}")
        cells[region.offset : region.end] = [number] * region.size_bytes
    for number, region in enumerate(writes):
        if cells[region.offset : region.end] == [number] * region.size_bytes:
            memory.read(region, activation(number), "reader", "value")
        else:
            with pytest.raises(InvalidPlanError, match=r"reader reads value .* has overwritten it\.$"):
                memory.read(region, activation(number), "reader", "value")


@given(REGIONS, REGIONS)
def test_a_part_is_not_the_whole(written: Region, read: Region) -> None:
    memory = SymbolicMemory()
    memory.write(written, activation(1), "step 1")
    if written == read:
        memory.read(read, activation(1), "reader", "value")
    else:
        with pytest.raises(InvalidPlanError):
            memory.read(read, activation(1), "reader", "value")


def test_a_name_goes_with_the_memory() -> None:
    memory, region = SymbolicMemory(), Region(0, 8)
    memory.write(region, activation(1), "step 1")
    memory.add_name(region, activation(2))
    memory.read(region, activation(1), "reader", "value")
    memory.read(region, activation(2), "reader", "value")
    memory.write(Region(4, 2), activation(3), "step 3")
    with pytest.raises(InvalidPlanError, match="step 3 has overwritten it"):
        memory.read(region, activation(2), "reader", "value")


def test_contributions_are_those_of_the_gradient_that_is_there() -> None:
    memory, region, both = SymbolicMemory(), Region(0, 8), frozenset({(1, 0), (2, 0)})
    assert memory.contributions(region, 5) is None
    memory.write(region, gradient(5, both), "step 1")
    assert memory.contributions(region, 5) == both
    assert memory.contributions(region, 6) is None
    assert memory.contributions(Region(0, 4), 5) is None


def test_empty_regions_hold_anything_and_overwrite_nothing() -> None:
    memory = SymbolicMemory()
    memory.write(Region(0, 8), activation(1), "step 1")
    memory.write(Region(4, 0), activation(2), "step 2")
    memory.read(Region(0, 8), activation(1), "reader", "value")
    memory.read(Region(99, 0), activation(7), "reader", "value")
