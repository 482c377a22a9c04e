"""Strategies over nodes of several ranks: blocking averaging in two levels, and what crosses between nodes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hpctrain.averaging import slices
from hpctrain.averaging.base import for_holders
from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.comm.two_level import TwoLevel
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import (
    OF_NODES,
    OPTIMIZERS,
    STRATEGIES,
    Watched,
    averaged,
    make,
    make_group,
    one_step,
    planned,
    run_steps,
    shares,
)

IN_LEVELS = [*(name for name in STRATEGIES if name.startswith(("sharded", "priority"))), *OF_NODES]
PLACEMENTS = [(0, 1, 0, 1), (2, 1, 0, 0, 1, 2)]


def _run(
    strategy: str, optimizer: str, nodes: tuple[int, ...] | None, ranks: int, seed: int | None = None, steps: int = 9
) -> list[np.ndarray]:
    def program(comm: ThreadCommunicator) -> np.ndarray:
        averager = make(strategy, optimizer, comm, virtual_engine(comm), nodes=nodes)
        return run_steps(Watched(averager), steps)

    return run_virtual(ranks, program, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", IN_LEVELS)
def test_float64_equals_blocking(strategy: str, optimizer: str) -> None:
    (alone,) = _run("blocking", optimizer, None, 1)
    for nodes in PLACEMENTS:
        for data in _run(strategy, optimizer, nodes, len(nodes)):
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "nodes", "seeds"),
    [("nesterov", (0, 0, 1, 1), range(8)), ("lars, clipping", (0, 0, 0, 1, 1, 1), range(8, 13))],
    ids=["nesterov", "lars, clipping"],
)
@pytest.mark.parametrize("strategy", IN_LEVELS)
def test_no_schedule_of_messages_changes_a_bit(
    monkeypatch: pytest.MonkeyPatch, strategy: str, optimizer: str, nodes: tuple[int, ...], seeds: range
) -> None:
    monkeypatch.setattr(slices, "_LEAST_ROWS", 1)  # linear layers in several slices
    expected = _run(strategy, optimizer, nodes, len(nodes), steps=6)[0]
    for seed in seeds:
        for data in _run(strategy, optimizer, nodes, len(nodes), seed, steps=6):
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
    single = SingleCommunicator()
    alone = run_steps(make("blocking", "nesterov", single, ProgressEngine(rank=0, deadline_seconds=30, abort=single.abort)), 8)
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


def test_a_step_gathers_inputs_and_errors_by_the_samples_of_the_new_order() -> None:
    """Ranks with unlike samples, so that counts in the wrong order would not fit."""
    nodes, strategy = (0, 0, 1, 1), "sharded, exchange"
    assert len(set(shares(2, len(nodes)))) == 1
    assert len(set(shares(0, len(nodes)))) > 1
    (alone,) = _run("blocking", "sgd", None, 1, steps=1)
    for data in _run(strategy, "sgd", nodes, len(nodes), steps=1):
        np.testing.assert_allclose(data, alone, rtol=1e-12, atol=1e-12)


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
