"""The account of a run's steps at its end: how long they took on all ranks, and how much of that waited for messages."""

from __future__ import annotations

from statistics import fmean

from hpctrain.comm.base import Communicator
from hpctrain.train.step_times import MeasuredStep

#: fewer tell nothing
FEWEST_STEPS = 14


def over_ranks(world: Communicator, mine: MeasuredStep | None) -> MeasuredStep | None:
    """The slowest rank's step and the mean of the ranks' exposed time; None after too few steps. Collective over the world."""
    measured = [one for one in world.allgather_object(mine) if one is not None]
    if len(measured) < world.size or min(one.steps for one in measured) < FEWEST_STEPS:
        return None
    return MeasuredStep(
        max(one.seconds for one in measured), fmean(one.exposed_seconds for one in measured), min(one.steps for one in measured)
    )


def line(measured: MeasuredStep) -> str:
    """The account in one line."""
    return f"measured {measured.seconds:.3g} s a step, of which {measured.exposed_seconds:.3g} s waited for messages"


def facts(measured: MeasuredStep, step: int) -> dict[str, object]:
    """For the metrics. step: of the run's end."""
    return {
        "step": step,
        "steps": measured.steps,
        "measured_step_seconds": measured.seconds,
        "measured_exposed_seconds": measured.exposed_seconds,
    }
