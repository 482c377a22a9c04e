"""The doctor's job: each rank gathers facts, first alone and then together with the others, and rank 0 judges all of them.

`CHECKS` contains all checks in the order of the table. Collective checks run in this order on each rank.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.comm.base import Communicator
from hpctrain.comm.device_probe import last_line
from hpctrain.comm.groups import node_numbers
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.schema import Config
from hpctrain.doctor import files, nodes, ranks
from hpctrain.doctor.check import Check, DoctorFinding, FindingKind, JobView, JoinedPlace, OwnPlace, Severity
from hpctrain.doctor.ranks import LibraryFacts
from hpctrain.launch.keeper import Notebook, RankEnd

CHECKS: Sequence[Check] = (
    ranks.LAUNCHER,
    ranks.MPI_LIBRARY,
    ranks.TRAINING,
    ranks.BINDING,
    ranks.THREADS,
    nodes.MEMORY,
    nodes.LINK,
    nodes.GPUS,
    nodes.KERNELS,
    nodes.START_UP,
    files.DIRECTORY,
    files.SHARED,
    files.SCRATCH,
)

#: kinds without a check: ends of the doctor's own job, and a check that failed with an exception
HANGS = FindingKind(
    "hangs",
    Severity.FAULT,
    "The ranks did not finish within the time limit; the sentence names their phase.",
    "Check the launcher's messages for ranks that were not started; try another network, such as `export FI_PROVIDER=tcp`.",
)
ENDED = FindingKind(
    "ended",
    Severity.FAULT,
    "A library ended the process, by a signal or an exit code; the sentence names its phase and its last output.",
    "Read the output on standard error before this table.",
)
FAILED = FindingKind(
    "check-failed", Severity.WARNING, "A check failed with an exception, which the sentence contains.", "See the exception."
)
JOB_KINDS = (HANGS, ENDED, FAILED)


#: the phase in which MPI may hang or end the process
STARTS = "starting MPI"
#: facts of a rank, by the name of the check
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class CheckFailure:
    """A check that failed on a rank, with the type and message of the exception."""

    reason: str


@dataclass(frozen=True)
class Progression:
    """Progress of a rank, as a note for its parent process.

    Attributes:
        library: name of the MPI library; "" before MPI has started.
        concluded: whether the rank has reported.
    """

    phase: str
    facts: Facts
    library: str = ""
    config: Config | None = None
    concluded: bool = False


@dataclass(frozen=True)
class Examination:
    """Outcome of all checks.

    Attributes:
        findings: findings by the name of the check.
        by_rank: facts of each rank.
    """

    job: JobView
    findings: Mapping[str, Sequence[DoctorFinding]]
    by_rank: Sequence[Facts]

    @property
    def all_findings(self) -> list[DoctorFinding]:
        """All findings in the order of the checks."""
        return [finding for findings in self.findings.values() for finding in findings]


def gather_alone(place: OwnPlace, checks: Sequence[Check] = CHECKS) -> dict[str, Any]:
    """Return the facts that need no other rank. Call before MPI starts, since checks start processes."""
    facts: dict[str, Any] = {}
    for check in checks:
        if not check.joined:
            try:
                facts[check.name] = check.gather(place)
            except Exception as error:  # a fault of the system must not end the doctor
                facts[check.name] = CheckFailure(f"{type(error).__name__}: {error}")
    return facts


def examine_together(
    place: OwnPlace,
    world: Communicator,
    own: Facts,
    library: str,
    note: Callable[[str], None],
    deadline_seconds: float,
    checks: Sequence[Check] = CHECKS,
) -> Examination | None:
    """Run the collective checks; return the outcome on rank 0, None on other ranks. Collective over the world.

    Args:
        note: callback with the name of each phase that begins.
    """
    progress = ProgressEngine(rank=world.rank, deadline_seconds=deadline_seconds, abort=world.abort)
    note("finding the ranks of each node")
    node = world.split_shared_memory("node")
    joined = JoinedPlace(place, world, node, progress)
    facts = dict(own)
    for check in checks:
        if check.joined:
            note(f"checking {check.name}")
            facts[check.name] = check.gather(joined)
    note("gathering the facts of all ranks")
    node_of = node_numbers(world, node)
    hosts = world.allgather_object(platform.node())
    by_rank = world.allgather_object(facts)
    if world.rank != 0:
        return None
    job = JobView(place.launcher, world.size, tuple(hosts), node_of, library, place.config)
    return judge(job, by_rank, checks)


def examine_alone(
    place: OwnPlace, own: Facts, library: str = "", error: str = "", ended: DoctorFinding | None = None
) -> Examination:
    """Return the outcome from this rank's facts, if MPI did not connect the ranks and their number is unknown.

    Args:
        error: why the MPI library could not be loaded; "" if it could.
        ended: finding on how the rank ended; None if it did not end early.
    """
    facts = dict(own)
    known = facts.get(ranks.MPI_LIBRARY.name)
    if error:
        facts[ranks.MPI_LIBRARY.name] = replace(known if isinstance(known, LibraryFacts) else LibraryFacts(), error=error)
    job = JobView(place.launcher, 1, (platform.node(),), (0,), library, place.config)
    outcome = judge(job, [facts], [check for check in CHECKS if check.name != ranks.LAUNCHER.name])
    return outcome if ended is None else Examination(job, {"job": [ended], **outcome.findings}, outcome.by_rank)


def judge(job: JobView, by_rank: Sequence[Facts], checks: Sequence[Check] = CHECKS) -> Examination:
    """Judge all checks for which a rank gathered facts, and return the outcome."""
    findings: dict[str, Sequence[DoctorFinding]] = {}
    for check in checks:
        facts = [facts.get(check.name) for facts in by_rank]
        failed = [rank for rank, fact in enumerate(facts) if isinstance(fact, CheckFailure)]
        if failed:
            reason = next(fact.reason for fact in facts if isinstance(fact, CheckFailure))
            findings[check.name] = [FAILED.found(f"Not checked{job.on(failed)}: {reason}.")]
        elif any(check.name in facts for facts in by_rank):
            findings[check.name] = check.judge(job, facts)
    return Examination(job, findings, by_rank)


def explained(place: OwnPlace, end: RankEnd) -> tuple[DoctorFinding, Callable[[], Examination]]:
    """Return a finding on how a rank ended before its report, and a function that judges the facts that it had gathered."""
    note = end.note if isinstance(end.note, Progression) else Progression("starting Python", {})
    library = note.facts.get(ranks.MPI_LIBRARY.name)
    ended = nodes.from_start(end.words)
    if ended is None and isinstance(library, LibraryFacts) and note.phase == STARTS:
        ended = ranks.wrong_launcher(place.launcher, library.library, library.mpiexec)
    if ended is None:
        words = f": {last_line(end.words)}" if end.code is not None and end.words.strip() else ""
        rank = "The process" if place.launcher.rank is None else f"Rank {place.launcher.rank} ({platform.node()})"
        sentence = f"{rank} {end.in_words} while {note.phase}{words}"
        ended = (HANGS if end.code is None else ENDED).found(f"{sentence.removesuffix('.')}.")
    configured = replace(place, config=note.config)
    return ended, lambda: examine_alone(configured, note.facts, note.library, ended=ended)


class RankNotes:
    """Sender of notes on this rank's progress, with its facts so far, to its parent process.

    Attributes:
        library: MPI library; "" before MPI has started.
    """

    def __init__(self, notebook: Notebook, config: Config | None) -> None:
        self._notebook, self._config = notebook, config
        self.facts: Facts = {}
        self.library = ""

    def phase(self, phase: str, *, concluded: bool = False) -> None:
        """Send a note that a phase begins; `concluded` states whether the rank has reported."""
        self._notebook.write(Progression(phase, self.facts, self.library, self._config, concluded))
