"""Every strategy equals blocking averaging: any optimiser, ranks and nodes, any order of messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest

from hpctrain.averaging import slicing
from hpctrain.averaging.allreduce import AllreduceStrategy
from hpctrain.averaging.base import GradientAverager, PlannedGroup, Strategy, for_holders
from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.slicing import Slice, fused
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.comm.base import Communicator
from hpctrain.comm.groups import GridAxis, ProcessGrid, TwoLevel
from hpctrain.comm.link import LinkModel
from hpctrain.optim.optimizers import Sgd
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support.averaging import (
    INPUTS,
    OF_NODES,
    OPTIMIZERS,
    STRATEGIES,
    Saved,
    SparseOracle,
    Watched,
    averaged,
    make,
    make_group,
    one_step,
    planned,
    restore,
    run_steps,
    saved,
)

STEPS = 9  # each number of samples three times


def _run(
    strategy: str,
    optimizer: str,
    ranks: int,
    seed: int | None = None,
    dtype: str = "float64",
    steps: int = STEPS,
    nodes: tuple[int, ...] | None = None,
) -> list[np.ndarray]:
    def program(comm: ThreadCommunicator) -> np.ndarray:
        return run_steps(Watched(make(strategy, optimizer, comm, virtual_engine(comm), dtype, nodes=nodes)), steps)

    return run_virtual(ranks, program, seed=seed)


@cache
def _alone(optimizer: str, dtype: str = "float64", steps: int = STEPS) -> np.ndarray:
    (alone,) = _run("blocking", optimizer, 1, None, dtype, steps)
    return alone


def test_blocking_is_the_optimiser_on_the_sum_of_gradients() -> None:
    expected = SparseOracle((0,), (), momentum=0.9).train(STEPS)
    np.testing.assert_allclose(_alone("momentum"), expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "blocking"])
def test_float64_equals_blocking(strategy: str, optimizer: str) -> None:
    alone = _alone(optimizer)
    assert np.abs(alone - make_group().data).max() > 0.01
    for ranks in (1, 2, 3, 7):
        for data in _run(strategy, optimizer, ranks, None):
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_schedule_of_messages_changes_a_bit(strategy: str) -> None:
    trials = ((2, "lars, clipping", range(8)), (3, "nesterov", range(8, 16)), (5, "clipping", range(16, 23)))
    for ranks, optimizer, seeds in trials:
        expected = _run(strategy, optimizer, ranks, None, steps=6)[0]
        assert np.linalg.norm(expected - _alone(optimizer, steps=6)) <= 1e-10 * np.linalg.norm(expected)
        for seed in seeds:
            for data in _run(strategy, optimizer, ranks, seed, steps=6):
                assert data.tobytes() == expected.tobytes(), f"{ranks} ranks, seed {seed}"


SLICED: dict[str, tuple[type[Strategy], dict[str, object]]] = {
    "sharded": (Sharded, {"bucket_bytes": 16, "fc_exchange": "always"}),
    "priority": (Priority, {"slice_parameters": 3, "window": 2, "fc_exchange": "always"}),
}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["nesterov", "lars, clipping"])
@pytest.mark.parametrize("strategy", SLICED)
def test_linear_layers_may_exchange_factors_and_gather_in_slices(
    monkeypatch: pytest.MonkeyPatch, strategy: str, optimizer: str
) -> None:
    monkeypatch.setattr(slicing, "_LEAST_ROWS", 1)
    alone = _alone(optimizer)
    kind, options = SLICED[strategy]

    def program(comm: ThreadCommunicator) -> np.ndarray:
        averager = averaged(kind, make_group(), OPTIMIZERS[optimizer](), comm, virtual_engine(comm), **options)
        assert averager.schedule is not None
        weight = [each for each in averager.schedule.slices if each.parameters == ("a.weight",)]
        assert len(weight) > 1 or comm.size >= INPUTS
        return run_steps(Watched(averager), STEPS)

    for ranks, seed in ((1, None), (2, None), (2, 1), (3, 2), (7, None)):
        for data in run_virtual(ranks, program, seed=seed):
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


def test_large_slices_may_travel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LARGEST_BYTES", "_LEAST_PART_BYTES"):
        monkeypatch.setattr(slicing, name, 8)
    for ranks, seed in ((2, None), (3, 1)):
        for data in _run("bucketed", "clipping", ranks, seed):
            assert np.linalg.norm(data - _alone("clipping")) <= 1e-10 * np.linalg.norm(data)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float32_is_as_near_to_float64_as_blocking(strategy: str) -> None:
    exact = _alone("momentum")
    group = make_group()

    def median_distance(data: np.ndarray) -> float:
        apart = []
        for segment in group.segments:
            if segment.size:
                ours, theirs = data[segment.start : segment.stop], exact[segment.start : segment.stop]
                apart.append(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        return float(np.median(apart))

    for seed in range(3):
        ours, blocking = (_run(each, "momentum", 3, seed, "float32")[0] for each in (strategy, "blocking"))
        assert median_distance(ours) <= 2 * median_distance(blocking) + 1e-6


class _WithRowTraffic(Watched):
    """Every look at the data also waits for a message along the other axis of the grid, as split layers do."""

    def __init__(self, inner: GradientAverager, split: Communicator) -> None:
        super().__init__(inner)
        self._split = split
        self._queue = inner.progress.queue(split)

    def _look(self) -> None:
        numbers = np.full(3, float(self._split.rank))
        self.progress.wait(self._queue.post(lambda: self._split.iallreduce(numbers), "split traffic"))
        assert (numbers == sum(range(self._split.size))).all()
        super()._look()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("strategy", ["sharded, exchange", "priority", "priority, exchange"])
def test_split_traffic_next_to_averaging_changes_nothing(strategy: str, grid: tuple[int, int]) -> None:
    rows, cols = grid
    alone = _alone("nesterov", steps=6)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        engine = virtual_engine(comm)
        places = ProcessGrid(comm, rows, cols)
        inner = make(strategy, "nesterov", places.along(GridAxis.DATA), engine)
        return run_steps(_WithRowTraffic(inner, places.along(GridAxis.SPLIT)), 6)

    for seed in (None, 1, 2):
        for data in run_virtual(rows * cols, program, seed=seed):
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


IN_LEVELS = [*(name for name in STRATEGIES if name.startswith(("sharded", "priority"))), *OF_NODES]
PLACEMENTS = [(0, 1, 0, 1), (2, 1, 0, 0, 1, 2)]


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", IN_LEVELS)
def test_two_levels_equal_blocking(strategy: str, optimizer: str) -> None:
    alone = _alone(optimizer)
    for nodes in PLACEMENTS:
        for data in _run(strategy, optimizer, len(nodes), nodes=nodes):
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "nodes", "seeds"),
    [("nesterov", (0, 0, 1, 1), range(8)), ("lars, clipping", (0, 0, 0, 1, 1, 1), range(8, 13))],
    ids=["nesterov", "lars, clipping"],
)
@pytest.mark.parametrize("strategy", IN_LEVELS)
def test_no_schedule_changes_a_bit_of_two_levels(
    monkeypatch: pytest.MonkeyPatch, strategy: str, optimizer: str, nodes: tuple[int, ...], seeds: range
) -> None:
    monkeypatch.setattr(slicing, "_LEAST_ROWS", 1)  # linear layers in several slices
    expected = _run(strategy, optimizer, len(nodes), nodes=nodes, steps=6)[0]
    for seed in seeds:
        for data in _run(strategy, optimizer, len(nodes), seed, nodes=nodes, steps=6):
            assert data.tobytes() == expected.tobytes(), f"{nodes}, seed {seed}"


@pytest.mark.parametrize("strategy", IN_LEVELS)
def test_the_optimisers_state_is_gathered_and_taken_up_again(strategy: str) -> None:
    """From two nodes to three ranks without nodes and on: the training of one rank."""

    def first(comm: ThreadCommunicator) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
        averager = make(strategy, "nesterov", comm, virtual_engine(comm), nodes=(0, 0, 1, 1))
        data = run_steps(averager, 4)
        return data, {name: averager.full_state(each) for name, each in averager.group.parameters.items() if each.size}

    def then(comm: ThreadCommunicator) -> np.ndarray:
        averager = make(strategy, "nesterov", comm, virtual_engine(comm))
        averager.group.data[...] = data
        for name, each in state.items():
            kept_back = {key: for_holders(each[key], averager.holders) for key in averager.by_holder if key in each}
            averager.load_state(averager.group.parameters[name], {**each, **kept_back})
        return run_steps(averager, 4, first=4)

    data, state = run_virtual(4, first)[2]
    alone = run_steps(make("blocking", "nesterov", *lone_rank()), 8)
    for found in run_virtual(3, then):
        assert np.linalg.norm(found - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.parametrize("strategy", ["sharded", "priority"])
def test_gradients_and_parameters_cross_between_nodes_once(strategy: str) -> None:
    """Over all ranks of a node: 2 (N - 1) / N of the parameters, as if it were one rank."""
    n, nodes = make_group().size, (0, 0, 0, 1, 1, 1)

    def program(comm: ThreadCommunicator) -> Counters:
        counters = Counters()
        averager = make(strategy, "sgd", CountingCommunicator(comm, counters), virtual_engine(comm), nodes=nodes)
        before = counters.snapshot()
        one_step(averager, 0)
        averager.drain()
        return counters.since(before)

    counted = run_virtual(len(nodes), program)
    crossed, flat = ([], [])
    for counters in counted:
        names = {name for name, _ in counters}
        crossed.append(sum(counters.total(name).exchanged_bytes for name in names if name.endswith("across nodes")))
        flat.append(sum(counters.total(name).exchanged_bytes for name in names if not name.endswith("nodes")))
    assert sum(crossed) == 8 * 2 * n  # two nodes, each 2 (N - 1) / N n
    assert sum(flat) == 0


def test_the_exchange_pays_by_nodes_not_by_ranks() -> None:
    """K/P becomes K/N in the rule: what crosses a node's link decides."""

    def exchanges(**options: object) -> bool:
        schedule = planned(Sharded, make_group(), 4, nominal_batch=4, **options).plan(None)
        assert schedule is not None
        exchanged = [operation.slice for operation in schedule.operations if operation.kind is OperationKind.INPUTS]
        return any(schedule.slices[k].parameters == ("a.weight",) for k in exchanged)

    # a.weight is 5 x 7: B = 4 is below 35 / (7 + 5 / 4) = 4.2 for four ranks, not below 35 / (7 + 5 / 2) = 3.7 for two nodes
    assert exchanges()
    assert not exchanges(nodes=(0, 0, 1, 1))
    assert exchanges(nodes=(0, 0, 1, 1), two_level=False)


