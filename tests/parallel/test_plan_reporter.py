"""Plan reports equal the counts of a step, of random networks too: words by layer and rank, statistics, memory, parameters."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import TensorSpec
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.progress import Ticket
from hpctrain.core.intervals import size_of
from hpctrain.data.sampler import counts
from hpctrain.models import catalogue
from hpctrain.nn.network import Lowering, Network, declared
from hpctrain.nn.program import Program
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.moves import SplitGroup
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import LayerReport, PlanReport, RedistributionReport, Traffic, report_plan
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.parallel.test_split_networks import random_network
from tests.support.training import Task, train

B, M, D = Parallelism.BATCH, Parallelism.MODEL, Parallelism.DOMAIN

MODELS: Mapping[str, tuple[str, Mapping[str, object], int]] = {
    "vgg": ("vgg11", {"width": 0.0625, "classes": 5}, 35),
    "resnet": ("resnet18", {"width": 0.125, "classes": 5, "synchronised": True}, 33),
    "local": ("resnet20", {"classes": 5, "width": 0.25}, 21),
}

MIXED = {
    "vgg": {"features.*": D, "classifier.*": M},
    "resnet": {"layer2.*": B, "layer3.*": M, "fc": M},
    "local": {"layer2.*": M, "layer3.*": B},
}


def task_of(name: str, plan: ParallelPlan, batch: int = 5) -> Task:
    model, options, pixels = MODELS[name]
    make, shape = partial(catalogue.build, model, options), (pixels, pixels - 2, 3)
    return Task(make, NumpyKernelSet(), Sgd, shape, samples=batch, batch=batch, steps=1, plan=plan)


def description_of(task: Task, *, memory: bool = False) -> PlanReport:
    model = task.model()

    def graph_of(batch: int) -> Graph:
        builder = GraphBuilder(TensorSpec((batch, *task.image_shape), task.dtype))
        return builder.build(model.lower(builder, 0, ""))

    shapes = {name: spec.shape for name, spec in declared(model, graph_of(1))[0].items()}
    every = counts(task.batch, task.plan.rows * task.plan.cols, task.plan.rows)
    return report_plan(graph_of, task.plan, every, shapes, task.kernels if memory else None)


def plans(name: str, rows: int) -> dict[str, ParallelPlan]:
    found = {str(use): ParallelPlan(rows, 1, use) for use in Parallelism}
    found["mixed"] = ParallelPlan(rows, 1, D, MIXED[name])
    if rows == 4:
        found["tiles"] = ParallelPlan(rows, 1, D, tiles=(2, 2))
    return found


KINDS = ((3, "batch"), (3, "model"), (3, "domain"), (3, "mixed"), (4, "tiles"))
CASES = [(name, *kind) for name in MODELS for kind in KINDS]


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows", "kind"), CASES)
def test_words_of_every_layer_and_rank_are_those_of_a_step(
    name: str, rows: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(name, plans(name, rows)[kind])
    words: list[tuple[SplitGroup, str, int]] = []
    post = SplitGroup.alltoall

    def record(group: SplitGroup, send: object, recv: object, sends: Sequence[int], receives: Sequence[int], what: str) -> Ticket:
        assert sends[group.rank] == 0
        words.append((group, what, sum(sends)))
        return post(group, send, recv, sends, receives, what)  # type: ignore[arg-type]

    monkeypatch.setattr(SplitGroup, "alltoall", record)
    run_virtual(rows, lambda comm: train(task, comm, virtual_engine(comm), Blocking))
    found = description_of(task)
    assert by_layer(words, found) == by_entry(found)


def by_layer(words: Sequence[tuple[SplitGroup, str, int]], found: PlanReport) -> dict[tuple[int, str, str], int]:
    """(rank, layer or redistribution, pass) -> words, as a step posted them; zeros left out. A sum's forward is an adjoint."""
    names = {entry.name for entry in found.redistributions}
    total: dict[tuple[int, str, str], int] = {}
    for group, what, size in words:
        backward = what.startswith("gradient of ")
        name = what.removeprefix("gradient of ")
        if name.endswith(".sum"):
            backward = not backward
        name = name if name in names else name.partition(".halo")[0]
        key = (group.rank, name, "backward" if backward else "forward")
        total[key] = total.get(key, 0) + size
    return {key: size for key, size in total.items() if size}


def by_entry(found: PlanReport) -> dict[tuple[int, str, str], int]:
    total = {}
    for entry in found.entries:
        for rank in range(len(found.counts)):
            total[rank, entry.name, "forward"] = entry.traffic.forward[rank]
            total[rank, entry.name, "backward"] = entry.traffic.backward[rank]
    return {key: size for key, size in total.items() if size}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["domain", "model", "mixed"])
