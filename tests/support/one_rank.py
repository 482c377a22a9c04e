"""The oracle of whole trainings: one rank, float64, a loop that is short enough to be read.

Nothing of the training step, the grid or the averaging of gradients is used (but `lazy`, which trains something else than all
others, on one rank). Batch norm takes its statistics over groups of samples, so the oracle receives the samples of each group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hpctrain.averaging.averagers import make_averager
from hpctrain.averaging.base import AveragerSetup, PlannedGroup
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.operators import MixedLabels, StepContext
from hpctrain.data.sampler import Reordering, counts
from hpctrain.nn.network import Network, layer_of
from hpctrain.optim.ema import EmaRule, with_ema
from hpctrain.training.metrics import StepTotals
from hpctrain.training.replica import StrategyFactory
from hpctrain_testing.virtual.run import lone_rank
from tests.support.training import Result, Task, made_up

#: of a step: positions in its batch, in groups that are passed through the network one after the other
Groups = tuple[tuple[int, ...], ...]


def shares_of(ids: np.ndarray, ranks: int, split_size: int = 1) -> list[np.ndarray]:
    """Return the samples of every rank, of those of a step."""
    return np.split(ids, np.cumsum(counts(len(ids), ranks, split_size))[:-1])


def groups_of(total: int, ranks: int, split_size: int, micro_batches: int, *, together: int) -> Groups:
    """How a step's samples fall into groups with batch statistics of their own.

    Args:
        total: samples of the step. together: neighbouring ranks whose samples share statistics: 1, `split_size`, or all.
    """
    places = np.arange(total)
    own = shares_of(places, ranks, split_size)
    parts = [np.split(mine, np.cumsum(counts(len(mine), micro_batches))[:-1]) for mine in own]
    found = (
        tuple(int(place) for part in parts[first : first + together] for place in part[micro])
        for micro in range(micro_batches)
        for first in range(0, ranks, together)
    )
    return tuple(group for group in found if group)


def train_alone(
    task: Task,
    groups: Callable[[int], Groups],
    strategy: StrategyFactory = Blocking,
    *,
    other_order_from: int | None = None,
    other_groups: tuple[int, Callable[[int], Groups]] | None = None,
) -> Result:
    """The task on one rank, without a grid.

    Args:
        groups: of a step, from its number of samples. strategy: its class.
        other_order_from: from this step on samples come in the first other order, as after a rollback to it; None: never.
        other_groups: from a step on, these groups; None: the same in all steps.
    """
    comm, engine = lone_rank()
    network = Network(
        task.model(),
        task.image_shape,
        task.kernels,
        dtype=task.dtype,
        seed=task.seed,
        smoothing=task.smoothing,
        class_weights=task.class_weights,
        frozen=task.frozen,
    )
    (group,) = network.groups.values()
    optimizer = with_ema(task.optimizer(), task.ema if strategy is not Blocking else None)
    planned = PlannedGroup(group, 1, norms_needed=optimizer.norms_needed)
    updates = make_averager(strategy(planned), AveragerSetup(group, optimizer, comm, engine))
    sampler = made_up(task)[2]
    totals: list[StepTotals] = []
    average = _Average(network, task.ema)
    for number in range(task.steps):
        if task.skips and number == task.poisoned_step:
            totals.append(StepTotals(0.0, 0, 0, 0, 0, 0, np.zeros(network.statistics.size)))
            continue
        epoch, inside = divmod(number, sampler.steps_per_epoch)
        if number == other_order_from:
            sampler.reorder([Reordering(epoch, inside * task.batch, 1)])
        ids = sampler.ids(epoch, inside)
        context = StepContext(training=True, step=number, sample_ids=ids)
        updates.begin_step(task.lr, (len(ids),))
        updates.before_forward(tuple(group.parameters.values()))
        step = _Step(network, context)
        images, labels, _ = made_up(task, epoch)
        shown, targets = _mixed(task, images[ids], labels[ids], epoch, inside)
        groups_here = groups if other_groups is None or number < other_groups[0] else other_groups[1]
        for members in groups_here(len(ids)):
            step.add(shown, targets, ids, list(members))
        group.grad[...] = step.gradient
        for parameter in reversed(group.parameters.values()):
            updates.grad_ready(parameter)
            updates.data_free(parameter)
        updates.end_backward()
        network.statistics.blend(step.statistics, len(ids))
        average.add(network)
        totals.append(step.totals())
    updates.drain()
    running = {name: view.copy() for name, view in network.statistics.views.items()}
    parameters = {name: own.data.copy() for name, own in network.parameters.items()}
    if task.ema is not None:
        running |= {f"ema/{name}": values for name, values in average.statistics.items()}
        parameters |= {f"ema/{name}": own.data.copy() for name, own in network.parameters.items()}
        parameters |= {
            f"ema/{name}": values
            if strategy is Blocking
            else updates.full_state(network.parameters[name])["ema"].reshape(values.shape)
            for name, values in average.parameters.items()
        }
    return Result(parameters, running, totals)


def _mixed(
    task: Task, images: np.ndarray, labels: np.ndarray, epoch: int, step: int
) -> tuple[np.ndarray, np.ndarray | MixedLabels]:
    """The images of a step and their labels, mixed with those in the opposite order."""
    mix = None if task.mixing is None else task.mixing.draw(epoch, step * task.batch, *images.shape[1:3])
    if mix is None:
        return images, labels
    if mix.box is None:
        images = mix.weight * images + (1 - mix.weight) * images[::-1]
    else:
        (top, bottom), (left, right) = mix.box
        images = images.copy()
        images[:, top:bottom, left:right] = images[::-1, top:bottom, left:right].copy()
    return images, MixedLabels(labels, labels[::-1], mix.weight)


class _Average:
    """The averages of weights and running statistics that are trained, of a training that updates all of these in each step."""

    def __init__(self, network: Network, rule: EmaRule | None) -> None:
        self.parameters = {name: network.parameters[name].data.copy() for name in network.trained}
        views = network.statistics.views
        self.statistics = {name: view.copy() for name, view in views.items() if layer_of(name) not in network.frozen}
        self._rule, self._steps = rule, 0

    def add(self, network: Network) -> None:
        """Update the state after a step."""
        if self._rule is None:
            return
        self._steps += 1
        kept = min(self._rule.decay, (1 + self._steps) / (10 + self._steps)) if self._rule.warm_up else self._rule.decay
        now = {name: own.data for name, own in network.parameters.items()}
        for averages, values in ((self.parameters, now), (self.statistics, network.statistics.views)):
            for name, average in averages.items():
                averages[name] = kept * average + (1 - kept) * values[name]


class _Step:
    """One step's sums over its groups of samples."""

    def __init__(self, network: Network, context: StepContext) -> None:
        self._network, self._context = network, context
        (self._group,) = network.groups.values()
        self.gradient = np.zeros_like(self._group.grad)
        self.statistics = np.zeros(network.statistics.size)
        self._loss, self._top1, self._top5 = 0.0, 0, 0

    def add(self, images: np.ndarray, labels: np.ndarray | MixedLabels, ids: np.ndarray, members: list[int]) -> None:
        """Forward and backward of one group, which is some of the step's samples."""
        height, width, channels = images.shape[1:]
        program = self._network.program(len(members), training=True, image_shape=(height, width, channels))
        program.x[...] = images[members]
        program.forward(replace(self._context, sample_ids=ids[members]))
        weights, own = self._network.loss_spec.class_weights, labels.first if isinstance(labels, MixedLabels) else labels
        scale = len(own) / sum(weights[label] for label in own) if weights else None  # of the whole step
        if isinstance(labels, MixedLabels):
            labels = replace(labels, first=labels.first[members], second=labels.second[members])
        else:
            labels = labels[members]
        sums = program.loss(labels, len(self._context.sample_ids), scale)
        statistics = self._network.statistics
        self.statistics += statistics.weighted(len(members), len(members), statistics.batch)
        program.backward()
        self.gradient += self._group.grad
        self._loss, self._top1, self._top5 = self._loss + sums.loss, self._top1 + sums.top1, self._top5 + sums.top5

    def totals(self) -> StepTotals:
        """The step's sums; nothing of flags."""
        return StepTotals(self._loss, self._top1, self._top5, len(self._context.sample_ids), 0, 0, self.statistics)


def one_group(total: int) -> Groups:
    """All samples together."""
    return (tuple(range(total)),)
