"""A rank's trainable copy of a model: network, averagers and step, put together here for runs, tests and benchmarks alike.

`make_optimizers`, `make_strategies` and `make_averagers` make one of each for every group of parameters. `LoopState` is the
state of the loop around steps, that of the trainer or of a program: skipped steps, stop requests, and the status of a checkpoint
that is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hpctrain.averaging.averagers import make_averager
from hpctrain.averaging.base import AveragerSetup, GradientAverager, PlannedGroup, Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.group_sums import JointNorms
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.transports import Transport
from hpctrain.core.errors import BackendError, DivergedError
from hpctrain.core.log import get_logger
from hpctrain.data.loader import Batch, BatchSource, LoaderRank
from hpctrain.flight.recorder import FlightNotes, RunPhase
from hpctrain.nn.network import ALL, MODEL, Network
from hpctrain.optim.base import Optimizer
from hpctrain.optim.ema import EmaRule, with_ema
from hpctrain.optim.guarded import GuardedOptimizer
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.shards import Part
from hpctrain.trace.tracer import Tracer
from hpctrain.train import snapshot
from hpctrain.train import snapshot as owned_parts
from hpctrain.train.evaluation import ConfusionCounts, WeightAverage, evaluate, evaluated_with
from hpctrain.train.finiteness import Cause
from hpctrain.train.metrics import RunningSums, StepReduction, StepTotals
from hpctrain.train.passes import Passes
from hpctrain.train.saving import Saver
from hpctrain.train.snapshot import Position, Shards
from hpctrain.train.step import StepGuard, TimedOptimizer, TrainingStep
from hpctrain.train.weight_watch import CheckCadence, WeightWatch, message_size

#: the phase of a program that is in no call of hpctrain
BETWEEN = "the program, between steps"


class LoopState:
    """The state of the loop around a replica's steps, that of the trainer or of a program. Only `end` may communicate.

    Args:
        notes: for the flight record. stop_asked: whether this rank was asked to stop.
        most_skips: maximum number of consecutive steps that may change nothing because they are not finite.
        saver: of checkpoints that are written while steps continue; None if there are none.

    Attributes:
        skipped: steps that changed nothing. skipped_in_a_row: of the latest ones. cause: of the latest of them.
        stop_requested: some rank was asked to stop, as all ranks know after the same step.
    """

    def __init__(
        self,
        notes: FlightNotes,
        *,
        stop_asked: Callable[[], bool] = lambda: False,
        most_skips: int = 10,
        saver: Saver | None = None,
    ) -> None:
        self._notes, self._saver, self._most_skips = notes, saver, most_skips
        self.stop_asked = stop_asked
        self.skipped = self.skipped_in_a_row = 0
        self.cause: Cause | None = None
        self.stop_requested = False
        self._status = 0

    def begin(self, epoch: int, global_step: int) -> None:
        """Note that a step begins. epoch, global_step: epochs and steps done before it."""
        self._notes.step(epoch + 1, global_step + 1)

    def status_flag(self) -> int:
        """Return this rank's share of a step's message about a checkpoint that is being written (see `Saver.status_flag`)."""
        return 0 if self._saver is None else self._saver.status_flag()

    def take(self, totals: StepTotals) -> None:
        """Take over what the sums of a step tell: whether some rank was asked to stop, and the status of a checkpoint."""
        self.stop_requested = self.stop_requested or totals.stop > 0
        self._status = max(self._status, totals.status)

    def end(self, cause: Cause | None, lr: float, drain: Callable[[], None]) -> bool:
        """End a step; return whether ranks exchanged the states of a checkpoint. Collective if they do.

        Args:
            cause: why the step has changed nothing; None if it has. lr: its learning rate. drain: is called before an exchange.

        Raises:
            DivergedError: more than `most_skips` consecutive steps were skipped.
        """
        self._count(cause, lr)
        exchanges = self._saver is not None and self._status >= self._saver.size
        if self._saver is not None and exchanges:
            self._notes.phase(RunPhase.STATUS)
            drain()
            self._saver.exchange_status()
        self._status = 0
        return exchanges

    def restore(self, position: Position) -> None:
        """Count on from a position."""
        self.skipped, self.skipped_in_a_row, self.cause = position.skipped, position.skipped_in_a_row, None

    def position(self, global_step: int) -> Position:
        """Return where training stands, as a checkpoint keeps it. global_step: steps done."""
        return Position(global_step=global_step, skipped=self.skipped, skipped_in_a_row=self.skipped_in_a_row)

    def _count(self, cause: Cause | None, lr: float) -> None:
        if cause is None:
            self.skipped_in_a_row = 0
            return
        self.cause = cause
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self._most_skips:
            raise DivergedError(
                f"{self.skipped_in_a_row} steps, one after another, are not finite and were skipped, the last one step "
                f"{cause.step}, as {cause}; lower optimizer.lr ({lr:g} there), look for broken samples, or raise "
                "on_nonfinite.most.",
                ranks=cause.blamed,
            )


@dataclass(frozen=True)
class Optimizers:
    """The optimisers of a replica, by group of parameters.

    unbound: for averagers to bind and own. guards: within these, what notices writes of others to their state.
    """

    unbound: dict[str, Optimizer] = field(default_factory=dict)
    guards: dict[str, GuardedOptimizer] = field(default_factory=dict)


def make_optimizers(
    make: Callable[[], Optimizer] | None, network: Network, progress: ProgressEngine, ema: EmaRule | None
) -> Optimizers:
    """Return one optimiser for each group of parameters; none if `make` is None.

    Args:
        make: returns one that is not bound yet. ema: rule of an average of the weights that they keep; None: there is none.

    Raises:
        BackendError: they cannot compute where the arrays of the network lie.
    """
    optimizers = Optimizers()
    if make is None:
        return optimizers
    for name in network.groups:
        guard = optimizers.guards[name] = GuardedOptimizer(with_ema(usable(make(), network), ema))
        optimizers.unbound[name] = TimedOptimizer(guard, progress)
    return optimizers


def make_strategies(
    make: Callable[[PlannedGroup], Strategy] | None,
    optimizers: Optimizers,
    network: Network,
    groups: GridGroups,
    nominal_batch: int | None,
    passes: Passes,
) -> dict[str, Strategy]:
    """Return the strategy of each group of parameters that has an optimiser; none if `make` is None.

    Raises:
        ConfigError: a strategy that cannot do what is asked for. BackendError: one that the network's kernels do not take.
    """
    if make is None:
        return {}
    planned = partial(_planned_group, network, groups, nominal_batch, passes)
    strategies = {name: make(planned(name, optimizer)) for name, optimizer in optimizers.unbound.items()}
    for strategy in strategies.values():
        _check_rounding(strategy, network)
    return strategies


def _check_rounding(strategy: Strategy, network: Network) -> None:
    """Raise if parameters are rounded to 16 bits and do not lie on the host.

    Raises:
        BackendError: parameters travel in 16 bits and lie on a device, but an owner keeps rounding errors on the host only.
    """
    rounding = strategy.rounding
    if rounding is None or rounding.parameters == "float32" or network.kernels.arithmetic.on_host or strategy.group.ranks == 1:
        return
    raise BackendError(
        f"wire_parameters is {rounding.parameters}, but parameters of backend {network.kernels.name} travel as they are so far; "
        "set it to float32, or backend to onednn or numpy."
    )


def _planned_group(
    network: Network,
    groups: GridGroups,
    nominal_batch: int | None,
    passes: Passes,
    name: str,
    optimizer: Optimizer,
) -> PlannedGroup:
    """Return a group of parameters, by name, as a strategy plans for it. optimizer: not bound yet."""
    return PlannedGroup(
        network.groups[name],
        groups.gradients[name].size,
        groups.nodes[name],
        nominal_batch,
        passes.micro_batches,
        norms_needed=optimizer.norms_needed,
        several_groups=MODEL in network.groups,
        momentum=optimizer.momentum,
        names=network.trained,
        on_host=network.kernels.arithmetic.on_host,
        shards=passes.shards,
    )


def make_averagers(
    network: Network,
    groups: GridGroups,
    progress: ProgressEngine,
    strategies: Mapping[str, Strategy],
    optimizers: Optimizers,
    stored: Mapping[str, CollectiveSchedule],
    transport: Transport,
    passes: Passes,
) -> dict[str, GradientAverager]:
    """Return the averagers of all groups of parameters, which have agreed on what they post. Collective.

    Args:
        strategies: by group. optimizers: of the same groups. stored: schedules of an earlier run, by group; used where they fit.
        transport: of arrays that lie on a device.
        passes: of each rank, whose gradients averagers add up.

    Raises:
        CollectiveMismatchError: ranks with different schedules.
    """
    norms = None
    if MODEL in network.groups and any(optimizer.needs_norms for optimizer in optimizers.unbound.values()):
        norms = JointNorms(groups.norms, progress, tuple(network.groups.values()))
    shared = None
    if MODEL in network.groups and strategies:
        one_of_them = next(iter(strategies.values()))  # all have the same options
        shared = one_of_them.shared(groups.norms, progress, len(strategies))
    averagers: dict[str, GradientAverager] = {}
    for name, strategy in strategies.items():
        group, comm = network.groups[name], groups.gradients[name]
        gradients = passes.gradients(group, comm)
        of_group = _transport_of(name, network, transport)
        setup = AveragerSetup(group, optimizers.unbound[name], comm, progress, norms, shared, of_group, gradients)
        averagers[name] = make_averager(strategy, setup, stored.get(name))
    return averagers


def _transport_of(name: str, network: Network, transport: Transport) -> Transport:
    """Return the transport of one group of parameters; NCCL takes a single group, preferably the one alike on all ranks.

    Two groups have a queue each, in which updates and gathers begin when sums are seen to be complete: another moment on each
    rank, so their operations could be enqueued in another order on another rank, where each then waits for the other.
    """
    by_nccl = ALL if ALL in network.groups else MODEL
    return "staged" if transport == "nccl" and name != by_nccl else transport


def usable(optimizer: Optimizer, network: Network) -> Optimizer:
    """Return the optimiser itself.

    Raises:
        BackendError: it cannot compute where the arrays of the network lie.
    """
    if not (optimizer.any_arrays or network.kernels.arithmetic.on_host):
        raise BackendError(
            f"The optimizer {type(optimizer).__name__} computes with NumPy, which does not reach arrays of backend "
            f"{network.kernels.name}; let it compute by group.arithmetic and say any_arrays = True, or set backend to onednn or "
            "numpy."
        )
    return optimizer


def slices_of(averagers: Mapping[str, GradientAverager]) -> dict[str, list[int]]:
    """Return the numbers of all schedules' slices that hold each parameter; none if a rank is alone."""
    slices: dict[str, list[int]] = {}
    pieces = (piece for averager in averagers.values() if averager.comm.size > 1 for piece in _pieces(averager))
    for number, names in enumerate(pieces):
        for name in names:
            slices.setdefault(name, []).append(number)
    return slices


