"""The worked examples and formulas of docs/grid.md equal what the program computes, and a second calculation here."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from hpctrain.backend.graph import Node
from hpctrain.nn.layers import Conv2d, MaxPool, Sequential
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import LayerReport, RedistributionReport, report_plan
from tests.support.grid_tables import Example, examples, table

PAGE = (Path(__file__).parents[2] / "docs" / "grid.md").read_text()
EXAMPLES = {example.title.partition(",")[0]: example for example in examples()}
Words = tuple[list[int], list[int]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_tables_are_those_of_the_program(name: str) -> None:
    example = EXAMPLES[name]
    assert f"**{example.title}**\n\n" + "\n".join(table(example)) + "\n" in PAGE


#: plans of which the words of every layer are compared, and samples of each rank: some have none, or more ranks than rows
PLANS = {"AlexNet": Parallelism.BATCH, "VGG-16": Parallelism.MODEL, "ResNet-50": Parallelism.DOMAIN}
SPLITS = [(4, 4), (5, 3), (3, 3, 2), (0, 5, 1), (2, 1, 1, 2), (1, 0, 0, 0, 0, 0, 1, 0)]


@pytest.mark.parametrize("counts", [None, *SPLITS], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_entry_is_what_the_formulas_give(name: str, counts: tuple[int, ...] | None) -> None:
    example = EXAMPLES[name]
    if counts is not None:
        use = example.plan.use if name == "AlexNet" else {}
        example = replace(example, plan=ParallelPlan(len(counts), 1, PLANS[name], use), batch=sum(counts))
    rows = example.plan.rows
    every = counts or example.counts
    samples = list(every[:rows])
    graph = example.graph(1)
    nodes = {node.name: node for node in graph.nodes}
    moving = 0
    for entry in report_plan(example.graph, example.plan, every, example.shapes).entries:
        found = (list(entry.traffic.forward[:rows]), list(entry.traffic.backward[:rows]))
        if isinstance(entry, LayerReport):
            node = nodes[entry.name]
            read = graph.tensors[node.inputs[0]].shape[1:]
            expected = halo(node, read, entry, sum(samples), rows)
        else:
            tensor = nodes[entry.reader].inputs[0] if entry.reader in nodes else graph.output
            expected = redistribution(entry, graph.tensors[tensor].shape[1:], samples, rows)
        assert found == expected, entry.name
        moving += any(found[0])
    assert moving >= 10


def halo(node: Node, image: tuple[int, ...], layer: LayerReport, batch: int, rows: int) -> Words:
    """B C sum over q of W'_q rows that rank q reads of this rank's; back, of W'_r rows that this rank reads of rank q's."""
    window = getattr(node.spec, "window", None)
    if window is None or layer.use is not Parallelism.DOMAIN or layer.kind is not LayoutKind.TILES or node.inputs[0] == 0:
        return [0] * rows, [0] * rows
    height, width, channels = image
    (_, ho, wo, _) = layer.shape
    (stride, stride_wide), (extent, extent_wide) = window.stride, window.extent
    top, bottom, left, right = window.padding
    own, outputs = parts(height, rows), parts(ho, rows)
    need, columns = [], []
    for begin, end in outputs:
        last, last_wide = (end - 1) * stride - top + extent, (wo - 1) * stride_wide - left + extent_wide
        need.append((max(0, begin * stride - top), min(height, last)) if begin < end else (0, 0))
        hangs_over = last > height + bottom and last_wide <= width + right
        columns.append(min(width, last_wide) if hangs_over else width)
    words = [batch * channels * wide for wide in columns]
    back = others(need, own, [1] * rows)
    return others(own, need, words), [words[rank] * back[rank] for rank in range(rows)]


def others(mine: list[tuple[int, int]], theirs: list[tuple[int, int]], words: list[int]) -> list[int]:
    """By rank: what of its interval the other ranks' intervals share, each times the other rank's words."""
    return [
        sum(words[q] * max(0, min(a[1], b[1]) - max(a[0], b[0])) for q, b in enumerate(theirs) if q != r)
        for r, a in enumerate(mine)
    ]


def redistribution(move: RedistributionReport, shape: tuple[int, ...], samples: list[int], rows: int) -> Words:
    """shape: of one sample."""
    batch, size, everyone = sum(samples), 1, range(rows)
    for each in shape:
        size *= each
    channels = [(end - begin) * size // shape[-1] for begin, end in parts(shape[-1], rows)]
    heights = [(end - begin) * size // shape[0] for begin, end in parts(shape[0], rows)]
    whole = batch * size
    if move.source == "parts of a sum":
        own = [b * size for b in samples]
        return [whole - each for each in own], [(rows - 1) * each for each in own]
    own = {
        "samples": [b * size for b in samples],
        "channels": [batch * c for c in channels],
        "rows": [batch * h for h in heights],
    }[move.source]
    if move.target == "everything":
        return [(rows - 1) * each for each in own], [whole - each for each in own]
    assert move.target == "samples"
    split = channels if move.source == "channels" else heights
    return [(batch - samples[r]) * split[r] for r in everyone], [samples[r] * (size - split[r]) for r in everyone]


def parts(size: int, ranks: int) -> list[tuple[int, int]]:
    ends = list(accumulate((size // ranks + (rank < size % ranks) for rank in range(ranks)), initial=0))
    return list(pairwise(ends))


def test_halos_of_random_windows_are_those_of_the_formula() -> None:
    """Strides that leave rows and columns out, windows that hang over the edge, images of any shape, ranks without rows."""
    chance = random.Random(0)
    seen: set[tuple[bool, bool]] = set()
    for _ in range(400):
        kernel, stride = (chance.randint(1, 5), chance.randint(1, 5)), (chance.randint(1, 4), chance.randint(1, 4))
        padding = (chance.randint(0, kernel[0] // 2), chance.randint(0, kernel[1] // 2))
        ceil = chance.random() < 0.5
        image, ranks, batch = (chance.randint(5, 24), chance.randint(5, 24), 2), chance.randint(2, 5), chance.randint(1, 3)
        layer = MaxPool(kernel, stride, padding, ceil_mode=True) if ceil else Conv2d(2, 3, kernel, stride, padding)
        model = Sequential({"first": Conv2d(2, 2, 1), "second": layer})
        example = Example("random", model, image, ParallelPlan(ranks, 1, Parallelism.DOMAIN), batch)
        graph, description = example.graph(1), example.report_plan()
        second = next(layer for layer in description.layers if layer.name == "second")
        moves = [second, *(move for move in description.redistributions if move.name == "second.halo")]
        expected = halo(graph.nodes[1], image, second, batch, ranks)
        forward = [sum(move.traffic.forward[rank] for move in moves) for rank in range(ranks)]
        backward = [sum(move.traffic.backward[rank] for move in moves) for rank in range(ranks)]
        assert (forward, backward) == expected, (image, ranks, kernel, stride, padding, ceil)
        left_out = (second.shape[2] - 1) * stride[1] - padding[1] + kernel[1] < image[1]
        seen.add((ceil, left_out and any(forward)))
    assert len(seen) == 4


def test_batch_statistics_are_counted_by_their_formula() -> None:
    example: Example = EXAMPLES["ResNet-50"]
    graph = example.graph(1)
    found = {layer.name: layer.traffic for layer in example.report_plan().layers}
    norms = [node for node in graph.nodes if node.statistics]
    assert len(norms) == 53
    for node in norms:
        channels = graph.tensors[node.output].shape[-1]
        assert found[node.name].statistics_forward == (2 * (2 * channels + 1),) * 3
        assert found[node.name].statistics_backward == (2 * 2 * channels,) * 3
