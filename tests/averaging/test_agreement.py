"""Ranks agree on one schedule: a rank with another one is named on every rank, and a stored one is used where it fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.averaging.agreement import check_same_schedule
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import CollectiveMismatchError
from hpctrain.optim.base import NormsNeeded
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import STRATEGIES, averaged, make_group, planned


def _schedule(strategy: str) -> CollectiveSchedule:
    kind, options = STRATEGIES[strategy]
    schedule = planned(kind, make_group(), 4, norms_needed=NormsNeeded.GLOBAL, **options).plan(None)
    assert schedule is not None
    return schedule


def test_another_order_on_one_rank_is_named_on_every_rank() -> None:
    schedule = _schedule("sharded")
    operations = list(schedule.operations)
    operations[1], operations[2] = operations[2], operations[1]
    wrong = replace(schedule, operations=tuple(operations))
    first = schedule.slices[schedule.operations[1].slice].name

    def program(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            check_same_schedule(comm, wrong if comm.rank == 2 else schedule)
        return str(caught.value)

    for message in run_virtual(4, program):
        assert f"operation 1: rank 0 has reduce-scatter of {first}" in message
        assert "but rank 2 has" in message


def test_other_options_and_other_slices_on_one_rank_are_named_too() -> None:
    schedule = _schedule("bucketed")
    moved = list(schedule.slices)
    moved[-1] = replace(moved[-1], order=99)
    for wrong, words in (
        (replace(schedule, request="other"), "the request"),
        (replace(schedule, operations=schedule.operations[:-1]), "nothing more"),
        (replace(schedule, slices=tuple(moved)), "slices"),
    ):

        def program(comm: Communicator, wrong: CollectiveSchedule = wrong) -> str:
            with pytest.raises(CollectiveMismatchError) as caught:
                check_same_schedule(comm, schedule if comm.rank else wrong)
            return str(caught.value)

        assert all(words in message for message in run_virtual(3, program))


def test_a_model_that_differs_on_one_rank_is_refused_when_averagers_agree() -> None:
    def program(comm: Communicator) -> None:
        engine = virtual_engine(comm)  # type: ignore[arg-type]
        options = {"bucket_bytes": 100 if comm.rank else 300, "replan": False}
        with pytest.raises(CollectiveMismatchError, match=r"bucket_bytes 300.*bucket_bytes 100"):
            averaged(Sharded, make_group(), Sgd(), comm, engine, **options)

    run_virtual(3, program)


def test_a_stored_schedule_is_used_for_the_same_request_only() -> None:
    comm = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort)

    first = planned(Sharded, make_group(), bucket_bytes=100, replan=False).plan(None)
    assert first is not None
    stored = replace(first, timed=True)
    for bucket_bytes, used in ((100, True), (400, False)):
        second = averaged(Sharded, make_group(), Sgd(), comm, engine, stored=stored, bucket_bytes=bucket_bytes, replan=False)
        assert (second.schedule == stored) is used
