"""Checkpoints of a loop that is the program's own: written where it says, at once or while its steps go on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.core.errors import CheckpointError, DivergedError
from hpctrain.experiment.checkpoint_search import read_together
from hpctrain.run.checkpoints import one_file, shards
from hpctrain.flight.notes import FlightNotes
from hpctrain.log import get_logger
from hpctrain.storage import checkpoint
from hpctrain.storage.sharded_tensors import ShardedTensors
from hpctrain.train.metrics_rest import Reporter
from hpctrain.train.own_loop import BETWEEN
from hpctrain.train.replica import Replica
from hpctrain.train.saving import Saver

_log = get_logger(__name__)


class _Log(Reporter):
    """Tells of checkpoints in the log of rank 0."""

    def say(self, text: str) -> None:
        _log.info(text)


class LoopCheckpoints:
    """Writes and reads the checkpoints of a program. Every method is collective.

    Args:
        world: of all ranks. notes: for the flight record.
        deadline_seconds: that the end of the program waits for a checkpoint in the background.

    Attributes:
        saver: of checkpoints in the background, whose news travel with steps.
    """

    def __init__(self, world: Communicator, notes: FlightNotes, deadline_seconds: float) -> None:
        self._world, self._notes = world, notes
        self.saver = Saver(world, notes, _Log(), asynchronous=True, deadline_seconds=deadline_seconds)
        self._at_once = Saver(world, notes, _Log(), asynchronous=False, deadline_seconds=deadline_seconds)

    def save(self, replica: Replica, path: Path, notes: Mapping[str, Any], *, background: bool) -> None:
        """Write a checkpoint, or begin to; a path that ends with .shards is a directory with a shard of each rank.

        Raises:
            CheckpointError: it cannot be written; in the background that is told, and raised by `finish`.
            DivergedError, CorruptedStateError: it would hold what is not finite, or what ranks do not hold alike.
        """
        replica.settle()
        replica.require_finite()
        replica.require_alike()
        self._notes.phase("a checkpoint")
        position, meta = replica.loop.position(replica.global_step), {"notes": notes}
        saver = self.saver if background else self._at_once
        if not background:
            self.saver.finish()  # one writes in a directory at a time
        if saver.ready(replica.global_step):
            if checkpoint.is_sharded(path):
                saver.begin(shards(self._world, replica, position, meta, path))
            else:
                saver.begin(one_file(self._world, replica, position, meta, path, copied=background))
            replica.kept_step = replica.global_step
        self._notes.phase(BETWEEN)

    def load(self, replica: Replica, path: Path) -> Mapping[str, Any]:
        """Restore what `save` wrote; give its notes.

        Raises:
            CheckpointError: it is missing or damaged, or another model's or optimiser's.
        """
        with contextlib.suppress(DivergedError):  # what it tells of is what the checkpoint takes the place of
            replica.settle()
        replica.drain()
        self._notes.phase("a checkpoint")
        self.saver.settle()
        content = read_together(self._world, path)
        raise_on_all_ranks(self._world, partial(replica.load, content))
        if isinstance(content.tensors, ShardedTensors):
            content.tensors.close()
        replica.kept_step = replica.global_step
        replica.require_alike(schedules=True)
        self._notes.phase(BETWEEN)
        notes: Mapping[str, Any] = content.meta.get("notes", {})  # type: ignore[assignment]
        return notes

    def finish(self) -> None:
        """Wait for the checkpoint in the background, if any.

        Raises:
            CheckpointError: it is not there, on every rank.
        """
        self._notes.phase("a checkpoint")
        self.saver.finish()
        self._notes.phase(BETWEEN)

    def finish_after_error(self) -> None:
        """The same after an error that all ranks have raised; what cannot be written is not told any more."""
        with contextlib.suppress(CheckpointError):
            self.finish()
