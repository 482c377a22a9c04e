"""The order of a schedule follows from measured times once, after five steps, and is the same on every rank."""

from __future__ import annotations

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import Strategy
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import averaged, make_group, one_step

OPTIONS: dict[type[Strategy], dict[str, int]] = {Sharded: {"bucket_bytes": 40}, Priority: {"slice_parameters": 8}}


def _schedules(kind: type[Strategy], *, replan: bool, stored: CollectiveSchedule | None = None) -> list[list[CollectiveSchedule]]:
    """By rank, the schedule of each step."""

    def program(comm: ThreadCommunicator) -> list[CollectiveSchedule]:
        engine = virtual_engine(comm)
        averager = averaged(kind, make_group(), Sgd(), comm, engine, stored=stored, replan=replan, **OPTIONS[kind])
        seen = []
        for step in range(8):
            comm.compute(0.01 * (comm.rank + 1))  # ranks measure different times
            one_step(averager, step)
            assert averager.schedule is not None
            seen.append(averager.schedule)
        averager.drain()
        return seen

    return run_virtual(3, program)


@pytest.mark.parametrize("kind", OPTIONS)
def test_operations_are_ordered_again_at_the_sixth_step(kind: type[Strategy]) -> None:
    every = _schedules(kind, replan=True)
    assert every[1] == every[0]
    assert every[2] == every[0]
    assert [schedule.timed for schedule in every[0]] == [False] * 5 + [True] * 3
    assert len({schedule.slices for schedule in every[0]}) == 1
    assert len(set(every[0][5:])) == 1


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_order_that_is_measured_or_fixed_stays(kind: type[Strategy]) -> None:
    fixed = _schedules(kind, replan=False)[0]
    assert len(set(fixed)) == 1
    assert not fixed[0].timed
    measured = _schedules(kind, replan=True)[0][-1]
    assert set(_schedules(kind, replan=True, stored=measured)[1]) == {measured}
