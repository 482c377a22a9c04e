"""Words handed to the split group's communicator: counted, by boxes, and by closed formulas, all equal in integers."""

import itertools
from collections.abc import Sequence
from functools import partial

import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.graph import Graph, GraphBuilder
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.boxes import even_intervals
from hpctrain.data.sampler import counts as shares
from hpctrain.models import catalogue
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.max_pool import MaxPool
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, partition_graph
from hpctrain.parallel.transfer import moved, moved_back
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.training import Task, train

Words = tuple[int, ...]


def alexnet(width: int = 1) -> Layer:
    """Krizhevsky et al. 2012 in one column, channels and features divided by `width`."""
    channels = [n // width for n in (96, 256, 384, 384, 256)]
    features: list[Layer] = [Conv2d(3, channels[0], 11, 4, padding=2), ReLU(), MaxPool(3, 2)]
    features += [Conv2d(channels[0], channels[1], 5, padding=2), ReLU(), MaxPool(3, 2)]
    for before, after in itertools.pairwise(channels[1:]):
        features += [Conv2d(before, after, 3, padding=1), ReLU()]
    features += [MaxPool(3, 2)]
    hidden = 4096 // width
    classifier = [Linear(36 * channels[-1], hidden), ReLU(), Linear(hidden, hidden), ReLU(), Linear(hidden, 1000 // width)]
    return Sequential(
        {
            "features": Sequential(features),
            "avgpool": AdaptiveAveragePool((6, 6)),
            "flatten": Flatten(),
            "classifier": Sequential(classifier),
        }
    )


def _graph(model: Layer, pixels: int, samples: int) -> Graph:
    builder = GraphBuilder(TensorSpec((samples, pixels, pixels, 3), "float64"))
    return builder.build(model.lower(builder, 0, ""))


def words_by_boxes(graph: PartitionedGraph) -> tuple[dict[str, Words], dict[str, Words]]:
    """What each rank hands over in each move, forward and backward. A sum is the adjoint of a move."""
    forward: dict[str, Words] = {}
    backward: dict[str, Words] = {}
    trained = {0: False}
    for step in graph.steps:
        has_parameters = step.node is not None and bool(step.node.parameters)
        trained[step.output] = has_parameters or any(trained[tensor] for tensor in step.inputs)
        if step.move is None:
            continue
        there, back = moved(*step.move), moved_back(*step.move)
        name = step.name if step.name not in forward else f"{step.name} again"
        forward[name] = back if step.summed else there
        backward[name] = (there if step.summed else back) if trained[step.inputs[0]] else (0,) * len(there)
    return forward, backward


def _halo(size: int, window: tuple[int, int, int], ranks: int) -> tuple[Words, Words]:
    """Rows that each rank sends forward, and backward, for (kernel, stride, padding): row by row."""
    kernel, stride, padding = window
    outputs = (size + 2 * padding - kernel) // stride + 1
    owned = [set(range(*part)) for part in even_intervals(size, ranks)]
    read = [
        {row for row in range(a * stride - padding, (b - 1) * stride - padding + kernel) if 0 <= row < size and a < b}
        for a, b in even_intervals(outputs, ranks)
    ]
    sent = tuple(sum(len(owned[r] & read[q]) for q in range(ranks) if q != r) for r in range(ranks))
    got = tuple(len(read[r] - owned[r]) for r in range(ranks))
    return sent, got


def _times(words: Sequence[int], factor: int) -> Words:
    return tuple(factor * each for each in words)


def _expect_halos(
    found: tuple[dict[str, Words], dict[str, Words]],
    layers: Sequence[tuple[str, int, int, tuple[int, int, int]]],
    samples: int,
    ranks: int,
) -> None:
    """Layers as (name, input's height = width, input's channels, window): every halo is rows x width x channels x samples."""
    forward, backward = (dict(each) for each in found)
    for name, size, channels, window in layers:
        there, back = _halo(size, window, ranks)
        words = size * channels * samples
        nothing = (0,) * ranks
        assert forward.pop(f"{name}.halo", nothing) == _times(there, words), name
        assert backward.pop(f"{name}.halo", nothing) == _times(back, words), name
    assert not [name for name in forward if name.endswith("halo")]


SPLITS = [(4, 4), (5, 3), (3, 3, 2), (0, 5, 1), (2, 1, 1, 2), (1, 0, 0, 0, 0, 0, 1, 0)]


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_alexnet_by_domain_and_model(counts: Words) -> None:
    samples, ranks = sum(counts), len(counts)
    plan = ParallelPlan(ranks, 1, Parallelism.BATCH, {"features.*": Parallelism.DOMAIN, "classifier.*": Parallelism.MODEL})
    found = forward, backward = words_by_boxes(partition_graph(_graph(alexnet(), 224, samples), plan, counts))
    layers = [
        ("features.2", 55, 96, (3, 2, 0)), ("features.3", 27, 96, (5, 1, 2)), ("features.5", 27, 256, (3, 2, 0)),
        ("features.6", 13, 256, (3, 1, 1)), ("features.8", 13, 384, (3, 1, 1)), ("features.10", 13, 384, (3, 1, 1)),
        ("features.12", 13, 256, (3, 2, 0)),
    ]  # fmt: skip
    _expect_halos(found, layers, samples, ranks)
    # The images are read with the halo of the first layer, so nothing travels for 11x11/4.
    assert "features.0.halo" not in forward
    rows = [stop - start for start, stop in even_intervals(6, ranks)]
    to_samples = tuple(6 * 256 * own * (samples - count) for own, count in zip(rows, counts, strict=True))
    assert forward["avgpool.move"] == to_samples
    assert backward["avgpool.move"] == tuple(6 * 256 * (6 - own) * count for own, count in zip(rows, counts, strict=True))
    # What a linear layer reads: everybody's own part to all others; back: a reduce-scatter, all but one's own part.
    assert forward["classifier.0.move"] == tuple((ranks - 1) * 9216 * count for count in counts)
    assert backward["classifier.0.move"] == tuple(9216 * (samples - count) for count in counts)
    for name in ("classifier.2.move", "classifier.4.move"):
        own_features = [stop - start for start, stop in even_intervals(4096, ranks)]
        assert forward[name] == tuple((ranks - 1) * samples * own for own in own_features)
        assert backward[name] == tuple(samples * (4096 - own) for own in own_features)
        assert sum(backward[name]) == (ranks - 1) * samples * 4096
    own_classes = [stop - start for start, stop in even_intervals(1000, ranks)]
    logits = tuple(own * (samples - count) for own, count in zip(own_classes, counts, strict=True))
    assert forward["output.move"] == logits


@pytest.mark.parametrize("counts", SPLITS[:4], ids=str)
def test_vgg16_by_domain(counts: Words) -> None:
    samples, ranks = sum(counts), len(counts)
    graph = _graph(catalogue.build("vgg16", {}), 224, samples)
    plan = ParallelPlan(ranks, 1, Parallelism.BATCH, {"features.*": Parallelism.DOMAIN})
    found = words_by_boxes(partition_graph(graph, plan, counts))
    layers, number, size, channels = [], 0, 224, 3
    for stage, (convolutions, after) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))):
        for _ in range(convolutions):
            if number:
                layers.append((f"features.{number}", size, channels, (3, 1, 1)))
            number, channels = number + 2, after
        layers.append((f"features.{number}", size, channels, (2, 2, 0)))
        number, size = number + 1, 112 >> stage
    _expect_halos(found, layers, samples, ranks)
    if ranks == 2:  # a row to each side, for 12 convolutions; the cuts of 2x2 pooling agree, but that of 7 rows from 14
        assert found[0]["features.2.halo"] == (224 * 64 * samples,) * 2
        assert found[0]["features.30.halo"] == (0, 14 * 512 * samples)


