"""Random networks, plans, grids and batches: the bytes that a plan promises are those that a step on virtual ranks hands over."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.graph import Graph
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import TensorSpec
from hpctrain.core.errors import ShapeError
from hpctrain.data.sampler import counts
from hpctrain.nn.layers import (
    AdaptiveAveragePool,
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    ReLU,
    Residual,
    Sequential,
)
from hpctrain.nn.network import Lowering, declared
from hpctrain.nn.program import Program
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import PlanReport, report_plan
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support.training import Task, train

B, M, D = Parallelism.BATCH, Parallelism.MODEL, Parallelism.DOMAIN
STATISTICS = ("statistics", "split statistics", "data statistics")
GRIDS = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2), (6, 1)]
PER_GRID = 6


class PassCounters(Counters):
    """Counts forward and backward passes apart: the communicator's name ends with the pass."""

    direction = "forward"

    def add(self, communicator: str, operation: str, payload_bytes: int = 0, exchanged_bytes: int = 0) -> None:
        super().add(f"{communicator} {self.direction}", operation, payload_bytes, exchanged_bytes)


def draw_layer(chance: random.Random, channels: int) -> Layer:
    kernel, stride = chance.randint(1, 4), chance.randint(1, 2)
    kind = chance.choice(["conv", "conv", "grouped", "pool", "norm", "norm", "relu", "drop", "block", "adaptive"])
    if kind == "conv":
        return Conv2d(channels, chance.randint(1, 5), kernel, stride, chance.randint(0, kernel // 2))
    if kind == "block":
        body = {"conv": Conv2d(channels, channels, 3, padding=1), "bn": BatchNorm(channels, synchronised=chance.random() < 0.5)}
        return Residual(body, activation=ReLU())
    return {
        "grouped": Conv2d(channels, 2 * channels, kernel, stride, kernel // 2, groups=channels),
        "pool": MaxPool(kernel, stride, kernel // 2, ceil_mode=chance.random() < 0.5),
        "norm": BatchNorm(channels, synchronised=chance.random() < 0.7),
        "relu": ReLU(),
        "drop": Dropout(0.3, seed=1),
        "adaptive": AdaptiveAveragePool(chance.choice([1, 2])),
    }[kind]


def draw_model(seed: int) -> Layer:
    """Images of 11 x 7 x 3 to 4 classes. It may begin with a batch norm, and end with linear layers or an image of one pixel."""
    chance = random.Random(seed)
    layers: dict[str, Layer] = {}
    x = TensorSpec((1, 11, 7, 3), "float64")
    for number in range(chance.randint(1, 6)):
        layer = draw_layer(chance, x.shape[3])
        try:
            x = layer.output(x)
        except ShapeError:
            continue
        layers[f"layer{number}"] = layer
    if chance.random() < 0.5:
        layers["avgpool"] = AdaptiveAveragePool(1)
        x = layers["avgpool"].output(x)
    features = x.shape[1] * x.shape[2] * x.shape[3]
    head: dict[str, Layer] = {"flatten": Flatten()}
    if chance.random() < 0.5:
        head |= {"fc1": Linear(features, 6), "relu": ReLU()}
        features = 6
    return Sequential({**layers, **head, "fc": Linear(features, 4)})


def draw_task(seed: int, rows: int, cols: int) -> Task:
    chance = random.Random(seed)
    model = draw_model(seed)
    vertical = chance.choice([n for n in range(1, rows + 1) if rows % n == 0] + [rows])
    names = [node.name for node in graph_of(model, 1).nodes]
    use = {name: chance.choice([B, M, D]) for name in names if chance.random() < 0.6}
    plan = ParallelPlan(
        rows,
        cols,
        chance.choice([B, M, D]),
        use,
        (vertical, rows // vertical),
    )
    batch = chance.choice([1, 1, 2, cols, rows * cols - 1, rows * cols + 3])
    shape = (11, 7, 3)
    return Task(partial(draw_model, seed), NumpyKernelSet(), Sgd, shape, 4, samples=batch, batch=batch, steps=1, plan=plan)


def graph_of(model: Layer, batch: int) -> Graph:
    return Lowering(model, dtype="float64").graph(batch, (11, 7, 3))


def description_of(task: Task) -> PlanReport:
    model = task.model()
    shapes = {name: spec.shape for name, spec in declared(model, graph_of(model, 1))[0].items()}
    share = counts(task.batch, task.plan.rows * task.plan.cols, task.plan.rows)
    return report_plan(partial(graph_of, model), task.plan, share, shapes)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Has the counters of the virtual rank that runs in this thread; a program's backward pass counts apart."""
    here = threading.local()
    backward = Program.backward

    def counted(program: Program, *hooks: object) -> None:
        here.counters.direction = "backward"
        backward(program, *hooks)  # type: ignore[arg-type]

    monkeypatch.setattr(Program, "backward", counted)
    return here


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_the_bytes_of_a_plan_are_those_of_a_step(rows: int, cols: int, counting: threading.local) -> None:
    for seed in range(PER_GRID):
        task = draw_task(100 * rows + 10 * cols + 1000 * seed, rows, cols)

        def step(comm: ThreadCommunicator, task: Task = task) -> Counters:
            counting.counters = PassCounters()
            train(task, CountingCommunicator(comm, counting.counters), virtual_engine(comm), Blocking)
            return counting.counters

        traffic = description_of(task).traffic
        for position, counters in enumerate(run_virtual(rows * cols, step)):
            where = f"network {seed}, position {position}, {task.plan}, batch {task.batch}"
            for direction in ("forward", "backward"):
                moved = counters[f"split {direction}", "ialltoall"].exchanged_bytes
                merged = sum(counters[f"{group} {direction}", "iallgather"].exchanged_bytes for group in STATISTICS)
                words = (
                    (traffic.forward, traffic.statistics_forward)
                    if direction == "forward"
                    else (traffic.backward, traffic.statistics_backward)
                )
                assert (moved, merged) == (8 * words[0][position], 8 * words[1][position]), f"{where}, {direction}"
