"""The time until a rank has loaded what it trains with: slow file systems show here first, as all ranks read the same files."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.doctor.check import Check, JobView, OwnPlace, present
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.doctor.start_facts import StartFacts

SLOW_IMPORT = FindingKind(
    "slow-import",
    Severity.WARNING,
    "The slowest rank took more than 5 s to load Python and all modules of a training, on a core that it had.",
    "Copy the environment to the nodes' own disks before the job, such as by `sbcast` of an archive, and start from there.",
)

_MOST_SECONDS = 5.0


def gather(place: OwnPlace) -> StartFacts | None:
    """The facts that were taken when this rank started."""
    return place.start


def judge(job: JobView, facts: Sequence[StartFacts | None]) -> list[DoctorFinding]:
    """One finding, about the slowest rank."""
    known = present(facts)
    if not known:
        return [fine("Not measured.")]
    rank, fact = max(known, key=lambda one: one[1].seconds)
    whose = f"Rank {rank} ({job.hosts[rank]})" if job.size > 1 else "The program"
    times = f"{fact.seconds:.1f} s to load, {fact.cpu_seconds:.1f} s of them computing"
    sentence = f"{whose} took {times}; it opened {fact.files:,} files."
    return [SLOW_IMPORT.found(sentence) if fact.seconds > _MOST_SECONDS else fine(sentence)]


CHECK = Check("start-up", "the time to load Python and all modules of a training", (SLOW_IMPORT,), gather, judge)
