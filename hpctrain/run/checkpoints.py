"""The checkpoints of a run: what goes into one, who writes which part of it, and when the next one may begin."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core import user_code
from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.config.dump import dump
from hpctrain.data.facts import ImageForm
from hpctrain.run import reproducibility
from hpctrain.experiment import exact_promise
from hpctrain.job.automatic_choice import META
from hpctrain.experiment.best_checkpoint import BestCheckpoint
from hpctrain.run.build import Parts
from hpctrain.config.grid import describe, parallel_plan
from hpctrain.run.images import EVALUATION_IMAGES
from hpctrain.run.resume import Start
from hpctrain.job.session import Session
from hpctrain.storage import checkpoint
from hpctrain.storage.leftovers import remove_left
from hpctrain.runs.directory import RunDirectory, require_owned, restore, small_files
from hpctrain.storage.run_marker import marker_of
from hpctrain.storage.shards import ShardFacts, write_shard
from hpctrain.storage.sharded_checkpoint import publish, unfinished
from hpctrain.train.metrics_rest import Reporter, RunningSums
from hpctrain.train.replica import Replica
from hpctrain.train.saving import Saver, Writing
from hpctrain.train.snapshot import Position

#: of parameters, from which on several nodes write a checkpoint together. The optimiser's state comes on top: with momentum a
#: quarter of a gigabyte, which one rank takes about a second to gather, and to write some more
_LARGE_BYTES = 1 << 27


def _nothing() -> None:
    return None


class RunCheckpoints:
    """Writes the checkpoints of a run into its directory, and keeps the best. All methods but `evaluated` are collective.

    Attributes:
        saver: writes them. best: on the rank that writes files; None on others. last: that was begun last.
    """

    def __init__(self, session: Session, parts: Parts, directory: RunDirectory, reporter: Reporter) -> None:
        config = session.config
        self._session, self._parts, self._directory = session, parts, directory
        self.saver = Saver(
            session.world,
            session.progress.notes,
            reporter,
            asynchronous=config.checkpoint.asynchronous,
            deadline_seconds=config.deadline_seconds,
        )
        self.best = BestCheckpoint(directory.checkpoints, config.checkpoint, reporter) if session.is_root else None
        self.last: Path | None = None
        self._sequence, self._identity = 0, None if (marker := marker_of(directory.path)) is None else marker.identity
        self._files = small_files(directory) if session.is_root else {}

    def go_on(self, start: Start, changed: Collection[str] = ()) -> None:
        """Take what is known of earlier checkpoints from the one that the run goes on from. changed: keys, since then."""
        best, complete = self.best, start.position.samples == self._parts.loader.sampler.samples

        def take() -> None:
            if best is not None:
                best.go_on(start.path, start.content.meta, changed, evaluates=complete)

        raise_on_all_ranks(self._session.world, take)

    def evaluated(self, position: Position, sums: RunningSums) -> None:
        """Take note of an evaluation, by which checkpoints are kept."""
        if self.best is not None:
            self.best.evaluated(position, sums)

    def finish(self) -> None:
        """Wait for the last checkpoint, and delete old ones for the last time.

        Raises:
            CheckpointError: it cannot be written, or they cannot be deleted.
        """
        self.saver.finish()
        raise_on_all_ranks(self._session.world, _nothing if self.best is None else self.best.settle)

    def save(self, position: Position) -> None:
        """Write a checkpoint, or begin to, where the configuration says so. Collective.

        Raises:
            CheckpointError: it cannot be written.
        """
        step = position.global_step
        if not self.saver.ready(step):
            return
        config, world, replica = self._session.config.checkpoint, self._session.world, self._parts.replica
        sharded = is_sharded(self._session, self._parts)
        self.last = checkpoint.checkpoint_path(self._directory.checkpoints, step, sharded=sharded)
        retain, meta = self._retention(step), self._meta(position)
        if sharded:
            self.saver.begin(shards(world, replica, position, meta, self.last, retain, self._prepare))
        else:
            copied = config.asynchronous
            self.saver.begin(one_file(world, replica, position, meta, self.last, retain, self._prepare, copied=copied))

    def _prepare(self) -> None:
        """Raise unless the run is still this job's, and restore its small files, without which `--resume` would not find it.

        Called on rank 0 before it writes.
        """
        require_owned(self._directory)
        restore(self._directory, self._files)

    def _retention(self, step: int) -> Callable[[], None]:
        return _nothing if self.best is None else self.best.retention(step)

    def _meta(self, position: Position) -> dict[str, Any]:
        """The metadata of a checkpoint. Collective."""
        session, parts = self._session, self._parts
        meta: dict[str, Any] = {
            "epoch": position.epoch,
            "samples": position.samples,
            "global_step": position.global_step,
            "seed": session.config.seed,
            "config": dump(session.config),
            "data": parts.data.to_meta(),
            **({} if parts.test_loader is None else {EVALUATION_IMAGES: ImageForm.of(parts.test_loader.file).to_meta()}),
            "ranks": session.world.size,
            "grid": describe(parallel_plan(session.config, session.grid.cols)),
            **reproducibility.keep(session, parts, self._directory),
        }
        if session.config.exact.shards is not None:
            meta[exact_promise.META] = exact_promise.promise(parts.replica.network.kernels, session.threads)
        if self.best is not None:
            meta |= self.best.to_meta(position.global_step)
            meta |= self._place()
        if session.resolved.choice is not None:
            meta[META] = session.resolved.choice.to_meta()
        if digests := user_code.digests():
            meta["code"] = digests
        return meta

    def _place(self) -> dict[str, Any]:
        """Return the next checkpoint's sequence number and the identity of its run, as metadata. Only on the writing rank."""
        self._sequence = max(1 + self._sequence, checkpoint.next_sequence(self._directory.checkpoints))
        marker = marker_of(self._directory.path)
        self._identity = self._identity if marker is None else marker.identity
        return {checkpoint.SEQUENCE: self._sequence, **({} if self._identity is None else {checkpoint.RUN: self._identity})}