def _pieces(averager: GradientAverager) -> list[tuple[str, ...]]:
    """Return the parameters of each slice of a schedule; without one every parameter is a slice."""
    if averager.schedule is None:
        return [(name,) for name in averager.group.parameters]
    return [(*piece.parameters, *piece.replicated) for piece in averager.schedule.slices]


_NO_CHECKS = CheckCadence()
_log = get_logger(__name__)
# After an overflow every rank raises one error; NumPy's warnings would only precede it.
_without_warnings = np.errstate(over="ignore", invalid="ignore", divide="ignore")

#: the strategy for one group of parameters, such as the class `Sharded` itself
StrategyFactory = Callable[[PlannedGroup], Strategy]


class Replica:
    """A rank's copy of a model, and what trains it. Making one is not collective; `agree` and all that trains is.

    Until its ranks have agreed it has no averagers, and only evaluates. A step leaves its sums on their way: they travel under
    the next step, or until `settle` waits for them.

    Args:
        network: this rank's part of the model (see `rank_graph.make_network`). groups: its communicators.
        progress: the process's engine; where it has a tracer, steps are recorded.
        strategy: makes the averaging strategy of each parameter group; None: a replica that only evaluates.
        optimizer: makes an optimiser that is not bound yet. micro_batches: passes that one step's samples are split into.
        nominal_batch: samples of a step over all ranks, where strategies may follow from it; shorter batches change nothing.
        exact_shards: of a step, in `micro_batches` passes; their sums have one order on any number of ranks. None: no order.
        checks: of what ranks must hold alike, and of what one rank alone holds; by default none. With checks, what else than
            steps and loading writes to parameters or to the optimiser's state calls `parameters_written`.
        skips: steps that are not finite on any rank change nothing; `update` returns the cause. Else they end the training.
        ema: of an average of the weights, which owners keep and evaluations are made with, too; None: there is none.
        loop: the state of the loop that calls `step`; by default one without stop requests and checkpoints.

    Attributes:
        strategies, averagers: by parameter group. shards: split parameters as whole ones and back.
        passes: that a rank's samples are split into. loop: as given.
        transport: of arrays that lie on a device; may be set until `agree`.
        distribution: what this rank does of the model, where ranks share samples. tiles: what they read of them; None if each
            reads its own. average: of the weights; None without. watch: of checks; None without.
        global_step: steps done. lr: the learning rate of the last of them. kept_step: of the newest checkpoint, for messages.

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
        exact_shards: int | None = None,
        checks: CheckCadence = _NO_CHECKS,
        skips: bool = False,
        ema: EmaRule | None = None,
        loop: LoopState | None = None,
    ) -> None:
        if not network.kernels.arithmetic.on_host:
            groups = groups.local_where_alone()  # groups of one rank stage nothing
        self.network, self.groups, self.progress = network, groups, progress
        self.loop = LoopState(progress.notes) if loop is None else loop
        self.distribution = network.distribution if isinstance(network.distribution, GridDistribution) else None
        self.tiles = None if self.distribution is None else self.distribution.tiles_by_counts(network.graph)
        self._optimizers = make_optimizers(optimizer if strategy is not None else None, network, progress, ema)
        self.passes = Passes.of(micro_batches, exact_shards, network, groups)
        self.strategies = make_strategies(strategy, self._optimizers, network, groups, nominal_batch, self.passes)
        self._checks, self._skips, self._ema = checks, skips, ema
        self.watch: WeightWatch | None = None
        self.averagers: Mapping[str, GradientAverager] = {}
        self.shards = Shards(network, groups.shard_holders, progress)
        self.average: WeightAverage | None = None
        shards, numbers = self.passes.among(groups.messages), message_size(groups, checks)
        self._reduction = StepReduction(groups.messages, progress, network.statistics.size, shards, checks=numbers)
        self._guard: StepGuard | None = None
        self._step = self._training_step()
        self.transport = AveragerSetup.transport  # the default
        self.global_step, self.lr, self._current_lr, self._finite_at_step = 0, 0.0, 0.0, -1
        self.kept_step: int | None = None

    def agree(self, stored: Mapping[str, CollectiveSchedule] | None = None) -> None:
        """Make the averagers, with what each of them posts in a step. Collective; once, before all else that is.

        Args:
            stored: schedules of an earlier run, by parameter group; used where they fit.

        Raises:
            CollectiveMismatchError: ranks with different schedules.
        """
        self._reduction.agree()
        averagers = self.averagers = make_averagers(
            self.network, self.groups, self.progress, self.strategies, self._optimizers, stored or {}, self.transport, self.passes
        )
        self.network.slices = slices_of(averagers)
        if self._ema is not None and averagers:
            self.average = WeightAverage(self.network, averagers, self._ema)
        if self._checks.every_steps and averagers:
            self.watch = WeightWatch(self.network, averagers, self._optimizers.guards, self.average, self.groups, self._checks)
        self._step = self._training_step()
        if self._skips:
            self._guard = StepGuard(averagers, self.groups.messages, self.progress, self._step.finiteness, self.watch)

    def _training_step(self) -> TrainingStep:
        passes, counts_of, checks = self.passes, self.groups.counts_of, not self._skips
        return TrainingStep(
            self.network,
            self.averagers,
            self.progress,
            self._reduction,
            passes,
            counts_of,
            watch=self.watch,
            checks_finite=checks,
        )

    def record_operators(self, trace: Tracer | None) -> None:
        """Record the operators of steps from now on; None: no longer. Where the engine has a tracer, that has them already."""
        assert self.progress.trace is None
        self._step.record_operators(trace)

    @property
    def place(self) -> LoaderRank:
        """Keywords of a loader of this replica's batches."""
        ranks, size, shards = self.groups.all_ranks.size, self.groups.split_size, self.passes.shards
        return LoaderRank(rank=self.groups.position, ranks=ranks, split_size=size, tiles=self.tiles, shards=shards)

    def step(self, batch: Batch, lr: float) -> StepTotals | None:
        """Do one update. Collective.

        Args:
            batch: this rank's share of the step; without samples where it has none. lr: the learning rate.

        Returns:
            The sums over all ranks of the step before; None if `settle` gave them.

        Raises:
            DivergedError: a loss, parameter, gradient or statistic of the step before is not finite, or more steps were skipped,
                one after another, than may be; on every rank.
            CorruptedStateError: with checks, something that ranks hold differs; on every rank.
        """
        self.loop.begin(batch.epoch, self.global_step)
        cause = self.update(batch, lr)
        totals = self.settle()
        self.post(stop=self.loop.stop_asked(), status=self.loop.status_flag())
        if cause is not None:
            _log.info("step %d skipped: %s", cause.step, cause)
        self.loop.end(cause, lr, self.drain)
        self.progress.notes.phase(BETWEEN)
        return totals

    @_without_warnings
    def update(self, batch: Batch, lr: float) -> Cause | None:
        """Do the first part of a step, its update. `settle` and `post` follow, in this order. Collective.

        Returns:
            The cause if the step was undone, else None. Only a replica that skips non-finite steps undoes any. The sums of an
            undone step are zeros, its samples included.
        """
        self._current_lr = lr
        self.passes.check(batch.counts)
        if self._guard is not None:
            self._guard.begin()
        self._step.run(batch, self.global_step, lr)
        if self._guard is None:
            return None
        cause = self._guard.end(self.global_step + 1, finite=self._reduction.finite)
        if cause is not None:
            self._reduction.clear()
        return cause

    @_without_warnings
    def settle(self) -> StepTotals | None:
        """Wait for the sums on their way, if any, and blend their batch statistics into the running ones. Collective.

        Raises:
            DivergedError, CorruptedStateError: as `step`.
        """
        totals = self._reduction.read()
        if totals is None:
            return None
        well = self.watch is None or self.watch.read(totals.checks)
        if totals.non_finite or not well:
            self.drain()
            self._raise_diverged()
            self._raise_corrupted()  # all values are finite, so checksums differ
        self.loop.take(totals)
        blend = self.network.statistics.blend if self.average is None else self.average.blend
        write = partial(blend, totals.statistics, totals.count)
        write() if self.watch is None else self.watch.statistics.write(write)
        return totals

    def post(self, *, stop: bool = False, status: int = 0) -> None:
        """Do the last part of a step: send its sums. Collective; does not wait.

        Args:
            stop: whether this rank was asked to stop; all ranks read how many were. status: all ranks read the sum.
        """
        self._reduction.post(stop=stop, status=status, checks=None if self.watch is None else self.watch.message())
        self.global_step += 1
        self.lr = self._current_lr

    @_without_warnings
    def drain(self) -> None:
        """Complete everything of the steps so far, on every rank. Collective."""
        for averager in self.averagers.values():
            averager.drain()

    @_without_warnings
    def require_finite(self) -> None:
        """Drain, and check what the last step has made: before parameters are evaluated or kept. Collective.

        Raises:
            DivergedError: as `step`.
        """
        self.drain()
        if self.averagers and self._finite_at_step != self.global_step:
            statistics = self.network.statistics
            check = self._step.finiteness.begin()
            self._step.finiteness.end(self.global_step, check, statistics=statistics.not_finite(statistics.running))
            self._raise_diverged()
            self._finite_at_step = self.global_step

    def require_alike(self, *, schedules: bool = False) -> None:
        """Drain, and compare all that ranks must hold alike: at the start, and before anything is kept. Collective.

        After `settle`. Nothing where the replica has no checks. schedules: compare those of the averagers, too.

        Raises:
            CorruptedStateError: something differs, or has changed while nothing wrote to it; on every rank.
        """
        self.drain()
        if self.watch is not None and not self.watch.compare_all(self.global_step, schedules=schedules):
            self._raise_corrupted()

    @_without_warnings
    def evaluate(
        self,
        loader: BatchSource,
        *,
        mirrored: BatchSource | None = None,
        confusion: ConfusionCounts | None = None,
        advance: Callable[[int], None] = lambda done: None,
    ) -> RunningSums:
        """Return sums over a data set, each sample once, with running statistics, over all ranks. Collective.

        The last step's sums, where they are wanted, are to be had from `settle` before. mirrored: as `evaluate` takes it;
        confusion, advance: as `evaluated_with` does.

        Raises:
            DivergedError: as `step`.
        """
        self.settle()
        self.require_finite()
        self.network.parameters_changed()
        comm = self.groups.all_ranks
        run = partial(evaluate, self.network, loader, comm, self.progress, mirrored=mirrored, shards=self.passes.among(comm))
        return evaluated_with(self.average, run, confusion, advance)

    def state(self, position: Position, meta: Mapping[str, Any], *, keep: bool = True, copied: bool = False) -> CheckpointContent:
        """Return parameters, running statistics and optimiser state, whole. Collective; after `drain`.

        Args:
            position, meta: go into the content's metadata.
            keep: False on ranks that do not write the content: theirs has no tensors.
            copied: training may continue while the content is being written.
        """
        network, averagers = self.network, self.averagers
        return snapshot.take(network, averagers, self.shards, position, meta, average=self.average, keep=keep, copied=copied)

    def own_parts(self, position: Position, meta: Mapping[str, Any]) -> tuple[dict[str, Part], dict[str, Any]]:
        """Return copies of the parts of `state` that this rank writes if every rank writes some, and all metadata. Collective."""
        parts = owned_parts.take_parts(self.network, self.averagers, self.shards, self.groups, self.average)
        return parts, snapshot.full_meta(self.averagers, position, meta)

    def load(self, content: CheckpointContent) -> Position:
        """Restore what `state` returned, on any grid, also after `DivergedError`; return the position in it. Not collective.

        Raises:
            CheckpointError: a tensor that is missing, of another shape or dtype, or that nothing here has a place for.
        """
        position = snapshot.put(content, self.network, self.averagers, self.shards, self.average)
        self._step.finiteness.forget()
        self._finite_at_step = -1
        if self.watch is not None:
            self.watch.forget()
        self.loop.restore(position)
        self.global_step = position.global_step
        return position

    def parameters_written(self) -> None:
        """Announce changes of parameters or optimiser state outside `step` and `load`: after `drain`, alike on all ranks."""
        self.network.parameters_changed()
        if self.average is not None:
            self.average.weights_changed()
        if self.watch is not None:
            self.watch.forget()

    def load_weights(self, content: CheckpointContent, *, averaged: bool = False) -> None:
        """Restore parameters and running statistics only: to evaluate, or to start from trained weights. Not collective.

        averaged: the averages of both, which a training with `ema` keeps, in place of them.

        Raises:
            CheckpointError: as `load`.
        """
        snapshot.put_weights(content, self.network, self.shards, averaged=averaged)
        self.parameters_written()

    def _raise_diverged(self) -> None:
        """Raise an error if any rank has seen non-finite values, the same on all ranks. Collective; after `drain`."""
        advice = f"lower optimizer.lr ({self.lr:g} there), warm up longer, or set optimizer.clip_norm."
        error = self._step.finiteness.error(self._reduction.gather, advice)
        if error is not None:
            if self.watch is not None and self.watch.explains(self._reduction.gather(self._step.finiteness.finding)):
                self._raise_corrupted()  # NaN in the memory of one rank reaches all ranks within a step
            raise error.of_all_ranks()

    def _raise_corrupted(self) -> None:
        """Raise the error for the differences that the watch has found, the same on all ranks. Collective; after `drain`."""
        assert self.watch is not None
        raise self.watch.error(self.kept_step).of_all_ranks()
