"""A traced step is the same step; its records have no gaps."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch, Share
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.trace import intervals
from hpctrain.trace.tracer import BESIDE, Category, Events, Tracer
from hpctrain.train.tracing import TimedOptimizer, timed_optimizer, traced_steps
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Result, Task, distance, train

TASK = Task(nets.residual, NumpyKernelSet(), Sgd, steps=3)


def _traced(comm: ThreadCommunicator, task: Task) -> tuple[Result, Events]:
    tracer = Tracer(20_000)
    progress = ProgressEngine(
        rank=comm.rank, deadline_seconds=1e9, abort=comm.abort, clock=comm.now, sleep=lambda seconds: None, trace=tracer
    )
    return train(task, comm, progress, Blocking), tracer.events()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tracing_changes_nothing_and_records_every_operator(ranks: int) -> None:
    found = run_virtual(ranks, lambda comm: _traced(comm, TASK))
    plain = run_virtual(ranks, lambda comm: train(TASK, comm, virtual_engine(comm), Blocking))
    for (traced, events), other in zip(found, plain, strict=True):
        assert distance(traced.parameters, other.parameters) == 0.0
        names = {events.names[index] for index in events.of(Category.FORWARD).name}
        forward = len(events.of(Category.FORWARD))
        assert forward == TASK.steps * len(names)
        assert 0 < len(events.of(Category.INPUT)) < forward
        assert len(events.of(Category.COMMUNICATION)) >= 2 * TASK.steps  # gradients, message; statistics beside them


def test_records_of_a_step_have_no_gaps_and_nest() -> None:
    (_, events), *_ = run_virtual(2, lambda comm: _traced(comm, TASK), seed=1)
    program = events.select(~np.isin(events.category, BESIDE))
    assert np.all(program.start_ns <= program.stop_ns)
    outer = program.of(Category.FORWARD, Category.PARAMETERS, Category.INPUT, Category.AVERAGING, Category.WORK)
    whole = intervals.union(outer.start_ns, outer.stop_ns)
    assert len(whole[0]) == TASK.steps  # one run of touching records a step
    assert int((outer.stop_ns - outer.start_ns).sum()) == intervals.length(whole)  # and none overlaps another
    inner = program.of(Category.WAIT, Category.UPDATE)
    inside = inner.select(inner.start_ns < whole[1][-1])
    order = np.searchsorted(whole[0], inside.start_ns, side="right") - 1
    message = np.array([inside.names[index] == "step message" for index in inside.name], bool)  # read after the step
    assert np.all(inside.stop_ns[~message] <= whole[1][order][~message])


def test_operations_are_numbered_alike_on_all_ranks() -> None:
    found = run_virtual(3, lambda comm: _traced(comm, TASK)[1], seed=4)

    def keys(events: Events) -> set[tuple[str, int, str]]:
        operations = events.of(Category.COMMUNICATION)
        rows = zip(operations.track, operations.number, operations.name, strict=True)
        return {(events.tracks[track], int(number), events.names[name]) for track, number, name in rows}

    assert keys(found[0]) == keys(found[1]) == keys(found[2])
    assert len(keys(found[0])) == len(found[0].of(Category.COMMUNICATION))


def test_an_optimiser_that_is_timed_needs_what_it_needed() -> None:
    engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None, trace=Tracer(8))
    for inner in (Sgd(clip_norm=0.5), Lars()):
        wrapped = timed_optimizer(inner, engine)
        assert isinstance(wrapped, TimedOptimizer)
        assert (wrapped.norms_needed, wrapped.layer_norms, wrapped.clip_norm) == (
            inner.norms_needed,
            inner.layer_norms,
            inner.clip_norm,
        )


def _batches(count: int, closed: list[bool]) -> Generator[Batch, None, None]:
    try:
        for step in range(count):
            yield Batch(np.zeros((1, 1, 1, 1)), np.zeros(1), np.zeros(1), (1,), 1, 0, step, Share((1,)))
    finally:
        closed.append(True)


@pytest.mark.parametrize("traced", [False, True])
def test_steps_pass_all_batches_and_close_the_loader(traced: bool) -> None:
    closed: list[bool] = []
    tracer = Tracer(50)
    found = [batch.step for batch in traced_steps(_batches(4, closed), tracer if traced else None)]
    assert found == [0, 1, 2, 3]
    assert closed == [True]
    steps = tracer.events().of(Category.STEP)
    assert steps.number.tolist() == ([0, 1, 2, 3] if traced else [])
    loading = tracer.events().of(Category.LOADING)
    assert loading.start_ns.tolist() == steps.start_ns.tolist()


def test_a_step_that_is_left_early_is_recorded() -> None:
    closed: list[bool] = []
    tracer = Tracer(50)
    steps = traced_steps(_batches(9, closed), tracer)
    next(steps)
    next(steps)
    steps.close()
    assert closed == [True]
    assert tracer.events().of(Category.STEP).number.tolist() == [0, 1]
