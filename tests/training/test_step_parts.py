"""The parts of a step: its message, micro-batches, times, traces, limits, and the memory that it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import LossSums
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import MessageAccount, ProgressEngine
from hpctrain.core.errors import BackendError
from hpctrain.core.text import size_text
from hpctrain.data.loader import Batch, Share
from hpctrain.nn.layers import Flatten, Linear, ReLU, Sequential
from hpctrain.nn.network import Network
from hpctrain.optim.optimizers import Sgd
from hpctrain.optim.stagnation import Stagnation
from hpctrain.trace import time_table
from hpctrain.trace.tracer import CONCURRENT, Category, Events, Tracer
from hpctrain.training import accounts
from hpctrain.training.accounts import StepParts, StepTimes, StepTrace
from hpctrain.training.metrics import StepReduction, StepTotals
from hpctrain.training.passes import check_memory, micro_batches_of, planned
from hpctrain.training.snapshot import Position
from hpctrain.training.step import GradientSum
from hpctrain.training.stopping import EarlyStop, TimeLimit
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import make_group
from tests.support.training import Result, Task, distance, train


def _message(comm: Communicator, progress: ProgressEngine) -> StepReduction:
    return StepReduction(comm, progress, 2)


def _on(comm: Communicator) -> list[StepTotals]:
    message = _message(comm, virtual_engine(comm))
    totals = []
    for step in range(3):
        message.clear()
        # rank r has r samples
        sums = LossSums(loss=float(comm.rank * (step + 1)), top1=comm.rank, top5=2 * comm.rank, count=comm.rank)
        message.add(sums, comm.rank * np.array([1.0, step]))
        before = message.read()
        message.post(stop=comm.rank == 1 and step == 1)
        if before is not None:
            totals.append(StepTotals(**{**vars(before), "statistics": before.statistics.copy()}))
    last = message.read()
    assert last is not None
    assert message.read() is None
    return [*totals, last]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_sums_over_ranks_arrive_in_order(ranks: int) -> None:
    samples = sum(range(ranks))
    for totals in run_virtual(ranks, _on, seed=5):
        for step, total in enumerate(totals):
            assert (total.loss, total.top1, total.top5, total.count) == (samples * (step + 1), samples, 2 * samples, samples)
            assert list(total.statistics) == [samples, samples * step]
            assert total.stop == (1 if step == 1 and ranks > 1 else 0)
            assert total.non_finite == 0


def test_numbers_of_checks_are_summed_with_the_statistics() -> None:
    def program(comm: Communicator) -> tuple[list[float], list[float]]:
        message = StepReduction(comm, virtual_engine(comm), 2, checks=3)
        for factor in (1.0, 2.0):
            message.read()
            message.clear()
            message.add(LossSums(0.0, 0, 0, 1), np.array([1.0, 2.0]))
            message.post(stop=False, checks=factor * np.array([comm.rank, 1.0, 2.0]))
        totals = message.read()
        assert totals is not None
        return totals.statistics.tolist(), totals.checks.tolist()

    assert run_virtual(3, program) == [([3.0, 6.0], [6.0, 6.0, 12.0])] * 3


def test_a_loss_that_is_not_finite_is_counted_and_not_summed() -> None:
    message = _message(*lone_rank())
    message.clear()
    message.add(LossSums(float("nan"), 0, 0, 4), np.zeros(2))
    message.add(LossSums(3.0, 1, 1, 2), np.ones(2))
    message.post(stop=False)
    total = message.read()
    assert total is not None
    assert (total.loss, total.non_finite, total.count) == (3.0, 1, 6)


def test_the_last_micro_batch_takes_the_sum_of_those_before_it() -> None:
    group = make_group()
    total = GradientSum(group)
    random = np.random.default_rng(1)
    for _ in range(2):  # nothing is left of the step before
        gradients = random.standard_normal((3, group.size)).astype(group.dtype)
        total.start()
        for number, gradient in enumerate(gradients[:2]):
            group.grad[...] = gradient
            for parameter in group.parameters.values():
                total.add(parameter, number)
            total.end_pass()
        group.grad[...] = gradients[2]
        for number, parameter in enumerate(reversed(group.parameters.values())):
            before = group.grad.copy()
            total.complete(parameter)
            segment = group.segment(parameter.name)
            assert np.array_equal(group.grad[: segment.start], before[: segment.start]), f"parameter {number} changes another one"
        assert np.array_equal(group.grad, gradients[2] + (gradients[0] + gradients[1]))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5))
def test_micro_batches_part_a_share(counts: list[int], number: int) -> None:
    first = [sum(counts[:rank]) for rank in range(len(counts))]
    by_rank = [list(micro_batches_of(Share(tuple(counts), rank), number)) for rank in range(len(counts))]
    samples = np.arange(sum(counts))
    for passes in zip(*by_rank, strict=True):
        assert len({micro_batch.counts for micro_batch in passes}) == 1
        own = [samples[start:][micro_batch.own] for start, micro_batch in zip(first, passes, strict=True)]
        assert [len(ids) for ids in own] == list(passes[0].counts)
        for micro_batch in passes:
            assert np.array_equal(samples[micro_batch.shared], np.concatenate(own))
    for rank, passes in enumerate(by_rank):
        sizes = [micro_batch.counts[rank] for micro_batch in passes]
        assert sum(sizes) == counts[rank]
        assert max(sizes) - min(sizes) <= 1


BATCH = Batch(np.zeros((1, 1, 1, 1)), np.zeros(1), np.zeros(1), (1,), 1, 0, 0, Share((1,)))


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Scene:
    """A rank's clocks, and the engine that counts its waits and its work on messages."""

    def __init__(self) -> None:
        self.now = self.own_cpu = 100.0
        self.engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None)
        self.account = self.engine.account = MessageAccount(
            clock_ns=lambda: round(self.now * 1e9), cpu_ns=lambda: round(self.own_cpu * 1e9)
        )

    def clock(self) -> float:
        return self.now

    def processor(self) -> float:
        return self.own_cpu

    def work(self, seconds: float, off_core: float = 0.0) -> None:
        self.now += seconds + off_core
        self.own_cpu += seconds

    def update(self, seconds: float) -> None:
        begin = self.account.clock_ns()
        self.work(seconds)
        self.account.updated(begin, self.account.clock_ns())

    def messages(self, seconds: float) -> None:
        self.account.begin()
        self.work(seconds)
        self.account.end()

    def wait(self, polling: float = 0.0, sleeping: float = 0.0, update: float = 0.0) -> None:
        begin = self.now
        self.account.begin_wait()
        self.work(polling, sleeping)
        self.update(update)
        self.account.end_wait()
        self.engine.waited_seconds += self.now - begin