@pytest.mark.parametrize("counts", SPLITS[:4], ids=str)
def test_vgg16_by_model(counts: Words) -> None:
    """Every layer gathers its input, after pooling, and scatters its gradient: half of the allreduce of Gholami et al. 2018."""
    samples, ranks = sum(counts), len(counts)
    graph = _graph(catalogue.build("vgg16", {}), 224, samples)
    forward, backward = words_by_boxes(partition_graph(graph, ParallelPlan(ranks, 1, Parallelism.MODEL), counts))
    convolutions = [(2, 224, 64), (5, 112, 64), (7, 112, 128), (10, 56, 128), (12, 56, 256), (14, 56, 256), (17, 28, 256),
                    (19, 28, 512), (21, 28, 512), (24, 14, 512), (26, 14, 512), (28, 14, 512)]  # fmt: skip
    for number, size, channels in convolutions:
        name, image = f"features.{number}.move", size * size * samples
        own = [stop - start for start, stop in even_intervals(channels, ranks)]
        assert forward.pop(name) == tuple((ranks - 1) * image * part for part in own)
        back = backward.pop(name)
        assert back == tuple(image * (channels - part) for part in own)
        assert sum(back) == (ranks - 1) * image * channels  # an allreduce: twice as much
    assert not [name for name in forward if name.startswith("features")]


