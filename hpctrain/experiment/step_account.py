"""The account of a run's steps at its end: how long they took on all ranks, what waited for messages, and what was predicted."""

from __future__ import annotations

from statistics import fmean

from hpctrain.comm.base import Communicator
from hpctrain.job.automatic_choice import PredictedStep
from hpctrain.train.progress_text import folded
from hpctrain.train.accounts import MeasuredStep

#: fewer tell nothing
FEWEST_STEPS = 14


def over_ranks(world: Communicator, mine: MeasuredStep | None) -> MeasuredStep | None:
    """The slowest rank's step, and the means of the ranks' exposed time and of their time for messages; None after too few steps.

    Collective over the world.
    """
    measured = [one for one in world.allgather_object(mine) if one is not None]
    if len(measured) < world.size or min(one.steps for one in measured) < FEWEST_STEPS:
        return None
    return MeasuredStep(
        max(one.seconds for one in measured),
        fmean(one.exposed_seconds for one in measured),
        min(one.steps for one in measured),
        fmean(one.messages_seconds for one in measured),
    )


def accuracy(predicted_seconds: float, measured_seconds: float) -> float:
    """1 - |predicted - measured| / measured; 1 is exact, 0 and less is far off."""
    return 1 - abs(predicted_seconds - measured_seconds) / measured_seconds


def lines(measured: MeasuredStep, predicted: PredictedStep | None = None, reason: str = "") -> list[str]:
    """The account, in as many lines as it takes. reason: why there is no prediction."""
    if predicted is None:
        why = [f"no prediction: {reason}"] if reason else []
        waits = f"measured {measured.seconds:.3g} s a step, of which {measured.exposed_seconds:.3g} s waited for messages"
        return folded([waits, f"posting and progress took {measured.messages_seconds:.2g} s", *why])
    return folded(
        [
            f"predicted {predicted.seconds:.3g} s a step, measured {measured.seconds:.3g} "
            f"({accuracy(predicted.seconds, measured.seconds):.0%})",
            f"exposed {predicted.exposed_seconds:.3g} against {measured.exposed_seconds:.3g}",
            f"posting and progress took {measured.messages_seconds:.2g} s",
        ]
    )


def facts(measured: MeasuredStep, step: int, predicted: PredictedStep | None = None) -> dict[str, object]:
    """For the metrics. step: of the run's end."""
    account: dict[str, object] = {
        "step": step,
        "steps": measured.steps,
        "measured_step_seconds": measured.seconds,
        "measured_exposed_seconds": measured.exposed_seconds,
        "measured_messages_seconds": measured.messages_seconds,
    }
    if predicted is not None:
        account |= {
            "predicted_step_seconds": predicted.seconds,
            "predicted_exposed_seconds": predicted.exposed_seconds,
            "accuracy": accuracy(predicted.seconds, measured.seconds),
            "measured_share": predicted.measured_share,
            "machine": predicted.machine,
            "machine_digest": predicted.machine_digest,
        }
    return account
