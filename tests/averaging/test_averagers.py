"""Averagers: when they update parameters and replan, and what they resume, keep, swap and undo, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging import averagers, link_simulation, slicing
from hpctrain.averaging.averager_state import UndoCopy, copy_parameters, swap_parameters, unique_segments
from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager, Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.link_simulation import StepClock, Times
from hpctrain.averaging.reduce_scatter import ReduceScatterAverager
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.strategies.blocking import Blocking, BlockingAverager
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.backend.arithmetic import Array, Descent, UpdateRun
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import Operator, StepContext
from hpctrain.backend.specs import Spec, TensorSpec
from hpctrain.comm.base import Communicator, Complete
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import LocalEvent, ProgressEngine
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.ema import EMA, EmaRule
from hpctrain.optim.optimizers import Adamw, Lars, Sgd
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.training.snapshot import Position
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import OPTIMIZERS, STRATEGIES, averaged, make_group, one_step, planned, step_with
from tests.support.training import Task, batches, replica_of
from tests.training.test_checkpoint_state import assert_same
from tests.training.test_checksums import STRATEGIES as STATE_STRATEGIES
from tests.training.test_checksums import made, task_on

LINK = LinkModel(1e-4, 1e-3)
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


def _times_of(rank: int, parameters: Sequence[str]) -> Times:
    """Backward as it is, a second a parameter; rank 0 was disturbed: its last gradients seemed to come very late."""
    count = len(parameters)
    ready = {name: float(count - position) for position, name in enumerate(parameters)}
    if rank == 0:
        ready = {name: float(position) for position, name in enumerate(parameters)}
    needed = {name: 0.1 * position for position, name in enumerate(parameters)}
    return Times(ready, {name: at + 0.5 for name, at in ready.items()}, needed, count + 1.0)


@pytest.mark.parametrize("kind", OPTIONS)
def test_one_odd_rank_does_not_decide_the_order(monkeypatch: pytest.MonkeyPatch, kind: type[Strategy]) -> None:
    """Rank 0 of three measures nonsense: the order is that of the others' times.

    Fails where the plan is made of rank 0's own times (`over_ranks` replaced by `clock.times()`), and of means or maxima.
    """

    def program(comm: ThreadCommunicator) -> tuple[CollectiveSchedule, CollectiveSchedule]:
        group, engine = make_group(), virtual_engine(comm)
        averager = averaged(kind, group, Sgd(), comm, engine, fc_exchange="never", **OPTIONS[kind])
        names = tuple(name for name, parameter in group.parameters.items() if parameter.size)
        monkeypatch.setattr(StepClock, "times", lambda clock: _times_of(clock._progress.rank, names))
        first = averager.schedule
        assert first is not None
        for step in range(6):
            one_step(averager, step)
        averager.drain()
        assert averager.schedule is not None
        return first, averager.schedule

    for first, schedule in run_virtual(3, program, link=LINK):
        strategy = planned(kind, make_group(), 3, fc_exchange="never", **OPTIONS[kind])
        assert isinstance(strategy, ReduceScatterStrategy)
        names = tuple(segment.parameter for segment in strategy.group.layout.segments if segment.size)
        expected, wrong = (strategy.replan(first, _times_of(rank, names), LINK).operations for rank in (1, 0))
        assert schedule.operations == expected != wrong


class _EverySecond(ReduceScatterAverager):
    """Leaves the slices of one layer out of every second step, or all slices."""

    everything = False

    def left_out_slices(self) -> frozenset[int]:
        pieces = enumerate(self.schedule.slices) if self._steps % 2 == 1 else ()
        return frozenset(k for k, piece in pieces if self.everything or "b.weight" in piece.parameters)


class _Skipping(Sharded):
    everything = False

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        made = _EverySecond(setup, agreement, exchanging={}, nominal_batch=0)
        made.everything = self.everything
        return made


class _SkippingAll(_Skipping):
    everything = True


def _skipped(
    ranks: int, optimizer: str, seed: int | None = None, kind: type[Strategy] = _Skipping
) -> list[list[tuple[np.ndarray, np.ndarray, int]]]:
    """By rank and step, the parameters of the layer that is left out, all others, and bytes that gradients had."""

    def program(comm: ThreadCommunicator) -> list[tuple[np.ndarray, np.ndarray, int]]:
        counters = Counters()
        counting, group, engine = CountingCommunicator(comm, counters), make_group(), virtual_engine(comm)
        options = {"bucket_bytes": 8, "fc_exchange": "never", "replan": False}
        averager = averaged(kind, group, OPTIMIZERS[optimizer](), counting, engine, **options)
        seen = []
        for step in range(6):
            before = counters.snapshot()
            one_step(averager, step)
            if kind is _Skipping:  # the other one goes on with messages on their way
                averager.drain()
            sent = counters.since(before).total(operation="ireduce_scatter").payload_bytes
            if step == 5:
                averager.drain()
            seen.append((group.parameters["b.weight"].data.copy(), group.data.copy(), sent))
        return seen

    return run_virtual(ranks, program, seed=seed)


def test_a_slice_that_a_step_leaves_out_is_neither_summed_nor_updated() -> None:
    size = make_group().parameters["b.weight"].size
    before = make_group().parameters["b.weight"].data
    for step, (layer, _, sent) in enumerate(_skipped(3, "nesterov", seed=4)[0]):
        assert np.array_equal(layer, before) == (step % 2 == 0)
        assert sent == (make_group().size - (size if step % 2 == 0 else 0)) * 8
        before = layer


@pytest.mark.parametrize("kind", [_Skipping, _SkippingAll])
@pytest.mark.parametrize("optimizer", ["clipping", "lars", "lars, clipping"])
def test_norms_are_of_what_takes_part_in_the_step(optimizer: str, kind: type[Strategy]) -> None:
    """And those of a step that leaves slices out never spoil the updates of the step before, which are still to come."""
    ((_, alone, _),) = (run[-1] for run in _skipped(1, optimizer, kind=kind))
    for by_step in _skipped(3, optimizer, seed=1, kind=kind):
        np.testing.assert_allclose(by_step[-1][1], alone, rtol=1e-10, atol=1e-12)


def test_a_parameter_is_updated_when_it_is_next_used_and_not_before() -> None:
    def program(comm: ThreadCommunicator) -> None:
        averager = averaged(Overlap, make_group(), Sgd(), comm, virtual_engine(comm))
        group = averager.group
        before = group.data.copy()
        one_step(averager, 0)
        averager.begin_step(0.1)
        np.testing.assert_array_equal(group.data, before)
        averager.before_forward([group.parameters["a.weight"]])
        changed = group.data != before
        segment = group.segment("a.weight")
        assert changed[segment.start : segment.stop].any()
        assert not changed[segment.stop :].any()
        with pytest.raises(AssertionError, match="was used before it was waited for"):
            averager.grad_ready(group.parameters["b.weight"])
        averager.end_backward()
        averager.drain()

    run_virtual(2, program)


@pytest.mark.parametrize(("kind", "in_parts"), [(Bucketed, True), (Overlap, False)])
def test_very_large_slices_travel_in_parts_unless_each_parameter_is_to_be_a_message(
    kind: type[Strategy], in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LARGEST_BYTES", "_LEAST_PART_BYTES"):
        monkeypatch.setattr(slicing, name, 8)

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        counters = Counters()
        averager = averaged(kind, make_group(), Sgd(), CountingCommunicator(comm, counters), virtual_engine(comm))
        one_step(averager, 0)
        averager.drain()
        assert averager.schedule is not None
        return counters.total(operation="iallreduce").operations, len(averager.schedule.operations)

    for sent, scheduled in run_virtual(2, program):
        assert (sent > scheduled) == in_parts
        assert sent >= scheduled


STORED_SIZES = (5000, 9001, 3, 12000, 8000)
FAST, SLOW = LinkModel(1e-6, 1e-8), LinkModel(1e-3, 1e-8)  # slices of 16 KiB, and one of everything

STORED_STRATEGIES: dict[str, tuple[type[Strategy], dict[str, object]]] = {
    "bucketed": (Bucketed, {}),
    "sharded": (Sharded, {}),
    "priority": (Priority, {}),
    "lazy": (Lazy, {"layers": 2}),
}

#: parameters, states, the schedule, counters
StoredRun = tuple[np.ndarray, list[dict[str, np.ndarray]], str, dict[str, int]]


def _layers() -> FlatGroup:
    random = np.random.default_rng(5)
    specs = {
        f"l{k}.weight": ParameterSpec((size,), lambda random, shape: np.zeros(shape), decay=k != 2)
        for k, size in enumerate(STORED_SIZES)
    }
    group = FlatGroup(specs, "float32")
    group.data[...] = random.standard_normal(group.size)
    return group


def _averager_of_layers(strategy: str, comm: ThreadCommunicator, stored: CollectiveSchedule | None = None) -> GradientAverager:
    kind, options = STORED_STRATEGIES[strategy]
    optimizer = Lars(weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.5)
    return averaged(kind, _layers(), optimizer, comm, virtual_engine(comm), stored=stored, **options)


def _run(averager: GradientAverager, steps: range) -> None:
    for step in steps:
        random = np.random.default_rng([step, averager.comm.rank])
        step_with(averager, 0.1, lambda parameter, random=random: np.sin(parameter.data * random.standard_normal()))
    averager.drain()


def _measure(monkeypatch: pytest.MonkeyPatch, link: LinkModel) -> None:
    monkeypatch.setattr(averagers, "calibrate", lambda comm, progress: link)


def _part(strategy: str, ranks: int, steps: range, first: StoredRun | None = None) -> list[StoredRun]:
    """Some steps, from the start or from where another run has ended."""

    def program(comm: ThreadCommunicator) -> StoredRun:
        averager = _averager_of_layers(strategy, comm, stored=None if first is None else CollectiveSchedule.from_json(first[2]))
        parameters = averager.group.parameters.values()
        if first is not None:
            averager.group.data[...] = first[0]
            for parameter, state in zip(parameters, first[1], strict=True):
                averager.load_state(parameter, state)
            averager.load_counters(first[3])
        _run(averager, steps)
        assert averager.schedule is not None
        states = [averager.full_state(parameter) for parameter in parameters]
        return averager.group.data.copy(), states, averager.schedule.to_json(), averager.counters()

    return run_virtual(ranks, program)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 7])  # before and after operations are ordered by measured times
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STORED_STRATEGIES)
def test_resume_is_bitwise_whatever_is_measured(monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int, stop: int) -> None:
    monkeypatch.setattr(slicing, "RULE_LINK", FAST)  # several slices of these few parameters
    _measure(monkeypatch, FAST)
    through = _part(strategy, ranks, range(12))
    first = _part(strategy, ranks, range(stop))[0]
    _measure(monkeypatch, SLOW)
    second = _part(strategy, ranks, range(stop, 12), first)
    for (ours, _, schedule, counters), (theirs, _, _, expected) in zip(second, through, strict=True):
        assert counters == expected
        assert CollectiveSchedule.from_json(schedule).slices == CollectiveSchedule.from_json(first[2]).slices
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("stop", [3, 7])
def test_an_order_not_yet_measured_is_measured_after_the_resume(monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    measured: list[str] = []

    def calibrate(comm: Communicator, progress: object) -> LinkModel:
        measured.append(comm.name)
        return FAST

    _measure(monkeypatch, FAST)
    first = _part("sharded", 2, range(stop))[0]
    assert CollectiveSchedule.from_json(first[2]).timed is (stop > 5)
    monkeypatch.setattr(averagers, "calibrate", calibrate)
    assert CollectiveSchedule.from_json(_part("sharded", 2, range(stop, 12), first)[0][2]).timed
    assert bool(measured) is (stop <= 5)


def _measure_times(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every clock measures times by chance, which put operations into another order."""
    calls = count(seed)

    def times(clock: link_simulation.StepClock) -> Times:
        random = np.random.default_rng(next(calls))
        ready, free, needed = ({f"l{k}.weight": random.uniform(0, 1e-2) for k in range(len(STORED_SIZES))} for _ in range(3))
        return Times(ready, {name: at + ready[name] for name, at in free.items()}, needed, 3e-2)

    monkeypatch.setattr(link_simulation.StepClock, "times", times)


