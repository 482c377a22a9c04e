"""Trainings with compressed slices against one process that simulates all nodes, and the bytes that leave each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind
from hpctrain.averaging.sparse_residual import SparsePart
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.averaging.strategy import Strategy
from hpctrain.comm.base import Handle
from hpctrain.compress.top_k import TopK
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import averaged, make_group, one_step, run_steps, shares, watched
from tests.support.sparse_oracle import OraclePart, SparseOracle

PLACES = {
    "2 of 1": (0, 1),
    "3 of 1": (0, 1, 2),
    "2 of 2": (0, 1, 0, 1),
    "3 of 2": (2, 1, 0, 0, 1, 2),
    "2 of 3": (0, 0, 0, 1, 1, 1),
}
OPTIONS: dict[str, Any] = {"density": 0.2, "compress": "always", "least_elements": 4, "bucket_bytes": 100}
PAIR_BYTES = 12  # float64 and int32


def _optimizer() -> Optimizer:
    return Sgd(momentum=0.9)


def _trained(
    nodes: Sequence[int],
    seed: int | None,
    steps: int = 9,
    optimizer: Callable[[], Optimizer] = _optimizer,
    **options: Any,
) -> list[tuple[np.ndarray, CollectiveSchedule]]:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, CollectiveSchedule]:
        given = {**OPTIONS, **options}
        averager = averaged(watched(Sparse), make_group(), optimizer(), comm, virtual_engine(comm), nodes=nodes, **given)
        return run_steps(averager, steps), averager.inner.schedule  # type: ignore[attr-defined]

    return run_virtual(len(nodes), program, seed=seed)


def _parts(schedule: CollectiveSchedule) -> list[OraclePart]:
    """Of each compressed slice the parts of a node's ranks."""
    parts = []
    for piece in schedule.slices:
        if piece.compression is not None:
            spans = dict.fromkeys(piece.part(rank, schedule.ranks) for rank in range(schedule.ranks))
            parts += [OraclePart(*span, piece.compression.density) for span in spans]
    return parts


def _check(nodes: Sequence[int], results: list[tuple[np.ndarray, CollectiveSchedule]], steps: int = 9, **oracle: Any) -> None:
    parts = _parts(results[0][1])
    assert parts, "nothing is compressed"
    expected = SparseOracle(nodes, parts, **oracle).train(steps)
    for data, _ in results:
        assert data.tobytes() == results[0][0].tobytes(), "the replicas differ"
        np.testing.assert_allclose(data, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("nodes", PLACES.values(), ids=PLACES)
def test_it_is_the_training_that_one_process_simulates(nodes: tuple[int, ...], seed: int | None) -> None:
    _check(nodes, _trained(nodes, seed), momentum=0.9)


@pytest.mark.parametrize("masking", [False, True])
def test_momentum_correction_too(masking: bool) -> None:
    """Of dense slices the owner keeps the momentum."""
    nodes = PLACES["2 of 2"]
    results = _trained(nodes, 2, optimizer=lambda: Sgd(momentum=0.0), momentum_correction=0.6, factor_masking=masking)
    _check(nodes, results, correction=0.6, masking=masking)


def test_a_warm_up_too() -> None:
    nodes = PLACES["2 of 2"]
    results = _trained(nodes, 3, density=0.1, warmup_density=0.8, warmup_steps=5)
    _check(nodes, results, momentum=0.9, density=lambda step: 0.8 * (1 / 8) ** (min(step, 5) / 5))


@pytest.mark.parametrize("nodes", [PLACES["3 of 1"], PLACES["2 of 2"]], ids=["3 of 1", "2 of 2"])
def test_clipping_is_by_the_norm_of_the_sparse_sum(nodes: tuple[int, ...]) -> None:
    """Each element of it counts once, though all nodes hold it."""
    results = _trained(nodes, 4, optimizer=lambda: Sgd(momentum=0.0, clip_norm=0.1))
    _check(nodes, results, clip_norm=0.1)


@pytest.mark.parametrize("nodes", [PLACES["3 of 1"], PLACES["2 of 2"]], ids=["3 of 1", "2 of 2"])
def test_ratios_of_layers_are_by_the_norms_of_the_sparse_sum(nodes: tuple[int, ...]) -> None:
    _check(nodes, _trained(nodes, 4, optimizer=lambda: Lars(momentum=0.9, trust_coefficient=0.1)), momentum=0.9, trust=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-12)])
def test_at_density_1_it_is_dense_averaging(dtype: str, tolerance: float) -> None:
    """On 1 to 4 nodes of 1 to 3 ranks; of one node's, each counts as a node."""

    def program(comm: ThreadCommunicator, kind: type[Strategy], nodes: Sequence[int], options: dict[str, Any]) -> np.ndarray:
        averager = averaged(kind, make_group(dtype), _optimizer(), comm, virtual_engine(comm), nodes=nodes, **options)
        return run_steps(averager, 6)

    for count, per_node in product((1, 2, 3, 4), (1, 2, 3)):
        nodes = [rank % count for rank in range(count * per_node)]
        given = {**OPTIONS, "density": 1.0, "two_level": count > 1}
        sparse = run_virtual(len(nodes), partial(program, kind=Sparse, nodes=nodes, options=given), seed=count)
        (alone,) = run_virtual(1, partial(program, kind=Sharded, nodes=None, options={}))
        for data in sparse:
            assert np.linalg.norm(data - alone) <= tolerance * np.linalg.norm(alone), f"{count} nodes of {per_node}"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [PLACES["3 of 1"], PLACES["2 of 2"]], ids=["3 of 1", "2 of 2"])