def test_one_level_on_request_and_where_nodes_are_unlike() -> None:
    def kinds(comm: ThreadCommunicator, **options: object) -> set[type]:
        averager = averaged(Sharded, make_group(), Sgd(), comm, virtual_engine(comm), **options)
        return {type(each) for each in averager.progress.communicators().values()}

    assert run_virtual(4, partial(kinds, nodes=(0, 0, 1, 1))) == [{TwoLevel}] * 4
    assert run_virtual(4, partial(kinds, nodes=(0, 0, 1, 1), two_level=False)) == [{ThreadCommunicator}] * 4
    assert run_virtual(4, partial(kinds, nodes=(0, 0, 0, 1))) == [{ThreadCommunicator}] * 4


def _train_and_save(strategy: str, ranks: int, steps: range, stored: Saved | None = None) -> list[Saved]:
    def program(comm: ThreadCommunicator) -> Saved:
        averager = make(strategy, "lars, clipping", comm, virtual_engine(comm))
        if stored is not None:
            restore(averager, stored)
        run_steps(averager, len(steps), steps.start)
        return saved(averager)

    return run_virtual(ranks, program, seed=ranks)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*STRATEGIES, "blocking"])
def test_training_goes_on_with_other_ranks(strategy: str) -> None:
    (through,) = _train_and_save("blocking", 1, range(9))
    stored = _train_and_save(strategy, 3, range(4))[0]
    for after in (1, 2, 5):
        for other in ("blocking", strategy):
            for data, state in _train_and_save(other, after, range(4, 9), stored):
                assert np.linalg.norm(data - through[0]) <= 1e-10 * np.linalg.norm(through[0])
                for name, values in state.items():
                    np.testing.assert_allclose(values["momentum"], through[1][name]["momentum"], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_gets_the_same_whole_state(strategy: str) -> None:
    results = _train_and_save(strategy, 3, range(3))
    for name, parameter in make_group().parameters.items():
        first = results[0][1][name]["momentum"]
        assert first.shape == (parameter.size,)
        for _, state in results[1:]:
            np.testing.assert_array_equal(state[name]["momentum"], first)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_does_not_grow_with_steps(strategy: str) -> None:
    """Tickets and events of old steps are let go."""
    import gc

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        averager = make(strategy, "clipping", comm, virtual_engine(comm))
        counts = []
        for step in range(30):
            one_step(averager, step)
            if step in (11, 29):  # the same samples of a step
                averager.drain()
                gc.collect()
                counts.append(len(gc.get_objects()))
        return counts[0], counts[1]

    ((before, after),) = run_virtual(1, program)
    assert after <= before + 20


class Halves(AllreduceStrategy):
    """Two allreduces, of half of the parameters each."""

    def words(self) -> str:
        return "halves"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return fused(self.group.layout, (self.group.layout.size + 1) // 2)


@dataclass(frozen=True)
class PartsOptions:
    """Options of `Parts`."""

    parts: int = 3


class Parts(AllreduceStrategy):
    """As many allreduces as an option says."""

    Options = PartsOptions
    options: PartsOptions

    def words(self) -> str:
        return f"parts {self.options.parts}"

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        return fused(self.group.layout, self.group.layout.size // self.options.parts)


@pytest.mark.parametrize("optimizer", ["nesterov", "lars, clipping"])
@pytest.mark.parametrize("kind", [Halves, Parts])
def test_a_strategy_of_ones_own_trains_as_blocking_does(kind: type[Strategy], optimizer: str) -> None:
    def program(comm: ThreadCommunicator, kind: type[Strategy]) -> np.ndarray:
        averager = averaged(kind, make_group(), OPTIMIZERS[optimizer](), comm, virtual_engine(comm))
        return run_steps(Watched(averager), 6)

    (alone,) = run_virtual(1, lambda comm: program(comm, Blocking))
    for ranks in (2, 3):
        for data in run_virtual(ranks, lambda comm: program(comm, kind)):
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


def test_options_are_the_defaults_unless_given() -> None:
    group = PlannedGroup(make_group(), 2)
    assert Parts(group).options.parts == 3
    assert Parts(group, PartsOptions(5)).request() != Parts(group).request()


def test_a_schedule_is_accepted_for_the_same_words_parameters_and_ranks() -> None:
    schedule = planned(Parts, make_group(), 2).plan(None)
    assert planned(Parts, make_group(), 2).accepts(schedule)
    assert not planned(Parts, make_group(), 3).accepts(schedule)
    assert not planned(Parts, make_group(), 2, parts=4).accepts(schedule)
    assert not planned(Parts, make_group("float32"), 2).accepts(schedule)
    assert not planned(Blocking, make_group(), 2).accepts(schedule)
    assert not planned(Parts, make_group(), 2).accepts(None)