@pytest.mark.parametrize("strategy", STORED_STRATEGIES)
def test_what_is_measured_changes_no_bit_by_default(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """The link and the times of two runs differ: they have the same slices and end with the same bits, in whatever order."""
    monkeypatch.setattr(slicing, "RULE_LINK", FAST)  # several slices of these few parameters
    monkeypatch.setattr(slicing, "_LEAST_BUCKET_BYTES", 1 << 12)
    ended: list[StoredRun] = []
    for seed, link in enumerate((FAST, SLOW, LinkModel(1e-7, 1e-6), LinkModel(0.0, 0.0))):
        _measure(monkeypatch, link)
        _measure_times(monkeypatch, 10 * seed)
        ended.append(_part(strategy, 3, range(9))[0])
    schedules = [CollectiveSchedule.from_json(each[2]) for each in ended]
    assert len(schedules[0].slices) > 2 or strategy == "priority"
    for (data, state, *_), schedule in zip(ended, schedules, strict=True):
        assert schedule.slices == schedules[0].slices
        assert data.tobytes() == ended[0][0].tobytes()
        for own, other in zip(state, ended[0][1], strict=True):
            assert all(own[name].tobytes() == other[name].tobytes() for name in own)
    if strategy in ("sharded", "priority"):
        assert all(schedule.timed for schedule in schedules)


@pytest.mark.parametrize("strategy", STORED_STRATEGIES)
def test_a_schedule_with_measured_sizes_of_an_earlier_version_is_used_again(strategy: str) -> None:
    kind, options = STORED_STRATEGIES[strategy]
    made = planned(kind, _layers(), **options)
    schedule = made.plan(FAST)
    assert schedule is not None
    earlier = replace(schedule, request=schedule.request.replace(";", ", sizes measured;", 1))
    assert made.accepts(CollectiveSchedule.from_json(earlier.to_json()))


def test_an_operation_and_all_after_it_start_once_the_event_has_happened() -> None:
    comm, engine = lone_rank()
    queue = engine.queue(comm)
    started: list[str] = []

    def start(name: str) -> Complete:
        started.append(name)
        return Complete()

    event = LocalEvent("gradient of a")
    first = queue.post(lambda: start("a"), "a", [event])
    second = queue.post(lambda: start("b"), "b")
    engine.poll()
    assert started == []
    assert "gradient of a" in str(first)
    event.happen()
    assert started == []  # nothing starts but in a poll
    engine.wait(second)
    assert started == ["a", "b"]
    assert first.done


class ShadowArithmetic(HostArithmetic):
    """Descents write shadows too."""

    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        descent = super().descent(data, gradient, momentum, factor=factor, nesterov=nesterov)
        update = descent.update

        def with_shadow(runs: Iterable[UpdateRun], *rest: Any) -> None:
            runs = list(runs)
            update(runs, *rest)
            for run in runs:
                np.copyto(shadow[run.start : run.stop], data[run.start : run.stop], "same_kind")

        descent.update = with_shadow  # type: ignore[method-assign]
        return descent


class Watching(NumpyKernelSet):
    """Operators compare their parameters with the shadows of these before they run. seen: how many were compared."""

    arithmetic = ShadowArithmetic()
    shadow_dtype = "float32"

    def __init__(self) -> None:
        self.seen = 0

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        operator = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        forward = operator.forward

        def watched(context: StepContext) -> None:
            for role, data in operator.buffers.parameters.items():
                assert np.array_equal(operator.buffers.shadows[role], data.astype(np.float32)), (spec, role)
                self.seen += 1
            forward(context)

        operator.forward = watched  # type: ignore[method-assign]
        return operator


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("strategy", [Blocking, Bucketed, Lazy, Overlap, Priority, Sharded])
def test_shadows_are_fresh_in_every_forward_pass(strategy: type, ranks: int) -> None:
    def run(comm: Communicator) -> int:
        task = Task(nets.residual, Watching(), partial(Sgd, momentum=0.9), steps=4)
        replica = replica_of(task, comm, virtual_engine(comm), strategy)
        for batch in batches(task, replica.groups.position, comm.size, replica.tiles):
            replica.step(batch, task.lr)
        assert isinstance(task.kernels, Watching)
        return task.kernels.seen

    assert min(run_virtual(ranks, run, seed=2)) > 4 * 10


@pytest.mark.parametrize("strategy", [name for name in STATE_STRATEGIES if name != "corrected"])
@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (3, 1), (4, 2)])
def test_each_element_comes_once(strategy: str, ranks: int, per_node: int) -> None:
    def taken(comm: ThreadCommunicator) -> tuple[Counter[int], dict[str, Counter[int]], int]:
        (averager,) = made(comm, task_on(1, ranks, "plain"), strategy).averagers.values()
        elements, states = Counter[int](), dict[str, Counter[int]]()
        for segment, views in unique_segments(averager):
            elements.update(range(segment.start, segment.stop))
            for name, values in views.items():
                assert values.shape == (segment.size,)
                states.setdefault(name, Counter()).update(range(segment.start, segment.stop))
        return elements, states, averager.group.size

    by_rank = run_virtual(ranks, taken, ranks_per_node=per_node)
    size = by_rank[0][2]
    once = Counter(range(size))
    assert sum((elements for elements, _, _ in by_rank), Counter()) == once
    for state in ("momentum", "ema"):
        assert sum((states.get(state, Counter()) for _, states, _ in by_rank), Counter()) == once
    assert max(sum(elements.values()) for elements, _, _ in by_rank) <= size