@pytest.mark.parametrize("counts", SPLITS[:4], ids=str)
def test_resnet50_by_domain(counts: Words) -> None:
    samples, ranks = sum(counts), len(counts)
    graph = _graph(catalogue.build("resnet50", {}), 225, samples)
    found = words_by_boxes(partition_graph(graph, ParallelPlan(ranks, 1, Parallelism.DOMAIN), counts))
    layers: list[tuple[str, int, int, tuple[int, int, int]]] = [("maxpool", 113, 64, (3, 2, 1))]
    size, channels = 57, 64
    for stage, (blocks, inside) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            layers.append((f"layer{stage}.{block}.conv2", size, inside, (3, stride, 1)))
            if block == 0:
                layers.append((f"layer{stage}.{block}.downsample.0", size, channels, (1, stride, 0)))
            size, channels = (size - 1) // stride + 1, 4 * inside
    _expect_halos(found, layers, samples, ranks)
    forward, backward = found
    assert forward["avgpool.sum"] == tuple(2048 * (samples - count) for count in counts)
    assert backward["avgpool.sum"] == tuple(2048 * (ranks - 1) * count for count in counts)
    # Both branches of a block keep one layout: nothing else travels.
    assert {name.rsplit(".", 1)[1] for name in forward} == {"halo", "sum"}


_BATCHES = (7, 7, 3)  # 17 samples
_NARROW = {"width": 0.0625}
_PLAIN = {"features.*": Parallelism.DOMAIN, "classifier.*": Parallelism.MODEL}
_COUNTED = {
    "alexnet": (partial(alexnet, 16), 95, _PLAIN),
    "vgg16": (partial(catalogue.build, "vgg16", _NARROW), 35, _PLAIN),
    "resnet50": (
        partial(catalogue.build, "resnet50", _NARROW),
        41,
        {"layer2.*": Parallelism.MODEL, "layer3.*": Parallelism.BATCH},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "grid", "overlapped"),
    [  # every two of network, grid and overlap meet
        ("alexnet", (2, 1), True), ("alexnet", (3, 1), False), ("alexnet", (2, 2), True),
        ("vgg16", (2, 1), False), ("vgg16", (3, 1), True), ("vgg16", (2, 2), False),
        ("resnet50", (2, 1), True), ("resnet50", (3, 1), False), ("resnet50", (2, 2), True),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_counted_is_what_the_boxes_say(name: str, grid: tuple[int, int], overlapped: bool) -> None:
    model, pixels, use = _COUNTED[name]
    rows, cols = grid
    early = frozenset(full for full, _ in model().walk()) if overlapped else frozenset()
    plan = ParallelPlan(rows, cols, Parallelism.DOMAIN, use, overlapped=early)
    task = Task(model, NumpyKernelSet(), Sgd, (pixels, pixels, 3), samples=17, batch=7, steps=3, plan=plan)

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        counters = Counters()
        train(task, CountingCommunicator(comm, counters), virtual_engine(comm), Blocking)
        found = counters["split", "ialltoall"]
        assert found == counters.total("split")
        return found.payload_bytes, found.exchanged_bytes

    counted = run_virtual(rows * cols, program)
    expected = [0] * (rows * cols)
    for samples in _BATCHES:
        every = shares(samples, rows * cols)
        for col in range(cols):
            column = every[col * rows : (col + 1) * rows]
            graph = _graph(model(), pixels, sum(column))
            for words in (each for part in words_by_boxes(partition_graph(graph, plan, column)) for each in part.values()):
                for row in range(rows):
                    expected[col * rows + row] += 8 * words[row]
    assert counted == [(each, each) for each in expected]
    assert min(expected) > 0
