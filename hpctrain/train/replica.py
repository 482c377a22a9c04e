"""A rank's trainable copy of a model: network, averagers and step, put together here for runs, tests and benchmarks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from hpctrain.averaging.agreement import make_averager
from hpctrain.averaging.base import AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.norms import JointNorms
from hpctrain.averaging.strategy import PlannedGroup, Strategy
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch, BatchSource, Place, TileOfRank
from hpctrain.errors import BackendError
from hpctrain.nn.network import MODEL, Network
from hpctrain.optim.base import Optimizer
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.trace.tracer import Tracer
from hpctrain.train import snapshot
from hpctrain.train.evaluator import evaluate
from hpctrain.train.metrics import RunningSums
from hpctrain.train.shards import Shards
from hpctrain.train.snapshot import Position
from hpctrain.train.step import TrainingStep
from hpctrain.train.step_reduction import StepReduction, StepTotals
from hpctrain.train.tracing import timed_optimizer

_NO_SCHEDULES: Mapping[str, CollectiveSchedule] = MappingProxyType({})
# What overflows is told in one sentence on every rank; NumPy's warnings would come before it.
_without_warnings = np.errstate(over="ignore", invalid="ignore", divide="ignore")


def _usable(optimizer: Optimizer, network: Network) -> Optimizer:
    if not (optimizer.any_arrays or network.kernels.arithmetic.on_host):
        raise BackendError(
            f"The optimizer {type(optimizer).__name__} computes with NumPy, which does not reach arrays of backend "
            f"{network.kernels.name}; let it compute by group.arithmetic and say any_arrays = True, or set backend to onednn or "
            "numpy."
        )
    return optimizer


def slices_of(averagers: Mapping[str, GradientAverager]) -> dict[str, list[int]]:
    """By parameter, the slices of all schedules that hold some of it, numbered through; none where a rank is alone."""
    slices: dict[str, list[int]] = {}
    pieces = (piece for averager in averagers.values() if averager.comm.size > 1 for piece in _pieces(averager))
    for number, names in enumerate(pieces):
        for name in names:
            slices.setdefault(name, []).append(number)
    return slices


def _pieces(averager: GradientAverager) -> list[tuple[str, ...]]:
    """The parameters of each slice of a schedule; without one every parameter is a slice."""
    if averager.schedule is None:
        return [(name,) for name in averager.group.parameters]
    return [(*piece.parameters, *piece.replicated) for piece in averager.schedule.slices]


#: the strategy for one group of parameters, such as the class `Sharded` itself
StrategyFactory = Callable[[PlannedGroup], Strategy]


class Replica:
    """A rank's copy of a model, and what trains it. Making one is not collective; `agree` and all that trains is.

    Until its ranks have agreed it has no averagers, and only evaluates.

    A step leaves its sums on their way: they travel under the next step, or until `settle` waits for them.

    Args:
        network: this rank's part of the model (see `rank_graph.make_network`). groups: its communicators.
        progress: the process's engine; where it has a tracer, steps are recorded.
        strategy: makes the averaging strategy of each parameter group; None: a replica that only evaluates.
        optimizer: makes an optimiser that is not bound yet.
        nominal_batch: samples of a step over all ranks, where strategies may follow from it; shorter batches change nothing.
        micro_batches: passes that one step's samples are split into.

    Attributes:
        strategies, averagers: by parameter group. shards: split parameters as whole ones and back.
        distribution: what this rank does of the model, where ranks share samples.
        tiles: what the ranks that share samples read of them; None where each reads its own.
        global_step: steps done. lr: the learning rate of the last of them.

    Raises:
        ConfigError: a strategy that cannot do what is asked for. BackendError: an optimiser that cannot compute where the arrays
            of the network lie.
    """

    def __init__(
        self,
        network: Network,
        *,
        groups: GridGroups,
        progress: ProgressEngine,
        strategy: StrategyFactory | None = None,
        optimizer: Callable[[], Optimizer] | None = None,
        nominal_batch: int | None = None,
        micro_batches: int = 1,
    ) -> None:
        if groups.all_ranks.size == 1 and not network.kernels.arithmetic.on_host:
            groups = groups.alone()  # transports between processes read arrays of the host only, and nobody else is there
        self.network, self.groups, self.progress = network, groups, progress
        distribution = network.distribution
        self.distribution = distribution if isinstance(distribution, GridDistribution) else None
        self.tiles: TileOfRank | None = None
        if self.distribution is not None:
            self.tiles = self.distribution.tiles_by_counts(network.graph)
        self.strategies: dict[str, Strategy] = {}
        self._optimizers: dict[str, Optimizer] = {}
        if strategy is not None and optimizer is not None:
            for name, group in network.groups.items():
                unbound = self._optimizers[name] = timed_optimizer(_usable(optimizer(), network), progress)
                self.strategies[name] = strategy(
                    PlannedGroup(
                        group,
                        groups.gradients[name].size,
                        groups.nodes[name],
                        nominal_batch,
                        micro_batches,
                        norms_needed=unbound.norms_needed,
                        several_groups=MODEL in network.groups,
                        momentum=unbound.momentum,
                        names=tuple(network.parameter_specs),
                    )
                )
        self.averagers: Mapping[str, GradientAverager] = {}
        self.shards = Shards(network, groups.shard_holders, progress)
        self._reduction = StepReduction(groups.messages, progress, network.statistics.size)
        self._micro_batches = micro_batches
        self._step = self._training_step()
        self.global_step, self.lr = 0, 0.0
        self._current_lr = 0.0
        self._finite_at_step = -1

    def agree(self, stored: Mapping[str, CollectiveSchedule] = _NO_SCHEDULES) -> None:
        """Make the averagers, with what each of them posts in a step. Collective; once, before all else that is.

        Args:
            stored: schedules of an earlier run, by parameter group; used where they fit.

        Raises:
            CollectiveMismatchError: ranks with different schedules.
        """
        norms = None
        if MODEL in self.network.groups and any(optimizer.needs_norms for optimizer in self._optimizers.values()):
            norms = JointNorms(self.groups.norms, self.progress, tuple(self.network.groups.values()))
        interval = None
        if MODEL in self.network.groups and self.strategies:
            one_of_them = next(iter(self.strategies.values()))  # all have the same options
            interval = one_of_them.interval(self.groups.norms, self.progress, len(self.strategies))
        averagers = {}
        for name, strategy in self.strategies.items():
            group, comm = self.network.groups[name], self.groups.gradients[name]
            setup = AveragerSetup(group, self._optimizers[name], comm, self.progress, norms, interval)
            averagers[name] = make_averager(strategy, setup, stored.get(name))
        self.averagers = averagers
        self.network.slices = slices_of(averagers)
        self._step = self._training_step()

    def _training_step(self) -> TrainingStep:
        counts_of = self.groups.counts_of
        return TrainingStep(self.network, self.averagers, self.progress, self._reduction, self._micro_batches, counts_of)

    def record_operators(self, trace: Tracer | None) -> None:
        """Record the operators of steps from now on; None: no longer. Where the engine has a tracer, that has them already."""
        assert self.progress.trace is None
        self._step.record_operators(trace)

    @property
    def place(self) -> Place:
        """Keywords of a loader of this replica's batches."""
        groups = self.groups
        ranks = groups.all_ranks.size
        return {"rank": groups.position, "ranks": ranks, "split_size": groups.split_size, "tiles": self.tiles}

    def step(self, batch: Batch, lr: float) -> StepTotals | None:
        """One update. Collective.

        Args:
            batch: this rank's share of the step; without samples where it has none. lr: the learning rate.

        Returns:
            The sums over all ranks of the step before; None where `settle` gave them.

        Raises:
            DivergedError: a loss, parameter, gradient or statistic of the step before is not finite; on every rank.
        """
        self.update(batch, lr)
        totals = self.settle()
        self.post()
        return totals

    @_without_warnings
    def update(self, batch: Batch, lr: float) -> None:
        """The first part of a step: its update. `settle` and `post` follow, in this order. Collective."""
        self._current_lr = lr
        self._step.run(batch, self.global_step, lr)

    @_without_warnings
    def settle(self) -> StepTotals | None:
        """Wait for the sums on their way, if any, and blend their batch statistics into the running ones. Collective.

        Raises:
            DivergedError: as `step`.
        """
        totals = self._reduction.read()
        if totals is None:
            return None
        if totals.non_finite:
            self.drain()
            self._raise_diverged()
        self.network.statistics.blend(totals.statistics, totals.count)
        return totals

    def post(self, *, stop: bool = False) -> None:
        """The last part of a step: send its sums. Collective; does not wait.

        Args:
            stop: this rank was asked to stop; all ranks read how many were.
        """
        self._reduction.post(stop=stop)
        self.global_step += 1
        self.lr = self._current_lr

    @_without_warnings
    def drain(self) -> None:
        """Complete everything of the steps so far, on every rank. Collective."""
        for averager in self.averagers.values():
            averager.drain()

    @_without_warnings
    def require_finite(self) -> None:
        """Drain, and look at what the last step has made: before parameters are evaluated or kept. Collective.

        Raises:
            DivergedError: as `step`.
        """
        self.drain()
        if self.averagers and self._finite_at_step != self.global_step:
            statistics = self.network.statistics
            look = self._step.finiteness.begin()
            self._step.finiteness.end(self.global_step, look, statistics=statistics.not_finite(statistics.running))
            self._raise_diverged()
            self._finite_at_step = self.global_step

    @_without_warnings
    def evaluate(self, loader: BatchSource) -> RunningSums:
        """Sums over a data set, each sample once, with running statistics, over all ranks. Collective.

        The last step's sums, where they are wanted, are to be had from `settle` before.

        Raises:
            DivergedError: as `step`.
        """
        self.settle()
        self.require_finite()
        self.network.parameters_changed()
        return evaluate(self.network, loader, self.groups.all_ranks, self.progress)

    def state(self, position: Position, meta: Mapping[str, Any], *, keep: bool = True) -> CheckpointContent:
        """Parameters, running statistics and optimiser state, whole. Collective; after `drain`.

        Args:
            position, meta: go into the content's metadata.
            keep: False on ranks that do not write the content: theirs has no tensors.
        """
        return snapshot.take(self.network, self.averagers, self.shards, position, meta, keep=keep)

    def load(self, content: CheckpointContent) -> Position:
        """Restore what `state` gave, on whatever grid; give the position in it. After `agree`; not collective.

        Raises:
            CheckpointError: a tensor that is missing, of another shape or dtype, or that nothing here has a place for.
        """
        position = snapshot.put(content, self.network, self.averagers, self.shards)
        self.global_step = position.global_step
        return position

    def load_weights(self, content: CheckpointContent) -> None:
        """Restore parameters and running statistics only: to evaluate, or to start from trained weights. Not collective.

        Raises:
            CheckpointError: as `load`.
        """
        snapshot.put_weights(content, self.network, self.shards)

    def _raise_diverged(self) -> None:
        """Raise what any rank has seen of numbers that are not finite, alike on all; nothing where none has. Collective."""
        advice = f"lower optimizer.lr ({self.lr:g} there), warm up longer, or set optimizer.clip_norm."
        error = self._step.finiteness.error(self._reduction.gather, advice)
        if error is not None:
            raise error