def _after(steps: Sequence[tuple[float, float]]) -> StepParts | None:
    """The account after steps of (work, wait)."""
    scene = _Scene()
    times = StepTimes(scene.engine, scene.clock)
    times.before_epoch(Position())
    for work, waited in steps:
        scene.work(work)
        scene.wait(sleeping=waited)
        times.after_step(Position(), usual=True)
    return times.measured()


def _step(work: float, waited: float, steps: int) -> StepParts:
    return StepParts(work + waited, steps, work, 0.0, waited, 0.0, 0.0)


def test_the_first_steps_settle_and_are_not_counted() -> None:
    assert _after([(9.0, 8.0)] * 6) is None
    assert _after([(9.0, 8.0)] * 6 + [(0.5, 0.25)] * 3) == _step(0.5, 0.25, 3)


class _Did(NamedTuple):
    """What a rank did in a step, in seconds."""

    work: int
    off_core: int
    loading: int
    messages: int
    polling: int
    sleeping: int
    update: int
    late_update: int

    def play(self, scene: _Scene, times: StepTimes) -> None:
        batch: Any = None
        times.before_batch()
        scene.work(self.loading / 4, self.loading)
        times.before_step(batch, whole=True)
        scene.work(self.work, self.off_core)
        scene.messages(self.messages)
        scene.update(self.update)
        scene.wait(self.polling, self.sleeping, self.late_update)
        times.after_step(Position(), usual=True)

    def row(self, *, of_processor: bool) -> list[float]:
        """The arguments of `StepParts.of`, without the number of steps."""
        exposed, data, updates = self.polling + self.sleeping, 1.25 * self.loading, self.update + self.late_update
        busy = self.work + self.messages + updates + (0 if of_processor else self.off_core)
        seconds = self.work + self.off_core + self.messages + updates + exposed + data
        return [seconds, exposed, self.messages, data, updates, busy]


_DID = st.builds(_Did, *[st.integers(0, 9)] * 8)


