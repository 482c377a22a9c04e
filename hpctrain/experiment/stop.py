"""A run that a signal or its time ended: who was asked by which, and what a user is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.base import Communicator
from hpctrain.launch.exit_codes import STOPPED
from hpctrain.launch.signals import SignalWatch
from hpctrain.rank_spans import spans
from hpctrain.storage.checkpoint import checkpoints
from hpctrain.runs.directory import RunDirectory
from hpctrain.train.trainer import Outcome


@dataclass(frozen=True)
class StopReason:
    """The signal or the limit that ended a run. ranks: that a signal reached, where not all; others may have had another."""

    name: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name + (f" on {'rank' if len(self.ranks) == 1 else 'ranks'} {spans(self.ranks)}" if self.ranks else "")


def stop_reason(world: Communicator, watch: SignalWatch, limit: str | None = None) -> StopReason | None:
    """The signal of the lowest rank that has had one, else the limit of the lowest that has one; None where no rank has either.

    Collective, at the end of a run.

    Args:
        limit: the name of a limit that has asked this rank to end.
    """
    reasons = world.allgather_object((watch.request.name if watch.request is not None else None, limit))
    names, limits = [name for name, _ in reasons], [name for _, name in reasons]
    first = next((name for name in names if name is not None), None)
    if first is None:
        reached = next((name for name in limits if name is not None), None)
        return None if reached is None else StopReason(reached)
    ranks = tuple(rank for rank, name in enumerate(names) if name == first)
    return StopReason(first, ranks if len(ranks) < len(names) else ())


def stop_lines(reason: StopReason, outcome: Outcome, epochs: int, directory: Path, checkpoint: Path) -> list[str]:
    """How the run ended and how to go on."""
    position = outcome.position
    return [
        f"stopped by {reason} after step {position.global_step}, in epoch {min(position.epoch + 1, epochs)} of {epochs}",
        f"checkpoint {checkpoint}",
        f"go on with the same command and --resume {directory} (exit code {STOPPED})",
    ]


def kept_clause(directory: RunDirectory) -> str:
    """The end of a sentence on a run that ends at once: the checkpoint to go on from, by names alone."""
    try:
        written = checkpoints(directory.checkpoints)
    except OSError:
        return ""
    return f"; the newest one on the disk is {written[-1][1]}" if written else "; there is none of this run on the disk"
