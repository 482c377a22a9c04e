"""The checkpoints of a run: what goes into one, who writes which part of it, and when the next one may begin."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import user_code
from hpctrain.config.dump import dump
from hpctrain.errors import CheckpointError
from hpctrain.experiment import automatic, collective_schedules
from hpctrain.experiment.build import Parts
from hpctrain.experiment.grid import describe, parallel_plan
from hpctrain.experiment.session import Session
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.leftovers import remove_left
from hpctrain.storage.run_directory import RunDirectory
from hpctrain.storage.shard_file import ShardFacts, write_shard
from hpctrain.storage.sharded_checkpoint import publish, unfinished
from hpctrain.train.metrics import Reporter
from hpctrain.train.saving import Saver, Writing
from hpctrain.train.snapshot import Position

#: of parameters, from which on several nodes write a checkpoint together. The optimiser's state comes on top: with momentum a
#: quarter of a gigabyte, which one rank takes about a second to gather, and to write some more
_LARGE_BYTES = 1 << 27


class RunCheckpoints:
    """Writes the checkpoints of a run into its directory. `save` and `saver.finish` are collective."""

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
        self.last: Path | None = None

    def save(self, position: Position) -> None:
        """Write a checkpoint, or begin to, where the configuration says so. Collective.

        Raises:
            CheckpointError: it cannot be written.
        """
        step = position.global_step
        if not self.saver.ready(step):
            return
        sharded = is_sharded(self._session, self._parts)
        self.last = checkpoint.checkpoint_path(self._directory.checkpoints, step, sharded=sharded)
        self.saver.begin((self._sharded if sharded else self._single)(position, self.last))

    def _single(self, position: Position, path: Path) -> Writing:
        """One file, of rank 0."""
        config, is_root = self._session.config.checkpoint, self._session.is_root
        content = self._parts.replica.state(position, self._meta(position), keep=is_root, copied=config.asynchronous)
        return Writing(position.global_step, path, (lambda: _write(path, content, config.keep)) if is_root else None)

    def _sharded(self, position: Position, path: Path) -> Writing:
        """A shard of each rank, and rank 0's manifest once all of them are there."""
        session, keep = self._session, self._session.config.checkpoint.keep
        rank = session.world.rank
        partial = unfinished(path, session.world.broadcast_object(secrets.token_hex(4)))
        parts, meta = self._parts.replica.own_parts(position, self._meta(position))

        def own() -> ShardFacts:
            if session.is_root:
                remove_left(path.parent, partial)
            return write_shard(partial, rank, parts)

        def publish_all(shards: Sequence[ShardFacts]) -> None:
            if partial.exists():  # not where it was published, but old ones could not be deleted
                publish(partial, path, shards, meta)
            prune(path.parent, keep)

        return Writing(position.global_step, path, own, publish_all)

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
            "ranks": session.world.size,
            "grid": describe(parallel_plan(session.config, session.grid.cols)),
            **collective_schedules.keep(session, parts, self._directory),
        }
        if session.resolved.choice is not None:
            meta[automatic.META] = session.resolved.choice.to_meta()
        if digests := user_code.digests():
            meta["code"] = digests
        return meta


def is_sharded(session: Session, parts: Parts) -> bool:
    """Whether the checkpoints of a run have a shard of each rank; the same on all ranks."""
    layout = session.config.checkpoint.layout
    if layout != "auto":
        return layout == "sharded"
    network = parts.replica.network
    count = sum(math.prod(spec.shape) for spec in network.parameter_specs.values())
    return max(session.grid.node_of) > 0 and count * np.dtype(network.parameter_dtype).itemsize >= _LARGE_BYTES


def _write(path: Path, content: CheckpointContent, keep: int) -> None:
    checkpoint.write(path, content)
    prune(path.parent, keep)


def prune(directory: Path, keep: int) -> None:
    """Delete old checkpoints.

    Raises:
        CheckpointError: they cannot be deleted.
    """
    try:
        checkpoint.prune(directory, keep)
    except OSError as error:
        raise CheckpointError(f"Old checkpoints in {directory} cannot be deleted ({error.strerror}); allow it.") from error