@given(st.lists(_DID, min_size=1, max_size=30), st.booleans())
def test_what_a_rank_did_and_awaited_adds_up_to_its_steps(steps: list[_Did], of_processor: bool) -> None:
    """No time counts twice or not at all, such as an update in a wait. All means are of the same steps."""
    scene = _Scene()
    times = StepTimes(scene.engine, scene.clock, scene.processor if of_processor else None)
    times.before_epoch(Position())
    for step in [*[_Did(9, 9, 9, 9, 9, 9, 9, 9)] * 6, *steps]:
        step.play(scene, times)
    measured = times.measured()
    assert measured is not None
    rows = np.array([step.row(of_processor=of_processor) for step in steps])
    cut = len(rows) // 4
    middle = rows[np.argsort(rows[:, 0], kind="stable")[cut : len(rows) - cut]].mean(axis=0)
    assert vars(measured) == pytest.approx(vars(StepParts.of(len(steps), *middle.tolist())), abs=1e-6)
    if not of_processor:
        assert measured.core_seconds == pytest.approx(0.0, abs=1e-6)


def test_rare_long_steps_do_not_count() -> None:
    assert _after([(9.0, 8.0)] * 6 + [(2.0, 0.5)] * 9 + [(50.0, 40.0)] * 3) == _step(2.0, 0.5, 12)


def test_what_happens_between_stretches_and_in_a_step_with_more_to_do_is_no_step() -> None:
    scene = _Scene()
    times = StepTimes(scene.engine, scene.clock)
    for _ in range(3):
        scene.wait(sleeping=50.0)  # an evaluation
        times.before_epoch(Position())
        for number in range(6):
            scene.work(2.0)
            scene.wait(sleeping=0.5 if number != 4 else 30.5)  # a checkpoint
            times.after_step(Position(), usual=number != 4)
    assert times.measured() == _step(2.0, 0.5, 9)


def test_the_latest_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_MOST_STEPS", 5)
    assert _after([(1.0, 0.0)] * 40 + [(3.0, 2.0)] * 5) == _step(3.0, 2.0, 5)


@pytest.mark.parametrize(("first", "later", "steps"), [(30, 30, 60), (30, 31, 31), (5, 19, 24), (5, 20, 20)])
def test_later_epochs_count_alone_if_they_have_most_steps(first: int, later: int, steps: int) -> None:
    """Steps whose loader reads files are then not mixed with steps whose loader reads memory. Otherwise all steps count."""
    scene = _Scene()
    times = StepTimes(scene.engine, scene.clock)
    for of_epoch, seconds in ((6 + first, 8.0), (10, 2.0), (later - 10, 2.0)):
        times.before_epoch(Position())
        for _ in range(of_epoch):
            scene.work(seconds)
            times.after_step(Position(), usual=True)
    measured = times.measured()
    assert measured is not None
    assert measured.steps == steps
    if steps == later:
        assert measured == _step(2.0, 0.0, steps)


def _run(limit: TimeLimit, clock: _Clock, step: float, checkpoint: float, every: int = 0, steps: int = 100_000) -> float:
    """Train until the limit has asked, one step more, and a checkpoint: when that is written."""
    for number in range(1, steps):
        clock.now += step
        over = limit.over(saves=every > 0 and number % every == 0)
        if every and number % every == 0:
            with limit.saving():
                clock.now += checkpoint
        if over:
            clock.now += step
            with limit.saving():
                clock.now += checkpoint
            return clock.now
    raise AssertionError("never asked")


@pytest.mark.parametrize("step", [0.01, 0.5, 7.0])
@pytest.mark.parametrize("checkpoint", [0.1, 20.0])
@pytest.mark.parametrize("every", [0, 10])
def test_the_checkpoint_is_written_before_the_limit(step: float, checkpoint: float, every: int) -> None:
    clock = _Clock()
    end = _run(TimeLimit(1000.0, clock), clock, step, checkpoint, every)
    assert end <= 1000.0
    # Late enough: no more is left than two steps, the slack of two checkpoints, and what leaving and a first one may take.
    assert end > 1000.0 - 3 * step - 2 * checkpoint - 10 - 60


@pytest.mark.parametrize(("seconds", "asks"), [(math.inf, False), (-5.0, True)])
def test_a_limit_that_is_past_asks_at_once_and_none_never(seconds: float, asks: bool) -> None:
    limit = TimeLimit(seconds, _Clock())
    assert (limit.finite, limit.over(), limit.asked) == (asks, asks, asks)


def test_an_evaluation_that_does_not_fit_any_more_is_left_to_the_next_run() -> None:
    clock = _Clock()
    limit = TimeLimit(1000.0, clock)
    with limit.evaluating():
        clock.now += 300
    with limit.saving():
        clock.now += 1
    for _ in range(450):
        clock.now += 1
        assert not limit.over()
    assert limit.over(evaluates=True)


