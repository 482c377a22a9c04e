"""The points at which the planner's predictions are compared with measurements: networks, jobs, and each job's candidates.

The list was written down before any of them was measured, and with it those that are reported by themselves (`named`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SHARED_MEMORY = "shared memory"


@dataclass(frozen=True)
class TrainedNetwork:
    """A network, its images and the samples of a step over all ranks.

    model, options: as a configuration has them. pixels: height and width of an image. mixed, head: patterns of the layers under
    domain and under model in mixed plans.
    """

    model: str
    pixels: int
    classes: int
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict)
    mixed: str = "layer[12].*"
    head: str = "fc"


# Sizes at which a step takes 0.2 to 1.5 s on two cores, so that 0.5 to 2 Gb/s matter.
NETWORKS: Mapping[str, TrainedNetwork] = {
    "resnet18": TrainedNetwork("resnet18", 64, 1000, 48),
    "resnet50": TrainedNetwork("resnet50", 64, 1000, 32),
    "vgg16": TrainedNetwork("vgg16", 64, 1000, 64, {"width": 0.375}, "features.*", "classifier.*"),
    "resnet20": TrainedNetwork("resnet20", 32, 10, 128),
}

# name -> (averager, options)
AVERAGERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sharded": ("sharded", {"fc_exchange": "never"}),
    "exchange": ("sharded", {"fc_exchange": "auto"}),
    "bucketed": ("bucketed", {}),
    "blocking": ("blocking", {}),
    "priority": ("priority", {"fc_exchange": "never"}),
}
_SHORT = {"s": "sharded", "x": "exchange", "b": "bucketed", "w": "blocking", "p": "priority"}  # w: waits


@dataclass(frozen=True)
class Point:
    """One candidate of one job.

    link: rate of each of two hosts' links as tc writes it, or `SHARED_MEMORY`. rows: Pr of the grid. plan: "batch", "domain",
    "model", "head" (batch, and the classifier under model) or "mixed" (early layers under domain, the classifier under model).
    averager: a key of `AVERAGERS`. named: reported by itself, chosen before anything was measured.
    """

    network: str
    link: str
    ranks: int
    rows: int
    plan: str
    averager: str
    named: bool = False

    @property
    def cols(self) -> int:
        return self.ranks // self.rows

    @property
    def name(self) -> str:
        """A name within the list."""
        plan = "" if self.rows == 1 else f" {self.plan}"
        return f"{self.network}, {self.link}, {self.rows}x{self.cols}{plan}, {self.averager}"

    @property
    def job(self) -> tuple[str, str, int]:
        """Points of one job are candidates for it: (network, link, ranks)."""
        return self.network, self.link, self.ranks

    @property
    def default(self) -> str:
        """The use of layers that no pattern of `use` matches."""
        return self.plan if self.plan in ("domain", "model") else "batch"

    @property
    def use(self) -> dict[str, str]:
        """Pattern -> use, in order."""
        network = NETWORKS[self.network]
        if self.plan not in ("mixed", "head"):
            return {}
        return ({network.mixed: "domain"} if self.plan == "mixed" else {}) | {network.head: "model"}


# (network, link, ranks) -> candidates: "1" stands for one row, letters for averagers, capital ones for named points.
_CANDIDATES: Mapping[tuple[str, str, int], str] = {
    ("resnet18", "500mbit", 2): "1:sXbwP 2domain:x 2head:x 2mixed:X",
    ("vgg16", "1gbit", 2): "1:SxbWp 2domain:X 2model:x 2head:X 2mixed:x",
    ("resnet50", "1gbit", 2): "1:xBw 2mixed:X",
    ("resnet20", "1gbit", 2): "1:xw 2domain:X",
    ("resnet50", "2gbit", 2): "1:SxbwP",
    ("resnet18", "2gbit", 2): "1:xbw 2domain:x 2model:X",
    ("vgg16", SHARED_MEMORY, 2): "1:XbW 2domain:x 2mixed:x",
    ("resnet20", SHARED_MEMORY, 2): "1:sBw 2domain:X 2model:x 2mixed:x",
    ("resnet18", SHARED_MEMORY, 2): "1:sp 2mixed:x",
    ("resnet18", "1gbit", 4): "1:sXBwp 2domain:x 2mixed:X",
    ("vgg16", "1gbit", 4): "1:xb 2head:X",
    ("resnet18", SHARED_MEMORY, 4): "1:Xw 2domain:X 2model:x 2mixed:x",
    ("resnet20", SHARED_MEMORY, 4): "1:xb 2domain:x",
}


def _points() -> Iterator[Point]:
    for (network, link, ranks), words in _CANDIDATES.items():
        for word in words.split():
            grid, letters = word.split(":")
            plan = grid[1:] or "batch"
            for letter in letters:
                yield Point(network, link, ranks, int(grid[0]), plan, _SHORT[letter.lower()], letter.isupper())


POINTS: tuple[Point, ...] = tuple(_points())
# Three whose simulated traces are compared with real ones, layer by layer.
TRACED: tuple[str, ...] = (
    "vgg16, 1gbit, 1x2, sharded",
    "resnet18, 500mbit, 1x2, exchange",
    "resnet18, 1gbit, 2x2 mixed, exchange",
)


def machines_of_points() -> tuple[tuple[str, int], ...]:
    """(link, ranks) of each MPI job in which points are measured, in order."""
    return tuple(dict.fromkeys((point.link, point.ranks) for point in POINTS))
