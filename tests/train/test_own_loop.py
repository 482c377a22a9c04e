"""A loop of the program's own: requests, skips and checkpoints are known alike on all ranks, and checks change no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import CorruptedStateError, DivergedError
from hpctrain.flight.notes import FlightNotes
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.train.own_loop import BETWEEN, OwnLoop
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import Position
from hpctrain.train.weight_watch import CheckCadence
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, replica_of, train

TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=7)
QUIET = FlightNotes(None)
CHECKED = CheckCadence(1, least_part_bytes=1)
RANKS = (1, 2, 3)


def _replica(comm: ThreadCommunicator, task: Task, loop: OwnLoop) -> Replica:
    replica = replica_of(task, comm, virtual_engine(comm), Sharded)
    replica.loop = loop
    return replica


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("asked_at", [0, 3])
def test_a_request_to_one_rank_is_known_on_all_after_the_same_step(ranks: int, asked_at: int) -> None:
    def program(comm: ThreadCommunicator) -> int:
        asked = []
        replica = _replica(comm, TASK, OwnLoop(QUIET, stop_asked=lambda: bool(asked)))
        for number, batch in enumerate(batches(TASK, comm.rank, comm.size)):
            if number == asked_at and comm.rank == comm.size - 1:
                asked.append("TERM")
            replica.step(batch, TASK.lr)
            if replica.loop.stop_requested:
                return replica.global_step
        raise AssertionError("nobody heard of it")

    assert set(run_virtual(ranks, program, seed=3)) == {asked_at + 2}


@pytest.mark.parametrize("ranks", RANKS)
def test_settling_hears_of_a_request_of_the_last_step(ranks: int) -> None:
    def program(comm: ThreadCommunicator) -> tuple[bool, bool]:
        replica = _replica(comm, TASK, OwnLoop(QUIET, stop_asked=lambda: comm.rank == 0))
        replica.step(next(batches(TASK, comm.rank, comm.size)), TASK.lr)
        before = replica.loop.stop_requested
        replica.settle()
        return before, replica.loop.stop_requested

    assert run_virtual(ranks, program) == [(False, True)] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("strategy", [Blocking, Sharded])
def test_checks_and_notes_change_no_bit(ranks: int, strategy: type) -> None:
    def program(comm: ThreadCommunicator, task: Task) -> dict[str, bytes]:
        result = train(task, comm, virtual_engine(comm), strategy)
        return {name: values.tobytes() for name, values in result.parameters.items()}

    without, checked, skipping = (
        run_virtual(ranks, partial(program, task=task), seed=5)
        for task in (TASK, replace(TASK, checks=CHECKED), replace(TASK, checks=CHECKED, skips=True))
    )
    assert without == checked == skipping


def _poisoned(comm: ThreadCommunicator, bad_steps: set[int], loop: OwnLoop) -> Replica:
    """A training in which one rank's samples are not numbers in some steps, which are skipped."""
    replica = _replica(comm, replace(TASK, skips=True), loop)
    for number, batch in enumerate(batches(TASK, comm.rank, comm.size)):
        if number in bad_steps and comm.rank == comm.size - 1:
            batch.x[...] = np.nan
        replica.step(batch, TASK.lr)
    return replica


@pytest.mark.parametrize("ranks", RANKS)
def test_skipped_steps_are_counted_alike(ranks: int) -> None:
    def program(comm: ThreadCommunicator) -> tuple[int, int, int, int]:
        loop = _poisoned(comm, {1, 2, 4, 6}, OwnLoop(QUIET, most_skips=2)).loop
        assert loop.cause is not None
        return loop.skipped, loop.skipped_in_a_row, loop.cause.step, loop.position(7).skipped

    assert run_virtual(ranks, program) == [(4, 1, 7, 4)] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_one_skip_too_many_ends_the_training_on_all_ranks(ranks: int) -> None:
    def program(comm: ThreadCommunicator) -> str:
        with pytest.raises(DivergedError) as caught:
            _poisoned(comm, {1, 2, 3}, OwnLoop(QUIET, most_skips=2))
        return str(caught.value)

    (sentence,) = set(run_virtual(ranks, program))
    assert sentence.startswith("3 steps, one after another, are not finite and were skipped, the last one step 4, as ")


def test_counts_go_on_from_a_position() -> None:
    loop = OwnLoop(QUIET)
    loop.restore(Position(skipped=5, skipped_in_a_row=2))
    assert loop.position(9) == Position(global_step=9, skipped=5, skipped_in_a_row=2)


def test_the_flight_record_knows_the_step_and_what_lies_between() -> None:
    flight = FlightRecorder()
    loop = OwnLoop(FlightNotes(flight))
    loop.begin(1, 41)
    assert flight.doing == "a training step, step 42"
    loop.end(None, 0.1, lambda: pytest.fail("there are no news"))
    assert flight.doing == f"{BETWEEN}, step 42"


# -- a program that writes -----------------------------------------------------------------------------------------------------


def _written(comm: ThreadCommunicator, tell: Callable[[Replica], None]) -> str:
    """A training whose program halves the parameters after two steps; the error, if there is one."""
    replica = replica_of(replace(TASK, checks=CheckCadence(1, hint="A hint.")), comm, virtual_engine(comm), Sharded)
    try:
        for batch in batches(TASK, comm.rank, comm.size):
            if replica.global_step == 2:
                replica.drain()
                for parameter in replica.network.parameters.values():
                    parameter.data *= 0.5
                tell(replica)
            replica.step(batch, TASK.lr)
        replica.settle()
        replica.require_alike()
    except CorruptedStateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", RANKS)
def test_what_the_program_writes_is_an_alarm_unless_it_says_so(ranks: int) -> None:
    assert set(run_virtual(ranks, partial(_written, tell=Replica.parameters_written))) == {""}
    (sentence,) = set(run_virtual(ranks, partial(_written, tell=lambda replica: None)))
    assert "changed between two updates" in sentence
    assert sentence.endswith(". A hint.")