@pytest.mark.parametrize("name", ["vgg", "resnet"])
def test_memory_and_parameters_are_those_of_the_program(name: str, kind: str) -> None:
    rows = 3
    task = task_of(name, plans(name, rows)[kind])
    found = description_of(task, memory=True)
    assert found.memory is not None
    memory = found.memory

    def body(comm: ThreadCommunicator) -> tuple[int, int, int]:
        engine = virtual_engine(comm)
        groups = GridGroups(ProcessGrid(comm, rows, 1))
        group = groups.split_group(engine)
        assert group is not None
        distribution = GridDistribution(task.plan, group)
        mergers = groups.mergers(engine)
        network = Network(
            task.model(), task.image_shape, task.kernels, dtype=task.dtype, mergers=mergers, distribution=distribution
        )
        program = network.program(found.counts, training=True)
        size = sum(group.data.nbytes for group in network.groups.values())
        sizes = {name: group.size for name, group in network.groups.items()}
        assert {part.name: part.elements[comm.rank] for part in found.groups if part.elements[comm.rank]} == {
            name: each for name, each in sizes.items() if each
        }
        return program.activation_bytes, group.buffer_bytes, size

    for rank, (activations, shared, parameters) in enumerate(run_virtual(rows, body)):
        assert memory[rank].activations == activations
        assert memory[rank].messages == shared
        assert memory[rank].parameters == parameters == 8 * found.parameters[rank]


def test_ownership_covers_every_layer_once() -> None:
    found = description_of(task_of("resnet", ParallelPlan(3, 2, D, MIXED["resnet"]), batch=7))
    for layer in found.layers:
        for column in range(2):
            boxes = layer.owns[3 * column : 3 * column + 3]
            size = sum(size_of(box) for box in boxes)
            whole = size_of(tuple((0, max(box[dim][1] for box in boxes)) for dim in range(len(boxes[0]))))
            assert size == whole


def test_the_first_layer_reads_its_halo_from_the_file_and_the_second_from_its_neighbours() -> None:
    found = description_of(task_of("vgg", ParallelPlan(3, 1, D, {"classifier.*": B})))
    first, second = (part_named(found, name) for name in ("features.0", "features.3"))
    assert not any(first.traffic.forward)
    assert not any(map(any, first.halo))
    assert second.operation == "conv2d 3x3"
    assert [rows for rows, _ in second.halo] == [1, 2, 1]


def part_named(found: PlanReport, name: str) -> LayerReport:
    return next(layer for layer in found.layers if layer.name == name)


def test_more_ranks_than_rows_and_split_groups_without_samples_are_reported() -> None:
    found = description_of(task_of("local", ParallelPlan(8, 2, D), batch=1))
    assert sum(found.counts) == 1
    last = part_named(found, "layer3.2.conv2")
    assert sum(stop - start for start, stop in (box[1] for box in last.owns[:8])) == last.shape[1] < 8


RANKS = 3
WORDS = st.tuples(*[st.integers(0, 10**12)] * RANKS)
TRAFFIC = st.builds(Traffic, WORDS, WORDS, WORDS, WORDS)


@given(TRAFFIC, TRAFFIC, st.sampled_from([4, 8]))
def test_bytes_are_those_of_the_words(a: Traffic, b: Traffic, item_bytes: int) -> None:
    assert a.bytes_forward(item_bytes) == tuple(
        item_bytes * words + 8 * statistics for words, statistics in zip(a.forward, a.statistics_forward, strict=True)
    )
    both = (a + b).bytes_backward(item_bytes)
    assert both == tuple(x + y for x, y in zip(a.bytes_backward(item_bytes), b.bytes_backward(item_bytes), strict=True))


@given(TRAFFIC, TRAFFIC, WORDS)
def test_totals_are_of_all_entries(of_layer: Traffic, of_move: Traffic, parameters: tuple[int, ...]) -> None:
    layer = LayerReport(
        "conv", "conv2d 3x3", Parallelism.DOMAIN, LayoutKind.TILES, (1, 3, 3, 1), (), (), of_layer, parameters, (0,) * RANKS
    )
    move = RedistributionReport("fc.move", "fc", "rows", "samples", of_move, (0,) * RANKS)
    report = PlanReport(ParallelPlan(RANKS), (1, 0, 0), "float32", 4, (layer, move, layer), (), None)
    assert report.layers == (layer, layer)
    assert report.redistributions == (move,)
    assert report.traffic == of_layer + of_move + of_layer
    assert report.parameters == tuple(2 * size for size in parameters)


STATISTICS = ("statistics", "split statistics", "data statistics")
GRIDS = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2), (6, 1)]
PER_GRID = 6


class PassCounters(Counters):
    """Counts forward and backward passes apart: the communicator's name ends with the pass."""

    direction = "forward"

    def add(self, communicator: str, operation: str, payload_bytes: int = 0, exchanged_bytes: int = 0) -> None:
        super().add(f"{communicator} {self.direction}", operation, payload_bytes, exchanged_bytes)


def draw_task(seed: int, rows: int, cols: int) -> Task:
    """A random network; it may begin with a batch norm, and end with an image of one pixel."""
    chance = random.Random(seed)
    model, shape = random_network(random.Random(seed), classes=4, synchronised=False)
    vertical = chance.choice([n for n in range(1, rows + 1) if rows % n == 0] + [rows])
    names = [node.name for node in Lowering(model, dtype="float64").graph(1, shape).nodes]
    use = {name: chance.choice([B, M, D]) for name in names if chance.random() < 0.6}
    plan = ParallelPlan(rows, cols, chance.choice([B, M, D]), use, (vertical, rows // vertical))
    batch = chance.choice([1, 1, 2, cols, rows * cols - 1, rows * cols + 3])
    return Task(lambda: model, NumpyKernelSet(), Sgd, shape, 4, samples=batch, batch=batch, steps=1, plan=plan)


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