def is_sharded(session: Session, parts: Parts) -> bool:
    """Whether the checkpoints of a run have a shard of each rank; the same on all ranks."""
    layout = session.config.checkpoint.layout
    if layout != "auto":
        return layout == "sharded"
    network = parts.replica.network
    count = sum(math.prod(spec.shape) for spec in network.parameter_specs.values())
    return max(session.grid.node_of) > 0 and count * np.dtype(network.parameter_dtype).itemsize >= _LARGE_BYTES


def one_file(
    world: Communicator,
    replica: Replica,
    position: Position,
    meta: Mapping[str, Any],
    path: Path,
    written: Callable[[], None] = _nothing,
    prepare: Callable[[], None] = _nothing,
    *,
    copied: bool,
) -> Writing:
    """A checkpoint that is one file, of rank 0. Collective; after `drain`.

    Args:
        meta: additional metadata. written: called on rank 0 after the checkpoint is written. prepare: called on rank 0 before.
        copied: training may go on while it is being written.
    """
    is_root = world.rank == 0
    content = replica.state(position, meta, keep=is_root, copied=copied)

    def write() -> None:
        prepare()
        checkpoint.write(path, content)
        written()

    return Writing(position.global_step, path, write if is_root else None)


def shards(
    world: Communicator,
    replica: Replica,
    position: Position,
    meta: Mapping[str, Any],
    path: Path,
    written: Callable[[], None] = _nothing,
    prepare: Callable[[], None] = _nothing,
) -> Writing:
    """A checkpoint that is a directory: a shard of each rank, and rank 0's manifest once all of them are there. Collective.

    Args:
        meta, written, prepare: as for `one_file`.
    """
    rank = world.rank
    growing: Path = world.broadcast_object(unfinished(path, secrets.token_hex(4)))
    parts, whole_meta = replica.own_parts(position, meta)

    def own() -> ShardFacts:
        if rank == 0:
            prepare()
            remove_left(path.parent, growing, of=path)
        return write_shard(growing, rank, parts)

    def publish_all(facts: Sequence[ShardFacts]) -> None:
        prepare()
        if not path.exists() or growing.exists():  # else it was published before, and only deleting old ones failed
            publish(growing, path, facts, whole_meta)
        written()

    return Writing(position.global_step, path, own, publish_all)
