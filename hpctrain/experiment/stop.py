"""A run that a signal ended: who was asked by which, and what a user is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.base import Communicator
from hpctrain.launch.exit_codes import STOPPED
from hpctrain.launch.signals import SignalWatch
from hpctrain.train.trainer import Outcome


@dataclass(frozen=True)
class StopReason:
    """The signal that ended a run. ranks: those that it reached, where it did not reach all; others may have had another one."""

    signal: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.signal + (f" on {'rank' if len(self.ranks) == 1 else 'ranks'} {_spans(self.ranks)}" if self.ranks else "")


def stop_reason(world: Communicator, watch: SignalWatch) -> StopReason | None:
    """The signal of the lowest rank that has had one; None where no rank has. Collective, at the end of a run."""
    names = world.allgather_object(watch.request.name if watch.request is not None else None)
    first = next((name for name in names if name is not None), None)
    if first is None:
        return None
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


def _spans(ranks: tuple[int, ...]) -> str:
    """Ranks as people write them: (0, 1, 2, 5) -> "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
