"""Whether messages move while the program computes, in each progress mode, as a training would measure it at its start."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comm import progress_mode
from hpctrain.comm.progress_mode import OverlapMeasurement, ProgressMode
from hpctrain.doctor.check import Check, JobView, JoinedPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine

NOTHING_HIDES = FindingKind(
    "nothing-hides",
    Severity.REMARK,
    "In no progress mode do messages move while layers compute: their time adds to that of a step.",
    "Leave a core of each rank free, or on Cray: `export MPICH_ASYNC_PROGRESS=1 MPICH_MAX_THREAD_SAFETY=multiple`.",
)

_MESSAGE_BYTES = 16 << 20
_OPERATOR_SECONDS = 5e-3
#: of the messages' time: less is as good as nothing
_LITTLE = 0.25


def gather(place: JoinedPlace) -> OverlapMeasurement | None:
    """The measurement, the same on all ranks; None on one rank. Collective; takes two seconds or three."""
    if place.world.size == 1:
        return None
    modes = [ProgressMode.TEST, ProgressMode.NONE, *([ProgressMode.THREAD] if _threads_may_call() else [])]
    measured = progress_mode.measure(
        place.world, place.progress, modes, operator_seconds=_OPERATOR_SECONDS, most_bytes=_MESSAGE_BYTES
    )
    progress_mode.apply(place.progress, ProgressMode.TEST)
    return measured if place.world.rank == 0 else None


def _threads_may_call() -> bool:
    from hpctrain.comm import mpi

    return mpi.threads_may_call()


def judge(job: JobView, facts: Sequence[OverlapMeasurement | None]) -> list[DoctorFinding]:
    """One finding, with what each mode hides in words."""
    measured = facts[0]
    if measured is None:
        return [fine("One rank: nothing travels.")]
    shares = {mode: measured.hidden(mode) for mode in measured.by_round}
    told = "; ".join(f"{mode.in_words}: {_share(shares[mode])}" for mode in sorted(shares, key=list(ProgressMode).index))
    sentence = f"Of {measured.wire_seconds * 1e3:.0f} ms of messages, hidden under as much computing: {told}."
    if max(shares.values()) >= _LITTLE:
        return [fine(sentence)]
    return [NOTHING_HIDES.found(sentence)]


def _share(hidden: float) -> str:
    return "nothing" if hidden < 0.005 else f"{min(hidden, 1):.0%}"


CHECK = Check(
    "progress",
    "how much of the messages' time passes while the program computes",
    (NOTHING_HIDES,),
    gather,
    judge,
    joined=True,
)
