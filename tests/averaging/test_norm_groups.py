"""Groups of norms: laws of the rule, for slices that fuse and cut parameters in any way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.collective_schedule import ALL_SLICES, CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.compute_times import Times
from hpctrain.averaging.norm_groups import covered_slices, norm_groups, slices_of_groups
from hpctrain.averaging.slices import cut, fused
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.optim.base import NormsNeeded
from tests.support.averaging import STRATEGIES, make_group, planned


def _layout(sizes: list[int]) -> GroupLayout:
    return GroupLayout({f"l{k}": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(sizes)})


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 80), st.integers(1, 80))
def test_every_parameter_is_in_one_group_of_neighbours(sizes: list[int], least: int, most: int) -> None:
    layout = _layout(sizes)
    slices = cut(layout, fused(layout, least), most)
    groups = list(slices_of_groups(norm_groups(layout, slices), len(slices)).values())
    assert [k for group in groups for k in group] == list(range(len(slices)))
    names = [dict.fromkeys(name for k in group for name in slices[k].parameters) for group in groups]
    in_order = [name for group in names for name in group]
    assert in_order == [segment.parameter for segment in layout.segments if segment.size]
    # Few, and none so small that it is hardly worth a message, but the front-most.
    assert len(groups) <= 8 + np.log2(max(1, len(slices)))
    for group in groups[1:]:
        held, left = (sum(slices[k].size for k in range(begin, group.stop)) for begin in (group.start, 0))
        assert len(group) >= 2
        assert 8 * held >= layout.size or 2 * held >= left


def test_groups_have_an_eighth_each_and_halve_in_front() -> None:
    layout = _layout([10] * 64)
    assert norm_groups(layout, fused(layout, 10)) == (0, 2, 4, 8, 16, 24, 32, 40, 48, 56)


def test_the_slices_of_one_layer_are_one_group() -> None:
    layout = _layout([800, 10, 10])
    assert norm_groups(layout, cut(layout, fused(layout, 10), 100)) == (0,)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_covers_every_slice_once(strategy: str) -> None:
    kind, options = STRATEGIES[strategy]
    for norms in NormsNeeded:
        schedule = planned(kind, make_group(), 3, norms_needed=norms, **options).plan(None)
        assert schedule is not None
        if any(operation.kind is OperationKind.ALLREDUCE for operation in schedule.operations):
            assert not covered_slices(schedule)  # whole sums are everywhere, and so are norms
            continue
        covered = [k for slices in covered_slices(schedule).values() for k in slices]
        assert covered == (list(range(len(schedule.slices))) if norms is not NormsNeeded.NONE else [])


@pytest.mark.parametrize(("kind", "size"), [(Sharded, "bucket_bytes"), (Priority, "slice_parameters")])
def test_orders_from_other_times_have_the_same_groups(kind: type[Sharded | Priority], size: str) -> None:
    """So the lengths of messages, which decide what is added first, repeat in every run."""
    strategy = planned(kind, make_group(), 3, norms_needed=NormsNeeded.LAYER, fc_exchange="never", **{size: 8})
    assert isinstance(strategy, Sharded | Priority)
    first = strategy.plan(None)
    assert len(covered_slices(first)) > 1
    random = np.random.default_rng(3)
    for _ in range(5):
        ready = {name: float(random.random()) for name, parameter in make_group().parameters.items() if parameter.size}
        again = strategy.replan(first, Times(ready, {name: at + 0.1 for name, at in ready.items()}, ready, 1.1), None)
        assert covered_slices(again) == covered_slices(first)


def test_norms_that_overlap_are_refused() -> None:
    layout = _layout([8, 8])
    slices = cut(layout, fused(layout, 1), 4)

    def schedule(*starts: int) -> CollectiveSchedule:
        operations = tuple(Operation(OperationKind.NORMS, start, Stream.NORMS) for start in starts)
        return CollectiveSchedule("x", 2, slices, operations)

    assert covered_slices(schedule(2, 0)) == {0: range(2), 2: range(2, 4)}
    assert covered_slices(schedule(ALL_SLICES)) == {ALL_SLICES: range(4)}
    for starts in ((0, 1), (0, 0), (ALL_SLICES, 0)):
        with pytest.raises(AssertionError):
            covered_slices(schedule(*starts))
    alike = replace(schedule(0), operations=())
    assert not covered_slices(alike)
