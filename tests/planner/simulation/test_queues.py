"""Queues start operations in the schedule's order, when what they come after is there."""

from __future__ import annotations

from hpctrain.averaging.dependencies import EventKind, LocalEventKey
from hpctrain.planner.simulation.group_tasks import group_tasks
from hpctrain.planner.simulation.operations import Posted
from hpctrain.planner.simulation.queues import GroupQueues
from hpctrain.planner.tasks import AveragedGroup
from tests.support.simulated import ITEM_BYTES, machine, placement, sharded

SIZES = (4, 4, 4)


def _queues(window: int | None = None) -> GroupQueues:
    group = AveragedGroup("all", sum(SIZES), ITEM_BYTES, sharded(SIZES, 2, window), placement(2), ("class 0",), (1, 1))
    queues = GroupQueues(group_tasks(group, machine(), 0.0))
    queues.begin_step()
    return queues


def _event(kind: EventKind, layer: int) -> LocalEventKey:
    return LocalEventKey(kind, f"l{layer}.weight")


def _start(queues: GroupQueues) -> list[Posted]:
    """Everything that may start."""
    started = []
    while queue := next((one for one in queues.queues.values() if one.startable), None):
        started.append(queue.take()[1])
    return started


def _complete(*operations: Posted) -> None:
    for posted in operations:
        posted.done = True
        if posted.complete is not None:
            posted.complete()
        for later in posted.dependents:
            later.needs -= 1
        posted.dependents.clear()


def test_an_operation_waits_for_its_turn_and_its_events() -> None:
    queues = _queues()
    queues.happens(_event(EventKind.GRADIENT, 1))
    assert _start(queues) == []  # layer 2 comes first
    queues.happens(_event(EventKind.GRADIENT, 2))
    queues.happens(_event(EventKind.GRADIENT, 2))  # a second time is none
    assert [posted.text for posted in _start(queues)] == ["reduce-scatter of l2.weight", "reduce-scatter of l1.weight"]


def test_a_window_holds_operations_back() -> None:
    queues = _queues(window=1)
    for layer in (2, 1, 0):
        queues.happens(_event(EventKind.GRADIENT, layer))
    for layer in (2, 1, 0):
        (posted,) = _start(queues)
        assert posted.text == f"reduce-scatter of l{layer}.weight"
        _complete(posted)


def test_a_gather_comes_after_its_sum_and_the_last_use() -> None:
    queues = _queues()
    queues.all_happen()
    sums = _start(queues)
    assert len(sums) == 3
    _complete(*sums)
    assert [posted.text for posted in _start(queues)] == [f"allgather of l{k}.weight" for k in range(3)]


def test_sums_come_after_the_gathers_of_the_step_before() -> None:
    queues = _queues()
    queues.all_happen()
    _complete(*_start(queues))
    gathers = _start(queues)
    _complete(*gathers[:2])  # layer 2 is still on its way
    queues.begin_step()
    assert queues.gathers_of("l2.weight") == [gathers[2]]
    queues.all_happen()
    assert _start(queues) == []
    _complete(gathers[2])
    assert len(_start(queues)) == 3