def test_replicas_have_the_same_bits_after_100_steps_in_any_order_of_messages(nodes: tuple[int, ...]) -> None:
    results = [data.tobytes() for seed in (None, 5, 6) for data, _ in _trained(nodes, seed, 100)]
    assert len(set(results)) == 1


def _drop(part: SparsePart, gradient: np.ndarray, step: int, send: Callable[..., Handle]) -> Handle:
    part.residual[...] = 0.0
    return send(part, gradient, step)


def _one_less(part: SparsePart, gradient: np.ndarray, step: int, send: Callable[..., Handle]) -> Handle:
    object.__setattr__(part._compression, "density", 0.1)
    return send(part, gradient, step)


@pytest.mark.parametrize("mutant", [_drop, _one_less])
def test_the_oracle_sees_a_dropped_residual_and_another_density(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Handle]
) -> None:
    nodes, send = PLACES["2 of 1"], SparsePart.send
    monkeypatch.setattr(SparsePart, "send", lambda part, gradient, step: mutant(part, gradient, step, send))
    with pytest.raises(AssertionError):
        _check(nodes, _trained(nodes, None), momentum=0.9)


def test_another_order_of_nodes_on_one_rank_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only by the bits of the replicas."""
    nodes = (0, 1, 2)

    def receive(part: SparsePart, gradient: np.ndarray) -> None:
        gradient[...] = 0.0
        for message in part._messages()[:: -1 if part._comm.rank == 1 else 1]:
            part._top.add_to(message, gradient)

    monkeypatch.setattr(SparsePart, "receive", receive)
    with pytest.raises(AssertionError, match="the replicas differ"):
        _check(nodes, _trained(nodes, None, density=0.9), momentum=0.9)


def test_what_is_not_finite_on_one_rank_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = PLACES["2 of 2"]

    def program(comm: ThreadCommunicator) -> set[str]:
        averager = averaged(Sparse, make_group(), _optimizer(), comm, virtual_engine(comm), nodes=nodes, **OPTIONS)
        one_step(averager, 0)
        if comm.rank == 3:
            averager.group.parameters["b.weight"].grad[...] = np.nan  # before it is written again, by nobody
            averager.group.parameters["unused.weight"].grad[0, 1] = np.inf
        one_step(averager, 1)
        averager.drain()
        return {name for name, parameter in averager.group.parameters.items() if not np.isfinite(parameter.data).all()}

    with np.errstate(invalid="ignore"):
        assert run_virtual(len(nodes), program) == [{"unused.weight"}] * len(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("warmup_steps", [0, 2])
@pytest.mark.parametrize("nodes", PLACES.values(), ids=PLACES)
def test_a_step_sends_what_its_schedule_says(nodes: tuple[int, ...], warmup_steps: int) -> None:
    ranks = len(nodes)

    def program(comm: ThreadCommunicator) -> tuple[Counters, CollectiveSchedule, int]:
        counters, given = Counters(), {**OPTIONS, "warmup_steps": warmup_steps}
        counting = CountingCommunicator(comm, counters)
        averager = averaged(Sparse, make_group(), _optimizer(), counting, virtual_engine(comm), nodes=nodes, **given)
        run_steps(averager, 7)  # past the warm-up, and any new ordering
        before = counters.snapshot()
        run_steps(averager, 1, first=7)
        schedule = averager.schedule
        assert schedule is not None
        # Streams count ranks by number on the node.
        position = comm.rank if averager._order is None else averager._order.index(comm.rank)  # type: ignore[attr-defined]
        return counters.since(before), schedule, position

    for counters, schedule, position in run_virtual(ranks, program):
        expected = schedule.exchanged(position, shares(7, ranks))
        names = {name for name, _ in counters}
        sparse = sum(counters.total(name).exchanged_bytes for name in names if "nodes across nodes" in name)
        assert sparse == PAIR_BYTES * expected[OperationKind.SPARSE] // 2
        everything = schedule.exchanged_bytes_by_rank(shares(7, ranks), 8)[position]
        if ranks == len(set(nodes)):
            assert counters.total().exchanged_bytes == everything
        else:  # dense slices in two levels move no less within nodes
            assert counters.total().exchanged_bytes >= everything - 8 * make_group().size


@pytest.mark.parametrize("warm_up", [{}, {"warmup_density": 0.8, "warmup_steps": 7}], ids=["at once", "warm-up"])
def test_no_step_makes_a_compressor(warm_up: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("hpctrain.averaging.sparse_residual.TopK", lambda *args, **kw: made.append(1) or TopK(*args, **kw))
    nodes = (0, 1)
    _trained(nodes, None, steps=3, **warm_up)
    first = len(made)
    made.clear()
    _trained(nodes, None, steps=9, **warm_up)
    assert len(made) == first
