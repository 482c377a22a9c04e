"""Packages and files that must be the same on all nodes, compared as a training compares them."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.doctor.check import Check, JobView, JoinedPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.core.errors import ConfigError
from hpctrain.job.same_start import check_same_start
from hpctrain.runs.directory import software_versions

MISMATCH = FindingKind(
    "mismatch",
    Severity.FAULT,
    "Ranks have other packages, other files of hpctrain or another configuration than rank 0: a training is refused.",
    "Give all nodes the same environment.",
)


def gather(place: JoinedPlace) -> tuple[str, str]:
    """(the first difference between ranks, or "", this rank's versions). Collective."""
    try:
        check_same_start(place.world, place.own.config, leads_node=place.own.leads_node)
    except ConfigError as error:
        return str(error), ""
    return "", ", ".join(f"{name} {version}" for name, version in software_versions().items())


def judge(job: JobView, facts: Sequence[tuple[str, str]]) -> list[DoctorFinding]:
    """One finding; the ranks have told each other what differs."""
    difference, versions = facts[0]
    if difference:
        finding = MISMATCH.from_error(difference)
        ranks = [rank for rank in range(job.size) if f"Rank {rank} has " in difference]
        where = "".join(f" (rank {rank} is on {job.hosts[rank]})" for rank in ranks)
        return [MISMATCH.found(f"{finding.sentence.removesuffix('.')}{where}.", finding.mend)]
    return [fine(f"{'The same on all ranks: ' if job.size > 1 else ''}{versions}.")]


CHECK = Check("versions", "versions of packages and files of hpctrain on all nodes", (MISMATCH,), gather, judge, joined=True)
