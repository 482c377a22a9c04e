"""Every strategy is blocking averaging: all optimisers, any number of ranks, whatever the scheduler does."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest

from hpctrain.averaging import slice_sizes, slices
from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import Strategy
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.grid import GridAxis, ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import INPUTS, OPTIMIZERS, STRATEGIES, Watched, averaged, make, make_group, run_steps, watched
from tests.support.training import Result, Task, distance, train

STEPS = 9  # each number of samples three times


def _run(
    strategy: str, optimizer: str, ranks: int, seed: int | None, dtype: str = "float64", steps: int = STEPS
) -> list[np.ndarray]:
    def program(comm: ThreadCommunicator) -> np.ndarray:
        averager = make(strategy, optimizer, comm, virtual_engine(comm), dtype)
        return run_steps(Watched(averager), steps)

    return run_virtual(ranks, program, seed=seed)


@cache
def _alone(optimizer: str, dtype: str = "float64", steps: int = STEPS) -> np.ndarray:
    (alone,) = _run("blocking", optimizer, 1, None, dtype, steps)
    return alone


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float64_equals_blocking(strategy: str, optimizer: str) -> None:
    alone = _alone(optimizer)
    assert np.abs(alone - make_group().data).max() > 0.01
    for ranks in (1, 2, 3, 7):
        for data in _run(strategy, optimizer, ranks, None):
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


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


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["nesterov", "lars, clipping"])
@pytest.mark.parametrize("strategy", SLICED)
def test_linear_layers_may_exchange_factors_and_gather_in_slices(
    monkeypatch: pytest.MonkeyPatch, strategy: str, optimizer: str
) -> None:
    monkeypatch.setattr(slices, "_LEAST_ROWS", 1)
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
        monkeypatch.setattr(slice_sizes, name, 8)
    for ranks, seed in ((2, None), (3, 1)):
        for data in _run("bucketed", "clipping", ranks, seed):
            assert np.linalg.norm(data - _alone("clipping")) <= 1e-10 * np.linalg.norm(data)


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


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("strategy", ["sharded, exchange", "priority", "priority, exchange"])
def test_split_traffic_beside_it_changes_nothing(strategy: str, grid: tuple[int, int]) -> None:
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


NETWORKS = {"plain": partial(nets.plain, dropout=0.3), "residual": nets.residual}
WHOLE: dict[str, tuple[type[Strategy], dict[str, object]]] = {
    "sharded": (Sharded, {"bucket_bytes": 1500, "nominal_batch": 8}),
    "priority": (Priority, {"slice_parameters": 100, "window": 1, "fc_exchange": "always"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("strategy", WHOLE)
def test_real_networks_too(strategy: str, net: str) -> None:
    kind, options = WHOLE[strategy]
    optimizer = partial(Lars, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.1, clip_norm=2.0)
    task = Task(NETWORKS[net], NumpyKernelSet(), optimizer)
    comm = SingleCommunicator()
    expected = train(task, comm, _engine_of_one(comm), Blocking)

    def program(comm: ThreadCommunicator) -> Result:
        return train(task, comm, virtual_engine(comm), watched(kind), **options)

    for result in run_virtual(3, program, seed=1):
        assert distance(result.parameters, expected.parameters) < 1e-10


def _engine_of_one(comm: SingleCommunicator) -> ProgressEngine:
    return ProgressEngine(rank=0, deadline_seconds=30, abort=comm.abort)
