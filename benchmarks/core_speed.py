"""How fast each rank's core is while a point is stepped, on a machine whose other tenants slow cores for seconds at a time.

The yardstick is a step of the same network on the rank's samples alone, with no other rank and no message, just before and just
after the measured steps. How many times as long it takes as the least time it ever took is how many times the core was slowed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.planner_jobs import configuration, made_up_samples, started
from benchmarks.planner_points import NETWORKS, Point
from hpctrain.comm.base import SingleCommunicator
from hpctrain.data.loader import ArrayLoader
from hpctrain.data.sampler import Sampler

_LR = 1e-4
_WARM_UP = 2


class Yardstick:
    """A network's step on one rank's samples, without any other rank. Nothing here is collective.

    Args:
        point: whose network and number of ranks it has.
    """

    def __init__(self, point: Point) -> None:
        batch = NETWORKS[point.network].batch // point.ranks
        alone = Point(point.network, point.link, 1, 1, "batch", "blocking")
        config = configuration(alone).model_copy(update={"batch": batch})
        _, self._replica = started(config, point, SingleCommunicator())
        images, labels = made_up_samples(point, batch)
        loader = ArrayLoader(images, labels, Sampler(batch, batch, shuffle=False), **self._replica.place)
        self._batch = next(loader.epoch(0))
        for _ in range(_WARM_UP):
            self._replica.step(self._batch, _LR)

    def seconds(self) -> float:
        """The seconds of one step, now."""
        begin = time.perf_counter()
        self._replica.step(self._batch, _LR)
        return time.perf_counter() - begin


def slowed(turns: Mapping[str, Sequence[Mapping[str, float]]], network_of: Mapping[str, str]) -> dict[str, list[float]]:
    """How many times one rank's core was slowed in each turn of each point, from its turns with their `yardstick_seconds`.

    network_of: the network of each point, whose turns share the least time.
    """
    least: dict[str, float] = {}
    for name, of_point in turns.items():
        network = network_of[name]
        least[network] = min(least.get(network, float("inf")), *(turn["yardstick_least_seconds"] for turn in of_point))
    return {name: [turn["yardstick_seconds"] / least[network_of[name]] for turn in turns[name]] for name in turns}


def slowed_ranks(all_ranks: Sequence[Mapping[str, Any]], name: str) -> list[dict[int, float]]:
    """By turn of a point: rank -> how many times its core was slowed."""
    return [dict(enumerate(turn)) for turn in zip(*(of_rank[name] for of_rank in all_ranks), strict=True)]
