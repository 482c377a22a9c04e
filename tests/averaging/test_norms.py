"""Several groups of parameters on a grid of ranks: LARS and clipping see whole parameters and all of them, as one process does.

Replicated parameters are averaged over all ranks; of split ones each data group holds a block of rows, averaged over the
group. Gradients are made-up functions of the data, the sample and the place in the whole parameter, so that one process that
holds everything can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.norms import JointNorms
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.boxes import even
from hpctrain.comm.base import Communicator
from hpctrain.comm.grid import GridAxis, ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.nn.parameter import FlatGroup, Parameter, ParameterSpec
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import averaged

SAMPLES, STEPS = 7, 6
#: in forward order: (name, shape, whether its rows are split); odd sizes, so that blocks and parts are uneven
WHOLE = (
    ("conv.weight", (5, 3), False),
    ("conv.bias", (5,), False),
    ("fc.weight", (7, 3), True),
    ("fc.bias", (7,), True),
    ("unused", (3, 2), True),
    ("norm.weight", (4,), False),
    ("last.weight", (2, 3), False),
)
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "clip": partial(Sgd, momentum=0.9, weight_decay=1e-2, clip_norm=0.3),
    "lars": partial(Lars, weight_decay=1e-2, trust_coefficient=0.1),
    "lars, clip": partial(Lars, weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.3),
    "neither": partial(Sgd, momentum=0.9),
}
STRATEGIES: dict[str, Callable[..., GradientAverager]] = {
    "blocking": partial(averaged, Blocking),
    "overlap": partial(averaged, Overlap),
    "bucketed": partial(averaged, Bucketed, bucket_bytes=100),
    "sharded": partial(averaged, Sharded, bucket_bytes=60),
    "sharded, window": partial(averaged, Sharded, bucket_bytes=60, window=1, replan=False),
    "priority": partial(averaged, Priority, slice_parameters=4, window=1),
}


def _first_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(sum(name.encode())).standard_normal(shape)


def _rows(count: int, row: int, rows: int) -> slice:
    sizes = even(count, rows)
    begin = sum(sizes[:row])
    return slice(begin, begin + sizes[row])


class _Part:
    """What one rank holds of the network, and how it makes gradients.

    Args:
        samples: this rank's in the group of split parameters, and in that of replicated ones.
    """

    def __init__(self, row: int, rows: int, samples: dict[str, slice]) -> None:
        self.groups: dict[str, FlatGroup] = {}
        self._samples = samples
        self._at: dict[str, slice] = {}
        names = [name for name, _, _ in WHOLE]
        for group in samples:
            mine = {name: shape for name, shape, split in WHOLE if split is (group == "model") or len(samples) == 1}
            specs = {}
            for name, shape in mine.items():
                self._at[name] = _rows(shape[0], row, rows) if group == "model" else slice(None)
                local = (len(range(shape[0])[self._at[name]]), *shape[1:])
                specs[name] = ParameterSpec(local, lambda random, shape: np.zeros(shape), decay=len(shape) > 1)
            self.groups[group] = FlatGroup(specs, "float64", orders={name: names.index(name) for name in mine})
            for parameter in self.groups[group].parameters.values():
                shape = mine[parameter.name]
                parameter.data[...] = _first_values(parameter.name, shape)[self._at[parameter.name]]

    def forward_order(self) -> list[tuple[str, Parameter]]:
        pairs = [(group, each) for group, flat in self.groups.items() for each in flat.parameters.values()]
        return sorted(pairs, key=lambda pair: pair[1].order)

    def differentiate(self, step: int, group: str, parameter: Parameter) -> None:
        """The sum over this rank's samples; an element's gradient depends on its place in the whole parameter."""
        shape = next(shape for name, shape, _ in WHOLE if name == parameter.name)
        place = np.arange(np.prod(shape)).reshape(shape)[self._at[parameter.name]]
        parameter.grad[...] = 0
        for sample in range(SAMPLES)[self._samples[group]]:
            parameter.grad[...] += np.sin(parameter.data * (1 + sample) + place + step) / SAMPLES


def _train(part: _Part, averagers: dict[str, GradientAverager], progress: ProgressEngine) -> dict[str, np.ndarray]:
    """Some steps as a network makes them; copies of what this rank holds."""
    layers = part.forward_order()
    used = [pair for pair in layers if pair[1].name != "unused"]
    for step in range(STEPS):
        for averager in averagers.values():
            averager.begin_step(0.1)
        for group, parameter in used:
            averagers[group].before_forward([parameter])
            progress.poll()
        for group, parameter in reversed(used):
            part.differentiate(step, group, parameter)
            averagers[group].grad_ready(parameter)
            averagers[group].data_free(parameter)
        for averager in averagers.values():
            averager.end_backward()
    for averager in averagers.values():
        averager.drain()
    return {parameter.name: parameter.data.copy() for _, parameter in layers}


def _alone(optimizer: str) -> dict[str, np.ndarray]:
    comm = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort)
    part = _Part(0, 1, {"all": slice(None)})
    return _train(part, {"all": averaged(Blocking, part.groups["all"], OPTIMIZERS[optimizer](), comm, engine)}, engine)


def _on_grid(
    strategy: str, optimizer: str, rows: int, cols: int, virtual: ThreadCommunicator, counters: Counters | None = None
) -> dict[str, np.ndarray]:
    engine = virtual_engine(virtual)
    comm: Communicator = virtual if counters is None else CountingCommunicator(virtual, counters)
    grid = ProcessGrid(comm, rows, cols)
    part = _Part(grid.row, rows, {"all": _rows(SAMPLES, comm.rank, comm.size), "model": _rows(SAMPLES, grid.col, cols)})
    norms = JointNorms(comm, engine, tuple(part.groups.values()))
    comms: dict[str, Communicator] = {"all": comm, "model": grid.along(GridAxis.DATA)}
    averagers = {
        name: STRATEGIES[strategy](group, OPTIMIZERS[optimizer](), comms[name], engine, norms=norms)
        for name, group in part.groups.items()
    }
    return _train(part, averagers, engine)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (1, 3), (2, 1)], ids=str)
def test_a_grid_with_split_layers_equals_one_process(grid: tuple[int, int], strategy: str, optimizer: str) -> None:
    rows, cols = grid
    whole = _alone(optimizer)
    for seed in (None, 1):
        results = run_virtual(rows * cols, lambda comm: _on_grid(strategy, optimizer, rows, cols, comm), seed=seed)
        for rank, found in enumerate(results):
            for name, shape, split in WHOLE:
                expected = whole[name][_rows(shape[0], rank % rows, rows)] if split else whole[name]
                assert np.linalg.norm(found[name] - expected) <= 1e-10 * max(1e-3, np.linalg.norm(expected)), (rank, name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["clip", "lars, clip"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_schedule_of_messages_changes_a_bit(strategy: str, optimizer: str) -> None:
    expected = run_virtual(6, lambda comm: _on_grid(strategy, optimizer, 3, 2, comm))
    for seed in range(6):
        for rank, found in enumerate(run_virtual(6, lambda comm: _on_grid(strategy, optimizer, 3, 2, comm), seed=seed)):
            for name, _, split in WHOLE:
                assert found[name].tobytes() == expected[rank][name].tobytes(), (seed, rank, name)
                twin = expected[rank % 3 if split else 0][name]
                assert found[name].tobytes() == twin.tobytes(), "copies of a parameter differ"


def test_the_norms_of_all_groups_are_one_message_a_step() -> None:
    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        counters = Counters()
        _on_grid("sharded", "lars, clip", 2, 2, comm, counters)
        norms = counters.total(operation="iallreduce")
        return norms.operations, norms.payload_bytes

    assert run_virtual(4, program) == [(STEPS, STEPS * 2 * 8 * len(WHOLE))] * 4


def test_without_norms_nothing_is_sent() -> None:
    def program(comm: ThreadCommunicator) -> int:
        counters = Counters()
        _on_grid("sharded", "neither", 2, 2, comm, counters)
        return counters.total(operation="iallreduce").operations

    assert run_virtual(4, program) == [0] * 4
