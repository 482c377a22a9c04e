"""Random layouts of small tensors over a split group, for tests of what moves between them."""

from __future__ import annotations

import random

from hpctrain.boxes import even_intervals
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout


def _partition(chance: random.Random, shape: tuple[int, ...], ranks: int) -> Layout:
    """Samples unevenly, channels, or tiles of either direction."""
    kind = chance.choice(["samples", "channels", "rows"])
    if kind == "samples":
        owners = [chance.randrange(ranks) for _ in range(shape[0])]
        return layout.samples(shape, [owners.count(rank) for rank in range(ranks)])
    if kind == "channels":
        return layout.channels(shape, even_intervals(shape[-1], ranks))
    vertical = chance.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    return layout.tiles(shape, (vertical, ranks // vertical))


def _target(chance: random.Random, shape: tuple[int, ...], ranks: int) -> Layout:
    """A partition, everything, or boxes anywhere: overlapping, empty, beyond the tensor."""
    kind = chance.choice(["partition", "everything", "boxes", "boxes"])
    if kind == "partition":
        return _partition(chance, shape, ranks)
    if kind == "everything":
        return layout.everything(shape, ranks)
    boxes = []
    for _ in range(ranks):
        box: list[tuple[int, int]] = []
        for size in shape:
            start = chance.randint(-1, size)
            box.append((start, start + chance.randint(0, size + 1)))
        boxes.append(tuple(box))
    return layout.needed(shape, boxes)


def random_moves(seed: int, ranks: int, count: int) -> list[tuple[Layout, Layout]]:
    """(source, target) pairs of small tensors, empty ones among them."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        shape = (*(chance.randint(0, 5) for _ in range(3)), chance.randint(1, 6))
        found.append((_partition(chance, shape, ranks), _target(chance, shape, ranks)))
    return found
