"""Tasks are data: equal where they say the same, and usable as keys."""

from hpctrain.averaging.dependencies import EventKind, LocalEventKey
from hpctrain.planner.tasks import BeginExchange, Exchange, GroupPlacement, Happens, RankClass


def test_equal_tasks_are_one() -> None:
    happens = Happens("all", LocalEventKey(EventKind.GRADIENT, "fc.weight"))
    assert {happens, Happens("all", LocalEventKey(EventKind.GRADIENT, "fc.weight"))} == {happens}
    assert BeginExchange(1, Exchange("conv.halo", 8, 16, 1)) != BeginExchange(2, Exchange("conv.halo", 8, 16, 1))


def test_what_is_not_said_of_ranks_costs_nothing() -> None:
    ranks = RankClass("rank 0", 1, 0, 4, ())
    assert (ranks.update_seconds, ranks.product_seconds, ranks.memory_bytes) == ({}, {}, 0)
    assert GroupPlacement(4, 2, 2).alike == 1
