"""Overlapped averaging: one allreduce per parameter."""

from hpctrain.averaging.strategies.overlap import Overlap
from tests.support.averaging import make_group, planned


def test_each_parameter_has_a_message_of_its_own() -> None:
    group = make_group()
    strategy = planned(Overlap, group, 3)
    schedule = strategy.plan(None)
    assert schedule is not None
    assert [piece.parameters for piece in schedule.slices] == [(name,) for name, each in group.parameters.items() if each.size]
    assert (strategy.request() or "").startswith("overlap; parameters ")
    assert not strategy.needs_link(None)