def test_states_are_views_of_those_that_the_optimiser_keeps() -> None:
    def written(comm: ThreadCommunicator) -> float:
        (averager,) = made(comm, task_on(1, 2, "plain"), "blocking").averagers.values()
        for _, views in unique_segments(averager):
            views["momentum"][...] = 1.0
        return float(sum(np.sum(averager.optimizer.state(segment)["momentum"]) for segment in averager.group.segments))

    assert sum(run_virtual(2, written)) == run_virtual(1, written)[0] > 0


def test_an_averager_that_owns_parts_says_which_of_them_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockingAverager, "owned", lambda self: self.group.segments, raising=False)

    def taken(comm: ThreadCommunicator) -> None:
        (averager,) = made(comm, task_on(1, 2, "plain"), "blocking").averagers.values()
        with pytest.raises(AssertionError, match="must define `counted`"):
            list(unique_segments(averager))

    run_virtual(2, taken)


TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=19, batch=8, steps=3, ema=EmaRule(0.8))


def _swapped(comm: ThreadCommunicator, averager: str) -> dict[str, list[np.ndarray]]:
    """By parameter: the weights, what the swap brings, what checkpoints have of the average, and what a second swap brings."""
    progress = ProgressEngine(rank=comm.rank, deadline_seconds=60, abort=comm.abort)
    options = {"density": 1.0} if averager == "sparse" else {}
    replica = replica_of(TASK, comm, progress, AveragerChoice(averager, options).strategy)
    for batch in batches(TASK, comm.rank, comm.size, replica.tiles):
        replica.step(batch, TASK.lr)
    replica.drain()
    (owner,) = replica.averagers.values()
    parameters = owner.group.parameters
    found = {name: [parameter.data.copy()] for name, parameter in parameters.items()}
    averages = {name: owner.full_state(parameter)[EMA].copy() for name, parameter in parameters.items()}
    for _ in range(2):
        swap_parameters(owner, EMA)
        for name, parameter in parameters.items():
            found[name].append(parameter.data.copy())
    copy_parameters(owner, EMA)
    for parameter in parameters.values():
        assert owner.full_state(parameter)[EMA].tobytes() == parameter.data.tobytes()
    return {name: [*arrays, averages[name].reshape(arrays[0].shape)] for name, arrays in found.items()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("averager", ["sharded", "blocking", "overlap", "priority", "lazy", "sparse"])
def test_a_swap_brings_the_average_a_second_one_the_weights_and_a_copy_ends_the_difference(averager: str, ranks: int) -> None:
    by_rank = run_virtual(ranks, partial(_swapped, averager=averager), ranks_per_node=1)
    for found in by_rank:
        for name, (before, average, after, kept) in found.items():
            assert average.tobytes() == kept.tobytes(), name
            assert after.tobytes() == before.tobytes(), name
            assert not kept.size or not np.array_equal(before, average), name
            assert average.tobytes() == by_rank[0][name][1].tobytes()


UNDONE = Task(nets.plain, NumpyKernelSet(), Adamw, steps=6)  # a number of updates is undone, too
_SPARSE = {**STRATEGIES["sparse, all of it"][1], "density": 0.1}
_CORRECTED = {"momentum_correction": 0.9, "warmup_density": 1.0, "warmup_steps": 4}

CASES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "overlap": STRATEGIES["overlap"],
    "sharded": STRATEGIES["sharded, exchange"],
    "lazy": (Lazy, {"layers": 3, "max_interval": 4, "check_every": 1, "bucket_bytes": 100}),
    "sparse": (Sparse, {**_SPARSE, **_CORRECTED}),
    "sparse, whole": (Sparse, {**_SPARSE, **_CORRECTED, "compress": "auto", "least_elements": 10**9}),
    "rounded": (STRATEGIES["sharded"][0], {**STRATEGIES["sharded"][1], "wire_parameters": "bfloat16"}),
}