def test_checkpoints_and_evaluations_are_no_part_of_a_step() -> None:
    clock = _Clock()
    limit = TimeLimit(1000.0, clock)
    clock.now += 1
    limit.over()
    with limit.saving():
        clock.now += 100
    with limit.evaluating():
        clock.now += 600
    clock.now += 1
    assert not limit.over()  # 702 s are gone; a step of 701 s would ask for 1402 more


def test_a_slow_first_step_is_forgotten() -> None:
    clock = _Clock()
    limit = TimeLimit(1000.0, clock)
    clock.now += 250  # programs are made
    assert not limit.over()
    for _ in range(400):
        clock.now += 1
        assert not limit.over()


VALUES = st.one_of(st.integers(0, 8).map(lambda eighths: eighths / 8), st.just(math.nan), st.just(math.inf))


def _epochs_trained(values: list[float], patience: int, min_delta: float, sign: int) -> int:
    """The definition: the first epoch that ends a stretch of `patience` without one that is better than all that counted."""
    best, since = -math.inf, 0
    for epoch, value in enumerate(values, 1):
        if math.isfinite(value) and sign * value > best + min_delta:
            best, since = sign * value, epoch
        if epoch - since >= patience:
            return epoch
    return len(values)


@given(st.lists(VALUES, min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([0.0, 0.125]), st.booleans(), st.data())
def test_early_stop_ends_where_the_definition_does_whatever_is_resumed(
    values: list[float], patience: int, min_delta: float, of_loss: bool, data: st.DataObject
) -> None:
    metric = "ema_loss" if of_loss else "top5"
    rule = EarlyStop(metric, patience, min_delta=min_delta)
    position = Position()
    for epoch, value in enumerate(values, 1):
        position.epoch = epoch
        position.stagnation = rule.after(position.stagnation, epoch, {metric: value, "top1": 0.0})
        if data.draw(st.booleans()):  # as a run that goes on from here, and evaluates again
            position = Position.from_meta({"position": position.to_meta()})
            position.stagnation = rule.after(position.stagnation, epoch, {metric: 1.0 - value})
        if rule.ends(position.stagnation):
            break
    assert position.epoch == _epochs_trained(values, patience, min_delta, -1 if of_loss else 1)


def test_a_run_without_early_stop_has_no_trace_of_it_in_its_checkpoints() -> None:
    assert "stagnation" not in Position(epoch=2).to_meta()


def test_another_metric_begins_to_count_and_another_patience_goes_on() -> None:
    before = Stagnation("top1", 0.5, 1, 3, 2)
    assert EarlyStop("top1", 2).ends(before)
    assert not EarlyStop("top1", 3).ends(before)
    assert not EarlyStop("loss", 1).ends(before)
    assert EarlyStop("loss", 1).after(before, 4, {"loss": 2.0}) == Stagnation("loss", 2.0, 4, 4)


@pytest.mark.parametrize(
    ("rule", "state", "sentence"),
    [
        (
            EarlyStop("top1", 2, min_delta=0.5),
            Stagnation("top1", 0.5, 1, 3, 2),
            "early stop after epoch 3: no improvement by more than 0.5 in 2 evaluations since epoch 1 (top1 50.00%)",
        ),
        (
            EarlyStop("loss", 1),
            Stagnation("loss", 0.25, 4, 5, 1),
            "early stop after epoch 5: no improvement in 1 evaluation since epoch 4 (loss 0.2500)",
        ),
        (EarlyStop("loss", 1), Stagnation("loss", None, 0, 1, 1), "early stop after epoch 1: 1 evaluation had no finite loss"),
    ],
)
def test_early_stop_says_why(rule: EarlyStop, state: Stagnation, sentence: str) -> None:
    assert rule.sentence(state) == sentence


class LimitedKernelSet(NumpyKernelSet):
    """Has a number of bytes left."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def free_bytes(self) -> int:
        return self.free


def _network(free: int) -> Network:
    layers = {"flatten": Flatten(), "fc1": Linear(192, 50), "relu": ReLU(), "fc2": Linear(50, 3)}
    return Network(Sequential(layers), (8, 8, 3), LimitedKernelSet(free))


def _state() -> int:
    return sum(group.data.nbytes for group in _network(0).groups.values())


@pytest.mark.parametrize("fits", [1, 2, 9, 31])
def test_the_largest_pass_that_fits_is_accepted(fits: int) -> None:
    network = _network(_network(0).arena_bytes(fits, training=True) + _state())
    check_memory(network, 3 * fits, 3)
    with pytest.raises(BackendError, match=f"over {fits + 1} samples needs .* raise micro_batches"):
        check_memory(network, 3 * fits + 1, 3)


def test_memory_of_the_host_is_not_counted() -> None:
    check_memory(Network(Flatten(), (1, 1, 3), NumpyKernelSet()), 1 << 40, 1)


def test_the_plan_is_that_of_the_network_that_was_checked_last() -> None:
    network = _network(1 << 40)
    check_memory(network, 12, 3)
    sentence = planned()
    assert sentence is not None
    assert f"the plan needs {size_text(network.arena_bytes(4, training=True))} for a pass over 4 samples" in sentence
    assert f"{size_text(3 * _state())} for parameters" in sentence
    del network
    assert planned() is None


TRACED = Task(nets.residual, NumpyKernelSet(), Sgd, steps=3)


def _traced(comm: ThreadCommunicator, task: Task) -> tuple[Result, Events]:
    tracer = Tracer(20_000)
    progress = ProgressEngine(
        rank=comm.rank, deadline_seconds=1e9, abort=comm.abort, clock=comm.now, sleep=lambda seconds: None, trace=tracer
    )
    return train(task, comm, progress, Blocking), tracer.events()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tracing_changes_nothing_and_records_every_operator(ranks: int) -> None:
    found = run_virtual(ranks, lambda comm: _traced(comm, TRACED))
    plain = run_virtual(ranks, lambda comm: train(TRACED, comm, virtual_engine(comm), Blocking))
    for (traced, events), other in zip(found, plain, strict=True):
        assert distance(traced.parameters, other.parameters) == 0.0
        names = {events.names[index] for index in events.of(Category.FORWARD).name}
        forward = len(events.of(Category.FORWARD))
        assert forward == TRACED.steps * len(names)
        assert 0 < len(events.of(Category.INPUT)) < forward
        assert len(events.of(Category.COMMUNICATION)) >= 2 * TRACED.steps  # gradients, message; statistics with them


def test_records_of_a_step_have_no_gaps_and_nest() -> None:
    (_, events), *_ = run_virtual(2, lambda comm: _traced(comm, TRACED), seed=1)
    program = events.select(~np.isin(events.category, CONCURRENT))
    assert np.all(program.start_ns <= program.stop_ns)
    outer = program.of(Category.FORWARD, Category.PARAMETERS, Category.INPUT, Category.AVERAGING, Category.WORK)
    whole = time_table.union(outer.start_ns, outer.stop_ns)
    assert len(whole[0]) == TRACED.steps  # one run of touching records a step
    assert int((outer.stop_ns - outer.start_ns).sum()) == time_table.total_length(whole)  # and none overlaps another
    inner = program.of(Category.WAIT, Category.UPDATE)
    inside = inner.select(inner.start_ns < whole[1][-1])
    order = np.searchsorted(whole[0], inside.start_ns, side="right") - 1
    message = np.array([inside.names[index] == "step message" for index in inside.name], bool)  # read after the step
    assert np.all(inside.stop_ns[~message] <= whole[1][order][~message])


def test_operations_are_numbered_alike_on_all_ranks() -> None:
    found = run_virtual(3, lambda comm: _traced(comm, TRACED)[1], seed=4)

    def keys(events: Events) -> set[tuple[str, int, str]]:
        operations = events.of(Category.COMMUNICATION)
        rows = zip(operations.track, operations.number, operations.name, strict=True)
        return {(events.tracks[track], int(number), events.names[name]) for track, number, name in rows}

    assert keys(found[0]) == keys(found[1]) == keys(found[2])
    assert len(keys(found[0])) == len(found[0].of(Category.COMMUNICATION))


def test_steps_are_recorded_with_the_loading_of_their_batches() -> None:
    tracer = Tracer(50)
    steps = StepTrace(tracer)
    for number in range(4):
        steps.before_batch()
        steps.before_step(replace(BATCH, step=number), whole=True)
        steps.after_step(Position(), usual=True)
    steps.before_batch()  # the epoch is over
    events = tracer.events()
    assert events.of(Category.STEP).number.tolist() == [0, 1, 2, 3]
    assert events.of(Category.LOADING).start_ns.tolist() == events.of(Category.STEP).start_ns.tolist()
