"""What is handed to the communicator in a step, counted, equals the formulas in integers."""

from __future__ import annotations

import pytest

from hpctrain.averaging import slice_sizes, slices
from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import HIDDEN, INPUTS, LR, OUTPUTS, STRATEGIES, averaged, make_group, one_step, shares

OPERATIONS = {
    OperationKind.ALLREDUCE: "iallreduce",
    OperationKind.REDUCE_SCATTER: "ireduce_scatter",
    OperationKind.ALLGATHER: "iallgather",
    OperationKind.INPUTS: "ialltoall",
}
ITEM_BYTES = 8
PAIR_BYTES = ITEM_BYTES + 4  # with its position


def _count(strategy: str, ranks: int, clip_norm: float | None = None) -> list[tuple[Counters, dict[OperationKind, int]]]:
    """Of each rank: the counters of one step, and what its schedule says."""
    kind, options = STRATEGIES[strategy]

    def program(comm: ThreadCommunicator) -> tuple[Counters, dict[OperationKind, int]]:
        counters = Counters()
        counting = CountingCommunicator(comm, counters)
        averager = averaged(kind, make_group(), Sgd(clip_norm=clip_norm), counting, virtual_engine(comm), **options)
        for step in range(7):  # past any new ordering
            one_step(averager, step)
        averager.drain()
        before = counters.snapshot()
        one_step(averager, 7)
        averager.drain()
        assert averager.schedule is not None
        return counters.since(before), dict(averager.schedule.exchanged(comm.rank, shares(7, ranks)))

    return run_virtual(ranks, program)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_hands_over_what_its_schedule_says(strategy: str, ranks: int) -> None:
    for counters, expected in _count(strategy, ranks):
        expected[OperationKind.ALLGATHER] = expected.get(OperationKind.ALLGATHER, 0) + expected.pop(OperationKind.ERRORS, 0)
        pairs = expected.pop(OperationKind.SPARSE, 0) // 2
        for kind, operation in OPERATIONS.items():
            n_bytes = ITEM_BYTES * expected.get(kind, 0) + (PAIR_BYTES * pairs if kind is OperationKind.ALLGATHER else 0)
            assert counters.total(operation=operation).exchanged_bytes == n_bytes, operation


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("strategy", ["overlap", "bucketed", "sharded", "priority", "lazy, every step"])
def test_gradients_and_parameters_together_are_one_allreduce(strategy: str, ranks: int) -> None:
    n = make_group().size
    total = sum(counters.total().exchanged_bytes for counters, _ in _count(strategy, ranks))
    assert total == 2 * (ranks - 1) * n * ITEM_BYTES


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_exchange_moves_inputs_errors_and_rows(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Per linear layer K b + M B + K M, (P - 1) / P of it on average; biases are complete without a message."""
    linear = ((INPUTS, HIDDEN), (2, 3), (HIDDEN, OUTPUTS))
    rest = make_group().size - sum(k * m + m for k, m in linear)
    batch = sum(shares(7, ranks))
    inputs = 0
    for k, _ in linear:
        for rank, count in enumerate(shares(7, ranks)):
            inputs += count * (k - k // ranks - (rank < k % ranks))
    expected = (ranks - 1) * (2 * rest + sum(m * batch + k * m for k, m in linear)) + inputs
    for least_rows in (slices._LEAST_ROWS, 1):  # whole weights, and weights in slices of few rows
        monkeypatch.setattr(slices, "_LEAST_ROWS", least_rows)
        monkeypatch.setitem(STRATEGIES, "exchange", (Sharded, {"bucket_bytes": 16, "fc_exchange": "always"}))  # type: ignore[arg-type]
        total = sum(counters.total().exchanged_bytes for counters, _ in _count("exchange", ranks))
        assert total == expected * ITEM_BYTES


@pytest.mark.parametrize("ranks", [2, 3])
def test_sending_large_slices_in_parts_moves_as_much(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    whole = _count("bucketed", ranks)
    for name in ("_LARGEST_BYTES", "_LEAST_PART_BYTES"):
        monkeypatch.setattr(slice_sizes, name, ITEM_BYTES)
    for (before, _), (after, _) in zip(whole, _count("bucketed", ranks), strict=True):
        assert after.total().exchanged_bytes == before.total().exchanged_bytes
        assert after.total().operations > before.total().operations


def test_clipping_costs_two_numbers_a_parameter() -> None:
    plain, clipped = _count("sharded", 3)[0][0], _count("sharded", 3, clip_norm=1.0)[0][0]
    assert plain.total(operation="iallreduce").operations == 0
    norms = clipped.total(operation="iallreduce")
    assert (norms.operations, norms.payload_bytes) == (1, 2 * 8 * len(make_group().segments))
    assert LR > 0