def _train(
    comm: ThreadCommunicator, case: str, *, undone: int | None, content: CheckpointContent | None = None
) -> CheckpointContent:
    """Some steps, of which one is made and undone, and then made again; or not."""
    kind, options = CASES[case]
    task = replace(UNDONE, optimizer=partial(Sgd, momentum=0.0)) if "sparse" in case else UNDONE
    replica = replica_of(task, comm, virtual_engine(comm), kind, **options)
    if content is not None:
        replica.load(content)
    (averager,) = replica.averagers.values()
    copy = UndoCopy(averager)
    for number, batch in enumerate(islice(batches(task, comm.rank, comm.size), task.steps)):
        if number == undone:
            replica.drain()
            copy.keep()
            other = replace(batch, x=np.full_like(batch.x, np.nan))
            with np.errstate(all="ignore"):
                replica._step.run(other, 99, 1.0)
                averager.drain()
            assert not all(np.isfinite(array).all() for array in averager.changed())
            copy.restore()
        replica.update(batch, task.lr)
    replica.drain()
    return replica.state(Position(), {})


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_undone_is_as_if_it_had_not_been(case: str, ranks: int) -> None:
    plain = run_virtual(ranks, lambda comm: _train(comm, case, undone=None))
    for undone in (1, 4):
        found = run_virtual(ranks, partial(_train, case=case, undone=undone))
        for one, other in zip(found, plain, strict=True):
            assert_same(one, other)


@pytest.mark.slow
def test_what_another_run_kept_back_is_still_there() -> None:
    """Where slices are sent whole now the first step adds it, and adds it once more if that step is undone."""
    before = run_virtual(2, lambda comm: _train(comm, "sparse", undone=None))
    plain, *undone = (
        run_virtual(2, lambda comm, at=step: _train(comm, "sparse, whole", undone=at, content=before[comm.rank]))
        for step in (None, 0, 1)  # after the second step is undone, it must not be added again
    )
    for found in undone:
        for one, other in zip(found, plain, strict=True):
            assert_same(one, other)
