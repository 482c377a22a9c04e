"""Replica of a model on one rank: network, averagers and training step, for runs, user programs, tests and benchmarks.

`LoopState` is the state of the loop that calls the steps, in the trainer or in a user program: skipped steps, stop requests, and
the status of a checkpoint that is being written.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from hpctrain.averaging.averagers import make_averager
from hpctrain.averaging.base import AveragerSetup, GradientAverager, PlannedGroup, Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.group_sums import JointNorms
from hpctrain.comm.base import Subject, compare
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.transports import Transport
from hpctrain.core.errors import BackendError, ConfigError, CorruptedStateError, DivergedError
from hpctrain.core.registry import check_types
from hpctrain.core.text import counted, shortened
from hpctrain.data.loader import Batch, BatchSource, LoaderRank
from hpctrain.flight.recorder import FlightNotes, RunPhase
from hpctrain.nn.network import ALL, MODEL, ImageShape, Network
from hpctrain.optim.base import Optimizer
from hpctrain.optim.ema import EmaRule, with_ema
from hpctrain.optim.guarded import GuardedOptimizer
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.shards import Part
from hpctrain.training import snapshot
from hpctrain.training.evaluation import ConfusionCounts, WeightAverage, evaluate, evaluated_with
from hpctrain.training.finiteness import Cause
from hpctrain.training.metrics import RunningSums, StepReduction, StepTotals
from hpctrain.training.passes import Passes, StatisticsSharing
from hpctrain.training.saving import Saver
from hpctrain.training.snapshot import Position, Shards
from hpctrain.training.step import StepGuard, TrainingStep
from hpctrain.training.weight_watch import CheckCadence, WeightWatch, agreed_checksums

#: phase of a user program outside hpctrain's calls
BETWEEN = "the program, between steps"


class LoopState:
    """State of the loop that calls a replica's steps, in the trainer or in a user program. Only `end` may communicate.

    Args:
        stop_asked: function that returns whether this rank was asked to stop.
        most_skips: maximum number of consecutive steps that may be skipped because they are not finite.
        saver: saver that writes checkpoints while steps continue; None: there is none until `writes_with` sets one.

    Attributes:
        skipped: total number of steps that changed nothing.
        skipped_in_a_row: number of consecutive steps, up to the latest, that changed nothing.
        cause: cause of the latest skipped step; None if none was skipped.
        stop_requested: whether some rank was asked to stop; all ranks read this after the same step.
        saver: the saver; None: there is none.
        kept_step: step of the newest checkpoint that was written or begun, for messages; None: there is none.
    """

    def __init__(
        self,
        notes: FlightNotes,
        *,
        stop_asked: Callable[[], bool] = lambda: False,
        most_skips: int = 10,
        saver: Saver | None = None,
    ) -> None:
        self._notes, self.saver, self._most_skips = notes, saver, most_skips
        self.stop_asked = stop_asked
        self.skipped = self.skipped_in_a_row = 0
        self.cause: Cause | None = None
        self.stop_requested = False
        self.kept_step: int | None = None
        self._status = 0

    def begin(self, epoch: int, global_step: int) -> None:
        """Record in the flight record that the step after `global_step` steps begins; `epoch` counts from 0."""
        self._notes.step(epoch + 1, global_step + 1)

    def status_flag(self) -> int:
        """Return this rank's flag about a checkpoint that is being written, for a step's message (see `Saver.status_flag`)."""
        return 0 if self.saver is None else self.saver.status_flag()

    def take(self, totals: StepTotals) -> None:
        """Update the stop request and the checkpoint status from the sums of a step over all ranks."""
        self.stop_requested = self.stop_requested or totals.stop > 0
        self._status = max(self._status, totals.status)

    def end(self, cause: Cause | None, lr: float, drain: Callable[[], None]) -> bool:
        """End a step. Collective if ranks exchange the states of a checkpoint.

        Args:
            cause: cause of a step that was skipped; None if the step was not skipped.
            lr: learning rate of the step, for the message.
            drain: function that drains the replica, called before an exchange.

        Returns:
            Whether ranks exchanged the states of a checkpoint.

        Raises:
            DivergedError: more than `most_skips` consecutive steps were skipped; raised on every rank.
        """
        self._count(cause, lr)
        exchanges = self.saver is not None and self._status >= self.saver.size
        if self.saver is not None and exchanges:
            self._notes.phase(RunPhase.STATUS)
            drain()
            self.saver.exchange_status()
        self._status = 0
        return exchanges

    def restore(self, position: Position) -> None:
        """Set the numbers of skipped steps to those of a position from which training continues."""
        self.skipped, self.skipped_in_a_row, self.cause = position.skipped, position.skipped_in_a_row, None

    def writes_with(self, saver: Saver) -> None:
        """Set the saver, which may be created after the replica."""
        self.saver = saver

    def keeps(self, step: int) -> None:
        """Record that the newest checkpoint is that of `step`."""
        self.kept_step = step

    def position(self, global_step: int) -> Position:
        """Return the position after `global_step` steps, for a checkpoint."""
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
                f"{self.skipped_in_a_row} consecutive steps were not finite and were skipped. In the last one, step "
                f"{cause.step}, {cause}; lower optimizer.lr ({lr:g} in that step), check for damaged samples, or raise "
                "on_nonfinite.most.",
                ranks=cause.blamed,
            ).of_all_ranks()


def usable(optimizer: Optimizer, network: Network) -> Optimizer:
    """Return `optimizer` if it can update the arrays of the network.

    Raises:
        BackendError: the optimiser cannot access the arrays of the network, which are in device memory.
    """
    if not (optimizer.any_arrays or network.kernels.arithmetic.on_host):
        raise BackendError(
            f"The optimizer {type(optimizer).__name__} computes with NumPy, which cannot access arrays of backend "
            f"{network.kernels.name}; implement it with group.arithmetic and set any_arrays = True, or set backend to onednn or "
            "numpy."
        )
    return optimizer


def check_rounding(strategy: Strategy, network: Network) -> None:
    """Raise if a strategy rounds parameters that are in device memory; owners keep rounding errors in host memory only.

    Raises:
        BackendError: the strategy rounds parameters to 16 bits for messages, but the network's arrays are in device memory.
    """
    group, rounding = strategy.group, strategy.rounding
    if rounding is not None and rounding.parameters != "float32" and not group.on_host and group.ranks > 1:
        raise BackendError(
            f"wire_parameters is {rounding.parameters}, but backend {network.kernels.name} sends parameters unrounded; "
            "set wire_parameters to float32, or backend to onednn or numpy."
        )


def slices_of(averagers: Mapping[str, GradientAverager]) -> dict[str, list[int]]:
    """Return, for each parameter, the indices of the slices that contain it, counted over all schedules.

    The result is empty if each averager has one rank.
    """
    slices: dict[str, list[int]] = {}
    pieces = (piece for averager in averagers.values() if averager.comm.size > 1 for piece in _pieces(averager))
    for number, names in enumerate(pieces):
        for name in names:
            slices.setdefault(name, []).append(number)
    return slices


def _pieces(averager: GradientAverager) -> list[tuple[str, ...]]:
    """Return the parameters of each slice of a schedule. Without a schedule every parameter is a slice."""
    if averager.schedule is None:
        return [(name,) for name in averager.group.parameters]
    return [(*piece.parameters, *piece.replicated) for piece in averager.schedule.slices]


_NO_CHECKS = CheckCadence()
_log = logging.getLogger(__name__)
# After an overflow every rank raises one error; NumPy's warnings would only precede it.
_without_warnings = np.errstate(over="ignore", invalid="ignore", divide="ignore")

#: factory of the strategy of one parameter group, for example the class `Sharded`
StrategyFactory = Callable[[PlannedGroup], Strategy]


class Replica:
    """A rank's copy of a model, and the objects that train it.

    Construction is not collective. `agree` and all methods that train are. Before `agree` a replica has no averagers and can only
    evaluate. A step returns while its sums are in flight; the next step or a call to `settle` reads them.

    Args:
        network: this rank's part of the model (see `rank_graph.make_network`).
        groups: communicators of this rank on the grid.
        progress: progress engine of the process; if it has a tracer, steps are recorded.
        strategy: factory of the averaging strategy of each parameter group; None: the replica only evaluates.
        optimizer: factory of an unbound optimiser.
        nominal_batch: samples of a usual step over all ranks, from which strategies may derive their plan; None: unknown.
        micro_batches: number of passes over the samples of a step.
        exact_shards: number of shards of a step, whose sums have a fixed order on any number of ranks; a rank computes its shards
            in at most `micro_batches` passes. None: the order depends on the ranks.
        checks: cadence of the checks of values that ranks hold alike and of values that only one rank holds; default: none. With
            checks, call `parameters_written` after modifying parameters or optimiser state outside `step` and `load`.
        skips: True: a step that is not finite on some rank is undone on every rank, and `update` returns its cause. False: such a
            step ends the training.
        ema: rule for an average of the weights, which owners keep and which is evaluated as well; None: no average.
        loop: state of the loop that calls `step`; default: one without stop requests and checkpoints.

    Attributes:
        averagers: averagers by parameter group; empty before `agree`.
        shards: conversion between split parameters and whole arrays.
        passes: passes over a rank's samples.
        settings: settings of the optimisers before they were bound.
        distribution: this rank's part of the model if ranks share samples; None otherwise.
        tiles: tiles of the images that this rank reads if ranks share samples; None: it reads whole images.
        average: average of the weights; None without `ema` and before `agree`.
        global_step, lr: number of steps done, and learning rate of the last one.
        watch: comparison of values between ranks; None without checks and before `agree`.

    Raises:
        ConfigError: a strategy does not support the configuration.
        BackendError: the arrays of the network are in device memory, which the optimiser cannot access or whose parameters the
            strategy rounds.
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
            groups = groups.local_where_alone()  # groups of one rank need no copies to the host
        self.network, self.groups, self.progress = network, groups, progress
        self.loop = LoopState(progress.notes) if loop is None else loop
        self.distribution = network.distribution if isinstance(network.distribution, GridDistribution) else None
        self.tiles = None if self.distribution is None else self.distribution.tiles_by_counts(network.graph)
        self._optimizers: dict[str, GuardedOptimizer] = {}
        if strategy is not None and optimizer is not None:
            for name in network.groups:
                self._optimizers[name] = GuardedOptimizer(with_ema(usable(optimizer(), network), ema), progress)
        self.settings = {name: value for one in self._optimizers.values() for name, value in one.settings().items()}
        self.passes = Passes.of(micro_batches, exact_shards, network, groups)
        self.strategies: dict[str, Strategy] = {}
        if strategy is not None:
            for name, unbound in self._optimizers.items():
                group = PlannedGroup(
                    network.groups[name],
                    groups.gradients[name].size,
                    groups.nodes[name],
                    nominal_batch,
                    self.passes.micro_batches,
                    norms_needed=unbound.norms_needed,
                    several_groups=MODEL in network.groups,
                    momentum=unbound.momentum,
                    names=network.trained,
                    on_host=network.kernels.arithmetic.on_host,
                    shards=self.passes.shards,
                )
                self.strategies[name] = strategy(group)
                check_rounding(self.strategies[name], network)
        self._checks, self._skips, self._ema = checks, skips, ema
        self._nominal_batch, self._checked = nominal_batch, set[tuple[int, ImageShape | None]]()
        self.watch: WeightWatch | None = None
        self.averagers: Mapping[str, GradientAverager] = {}
        self.shards = Shards(network, groups.shard_holders, progress)
        self.average: WeightAverage | None = None
        self._agreed, self._facts = agreed_checksums(groups), dict[str, object]()
        shards, statistics = self.passes.among(groups.messages), network.statistics.size
        self._reduction = StepReduction(groups.messages, progress, statistics, shards, checks=self._agreed.size)
        self._guard: StepGuard | None = None
        self._step = self._training_step()
        self.global_step, self.lr, self._current_lr, self._finite_at_step = 0, 0.0, 0.0, -1

    def agree(self, stored: Mapping[str, CollectiveSchedule] | None = None, transport: Transport = "staged") -> None:
        """Create the averagers, and agree on the operations that each posts in a step.

        Collective. Call it once, before any other collective method except `evaluate`.

        Args:
            stored: schedules of an earlier run, by parameter group; used if they fit.
            transport: transport of arrays in device memory between ranks.

        Raises:
            CollectiveMismatchError: the schedules of the ranks differ.
        """
        self._reduction.agree()
        network, groups, strategies = self.network, self.groups, self.strategies
        norms = shared = None
        if MODEL in network.groups and any(optimizer.needs_norms for optimizer in self._optimizers.values()):
            norms = JointNorms(groups.norms, self.progress, tuple(network.groups.values()))
        if MODEL in network.groups and strategies:
            one_of_them = next(iter(strategies.values()))  # the options of all strategies are equal
            shared = one_of_them.shared(groups.norms, self.progress, len(strategies))
        # NCCL serves a single group, preferably the one identical on all ranks. With two groups there are two queues, and each
        # starts updates and gathers when it sees its sums complete. This moment differs between ranks. The operations of both
        # groups could then be enqueued in a different order on each rank, and the ranks would deadlock.
        by_nccl = ALL if ALL in network.groups else MODEL
        averagers: dict[str, GradientAverager] = {}
        for name, strategy in strategies.items():
            group, comm = network.groups[name], groups.gradients[name]
            gradients, watched = self.passes.gradients(group, comm), self._checks.every_steps > 0
            group_transport: Transport = "staged" if transport == "nccl" and name != by_nccl else transport
            optimizer = self._optimizers[name]
            setup = AveragerSetup(group, optimizer, comm, self.progress, norms, shared, group_transport, gradients, watched)
            averagers[name] = make_averager(strategy, setup, (stored or {}).get(name))
        self.averagers = averagers
        self.network.set_slices(slices_of(averagers))
        if self._ema is not None and averagers:
            self.average = WeightAverage(self.network, averagers, self._ema)
        if self._checks.every_steps and averagers:
            self.watch = WeightWatch(self.network, averagers, self._optimizers, self.average, self.groups, self._checks)
        self._step = self._training_step()
        if self._skips:
            self._guard = StepGuard(averagers, self.groups.messages, self.progress, self._step.finiteness, self.watch)

    def _training_step(self) -> TrainingStep:
        passes, counts_of, check = self.passes, self.groups.counts_of, not self._skips
        return TrainingStep(
            self.network, self.averagers, self.progress, self._reduction, passes, counts_of, watch=self.watch, checks_finite=check
        )

    @property
    def place(self) -> LoaderRank:
        """Keywords of a loader that yields this rank's batches."""
        ranks, size, shards = self.groups.all_ranks.size, self.groups.split_size, self.passes.shards
        return LoaderRank(rank=self.groups.position, ranks=ranks, split_size=size, tiles=self.tiles, shards=shards)

    def step(self, batch: Batch, lr: float) -> StepTotals | None:
        """Do one update. Collective.

        Args:
            batch: this rank's share of the step; empty if this rank has no samples.

        Returns:
            The sums of the previous step over all ranks; None in the first step, or if `settle` has returned them.

        Raises:
            ConfigError: an argument has another type, a batch norm has a single value per channel, or the shards require another
                distribution of the samples over the ranks.
            DivergedError: a loss, parameter, gradient or statistic of the previous step is not finite, or too many consecutive
                steps were skipped; raised on every rank.
            CorruptedStateError: `lr`, the optimiser or the number of samples of the previous step differs between ranks, or, with
                checks, other values that ranks must hold alike; raised on every rank.
        """
        if type(batch) is not Batch or type(lr) is not float:  # reading annotations takes longer than this comparison
            check_types(Replica.step, {"batch": batch, "lr": lr})
        self.loop.begin(batch.epoch, self.global_step)
        if self._nominal_batch is not None and (batch.global_count, batch.image_shape) not in self._checked:
            self._checked.add((batch.global_count, batch.image_shape))
            _check_statistics(self, batch, self._nominal_batch)
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
        """Do the first part of a step, its update. Call `settle` and `post` next, in this order. Collective.

        Returns:
            The cause if the step was undone, else None. Only a replica that skips non-finite steps undoes them. The sums of an
            undone step are zero, including its number of samples.
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
        """Wait for the sums in flight, if any, and blend their batch statistics into the running ones. Collective.

        Returns:
            The sums of the latest step over all ranks; None if none are in flight.

        Raises:
            DivergedError, CorruptedStateError: see `step`.
        """
        totals = self._reduction.read()
        if totals is None:
            return None
        if totals.non_finite or not self._agreed.agree(totals.checks):
            self.drain()
            name = f"other values in step {self.global_step}"
            advice = "make lr, the optimizer and the batches the same on all ranks"
            compare(self.groups.messages, Subject(name, advice, self._facts, error=CorruptedStateError))
            self._raise_diverged()
            if self.watch is not None:
                self._raise_corrupted()  # all values are finite, so checksums differ
        self.loop.take(totals)
        blend = self.network.statistics.blend if self.average is None else self.average.blend
        write = partial(blend, totals.statistics, totals.count)
        write() if self.watch is None else self.watch.statistics.write(write)
        return totals

    def post(self, *, stop: bool = False, status: int = 0) -> None:
        """Do the last part of a step: send its sums without waiting. Collective.

        Args:
            stop: whether this rank was asked to stop; all ranks read the number of such ranks.
            status: flag about a checkpoint; all ranks read the sum.
        """
        self._facts = self.settings | self._step.facts
        facts = zlib.crc32(repr(self._facts).encode()) if self.groups.messages.size > 1 else 0
        checks = self._agreed.numbers([facts, 0], found=False) if self.watch is None else self.watch.message(facts)
        self._reduction.post(stop=stop, status=status, checks=checks)
        self.global_step += 1
        self.lr = self._current_lr

    @_without_warnings
    def drain(self) -> None:
        """Complete all operations of the steps so far, on every rank. Collective."""
        for averager in self.averagers.values():
            averager.drain()

    @_without_warnings
    def require_finite(self) -> None:
        """Drain, and check the parameters after the last step, before they are evaluated or saved. Collective.

        Raises:
            DivergedError, CorruptedStateError: see `step`.
        """
        self.drain()
        if self.averagers and self._finite_at_step != self.global_step:
            statistics = self.network.statistics
            check = self._step.finiteness.begin()
            self._step.finiteness.end(self.global_step, check, statistics=statistics.not_finite(statistics.running))
            self._raise_diverged()
            self._finite_at_step = self.global_step

    def require_alike(self, *, schedules: bool = False) -> None:
        """Drain, and compare all values that ranks must hold alike, if checks are on. Collective; call it after `settle`.

        Args:
            schedules: whether to compare the schedules of the averagers as well.

        Raises:
            CorruptedStateError: values differ, or have changed without a write; raised on every rank.
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
        """Evaluate each sample of a data set once, with running statistics, and return the sums over all ranks. Collective.

        The sums of the last step are discarded; call `settle` first to receive them.

        Args:
            mirrored: same samples, mirrored (see `evaluation.evaluate`).
            confusion: counts of the pass with the weights themselves (see `evaluated_with`).
            advance: callback, called with the number of samples done.

        Raises:
            ConfigError: `loader` or `mirrored` is not a loader.
            DivergedError, CorruptedStateError: see `step`.
        """
        for name, source in {"loader": loader, "mirrored": mirrored or loader}.items():
            if not (hasattr(source, "epoch") and hasattr(source, "sampler")):
                raise ConfigError(f"{name} is {shortened(source)}, but must be a loader; use the result of job.loader.")
        self.settle()
        self.require_finite()
        self.network.parameters_changed()
        comm = self.groups.all_ranks
        run = partial(evaluate, self.network, loader, comm, self.progress, mirrored=mirrored, shards=self.passes.among(comm))
        return evaluated_with(self.average, run, confusion, advance)

    def state(self, position: Position, meta: Mapping[str, Any], *, keep: bool = True, copied: bool = False) -> CheckpointContent:
        """Return whole parameters, running statistics and optimiser state. Collective; call it after `drain`.

        Args:
            keep: False on ranks that do not write the content; their content has no tensors.
            copied: whether all tensors are copies, so that training may continue while the content is being written.
        """
        network, averagers = self.network, self.averagers
        return snapshot.take(network, averagers, self.shards, position, meta, average=self.average, keep=keep, copied=copied)

    def own_parts(self, position: Position, meta: Mapping[str, Any]) -> tuple[dict[str, Part], dict[str, Any]]:
        """Return copies of this rank's parts of `state`, for a checkpoint that all ranks write, and all metadata. Collective."""
        parts = snapshot.take_parts(self.network, self.averagers, self.shards, self.groups, self.average)
        return parts, snapshot.full_meta(self.averagers, position, meta)

    def load(self, content: CheckpointContent) -> Position:
        """Restore the result of `state` on any grid, also after `DivergedError`, and return its position. Not collective.

        Raises:
            CheckpointError: a tensor is missing, has another shape or dtype, or is not part of this replica's state.
        """
        position = snapshot.put(content, self.network, self.averagers, self.shards, self.average)
        self._step.finiteness.forget()
        self._finite_at_step = -1
        if self.watch is not None:
            self.watch.remember()
        self.loop.restore(position)
        self.global_step = position.global_step
        return position

    def parameters_written(self) -> None:
        """Announce changes of parameters or optimiser state outside `step` and `load`.

        Call it after `drain`, with the same changes on all ranks.
        """
        self.network.parameters_changed()
        if self.average is not None:
            self.average.weights_changed()
        if self.watch is not None:
            self.watch.remember()

    def load_weights(self, content: CheckpointContent, *, averaged: bool = False) -> None:
        """Restore parameters and running statistics only, to evaluate or to start from trained weights. Not collective.

        Args:
            averaged: whether to restore the averages of a training with `ema` in place of its latest weights.

        Raises:
            CheckpointError: the tensors belong to another model, or averages were requested and there are none.
        """
        snapshot.put_weights(content, self.network, self.shards, averaged=averaged)
        self.parameters_written()

    def _raise_diverged(self) -> None:
        """Raise the same error on all ranks if any rank has found non-finite values. Collective; call it after `drain`."""
        advice = f"lower optimizer.lr ({self.lr:g} in that step), warm up longer, or set optimizer.clip_norm."
        error = self._step.finiteness.error(self._reduction.gather, advice)
        if error is not None:
            if self.watch is not None and self.watch.explains(self._reduction.gather(self._step.finiteness.finding)):
                self._raise_corrupted()  # a NaN in the memory of one rank spreads to all ranks within a step
            raise error.of_all_ranks()

    def _raise_corrupted(self) -> None:
        """Raise the same error on all ranks for the differences that the watch has found. Collective; call it after `drain`."""
        assert self.watch is not None
        raise self.watch.error(self.loop.kept_step).of_all_ranks()


def _check_statistics(replica: Replica, batch: Batch, nominal_batch: int) -> None:
    """Raise if a batch norm has a single value per channel in a step of this size; only warn if the step is smaller than usual.

    Raises:
        ConfigError: a batch norm has a single value; raised on every rank.
    """
    groups, distribution, passes = replica.groups, replica.distribution, replica.passes
    plan = ParallelPlan(cols=groups.all_ranks.size) if distribution is None else distribution.plan
    sharing = StatisticsSharing(plan, passes.micro_batches, passes.shards)
    single = sharing.single([replica.network.graph(1, batch.image_shape)], batch.global_count)
    if single is not None:
        sentence = f"{single.sentence('steps of ' + counted(batch.global_count, 'image'))}; {single.fix}."
        if batch.global_count >= nominal_batch:
            raise ConfigError(sentence).of_all_ranks()
        _log.warning(sentence)
