"""The average of the weights of a replica: put in place of the weights for an evaluation, and that of running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.parameter_swap import copy_parameters, swap_parameters
from hpctrain.nn.frozen import layer_of
from hpctrain.nn.network import Network
from hpctrain.optim.ema import EMA, EmaRule
from hpctrain.train.confusion import ConfusionCounts
from hpctrain.train.metrics_rest import EvaluationSums, RunningSums


class WeightAverage:
    """The averages that `EmaOptimizer` keeps for the parameters, and here one of the running statistics, alike on every rank.

    The statistics are averaged by the same rule as the weights, one update a step, as timm and torch (use_buffers=True) do. What
    is frozen has no average, as it would be the same.

    Args:
        averagers: by parameter group; their optimisers keep averages.

    Attributes:
        views: every averaged statistic of a layer that is trained, by full name, in its shape.
    """

    def __init__(self, network: Network, averagers: Mapping[str, GradientAverager], rule: EmaRule) -> None:
        self._network, self._averagers, self._rule = network, averagers, rule
        self._running = network.statistics.running.copy()
        self._updates = 0
        starts = np.cumsum([0, *(view.size for view in network.statistics.views.values())])
        self.views = {
            name: self._running[start : start + view.size].reshape(view.shape)
            for (name, view), start in zip(network.statistics.views.items(), starts, strict=False)
            if layer_of(name) not in network.frozen
        }

    def blend(self, weighted_sums: np.ndarray, count: float) -> None:
        """As `Statistics.blend`, and an update of their average; nothing where count is 0."""
        statistics = self._network.statistics
        if count == 0:
            return
        if not self._updates:  # they may have been loaded since
            self._running[...] = statistics.running
        statistics.blend(weighted_sums, count)
        self._updates += 1
        self._running[...] = (self._running - statistics.running) * self._rule.kept(self._updates) + statistics.running

    def weights_changed(self) -> None:
        """Weights or statistics were written from outside of steps: until its first update the average is what they are."""
        if self._weight_updates():
            return
        for averager in self._averagers.values():
            copy_parameters(averager, EMA)
        self._running[...] = self._network.statistics.running

    def go_on(self) -> None:
        """The averagers have loaded a checkpoint, and `views` were written: the statistics have had as many updates."""
        self._updates = self._weight_updates()

    def _weight_updates(self) -> int:
        """The updates of averages of weights so far."""
        counters = (averager.counters() for averager in self._averagers.values())
        return next(counters, {}).get("updates", 0)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, parameters and running statistics are the averages. Collective, at both ends; after a drain."""
        self._swap()
        yield  # behind an error of this rank alone nobody would answer, and the job ends
        self._swap()

    def _swap(self) -> None:
        for averager in self._averagers.values():
            swap_parameters(averager, EMA)
        statistics = self._network.statistics
        for name, average in self.views.items():
            running = statistics.views[name]
            running[...], average[...] = average.copy(), running.copy()
        statistics.running_changed()
        self._network.parameters_changed()


def evaluated_with(
    average: WeightAverage | None,
    evaluate: Callable[..., RunningSums],
    confusion: ConfusionCounts | None,
    advance: Callable[[int], None],
) -> RunningSums:
    """The sums of an evaluation; with an average of the weights `EvaluationSums`, by a second pass with that. Collective.

    Args:
        evaluate: makes one pass, with these keywords. confusion: counts in the pass with the weights themselves.
        advance: told how many samples are done; those of the second pass count on from those of the first.
    """
    sums = evaluate(confusion=confusion, advance=advance)
    if average is None:
        return sums
    with average.in_place():
        return EvaluationSums.of(sums, evaluate(advance=lambda done: advance(sums.count + done)))
