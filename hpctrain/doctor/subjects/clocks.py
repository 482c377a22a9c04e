"""The wall clocks of the nodes: records and file times of ranks are put in order by them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpctrain.comm.clock import Offset, measure_offset
from hpctrain.doctor.check import Check, JobView, JoinedPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.rank_spans import spans

SKEW = FindingKind(
    "clock-skew",
    Severity.WARNING,
    "The wall clocks of nodes are apart: the autopsy of a failed job would put events of different nodes in the wrong order.",
    "Ask for a time service (chrony) on these nodes, or leave them out: `srun --exclude=NODES`.",
)

_ROUNDS = 10
#: by which clocks may be apart without harm
_MOST_SECONDS = 0.5


def gather(place: JoinedPlace) -> Offset:
    """This rank's wall clock less rank 0's. Collective."""
    return measure_offset(place.world, place.progress.wait_handle, clock_ns=time.time_ns, rounds=_ROUNDS)


def judge(job: JobView, facts: Sequence[Offset]) -> list[DoctorFinding]:
    """One finding: the nodes whose clocks are surely apart from rank 0's, or by how much clocks may be."""
    seconds = [(abs(fact.offset_ns) - fact.error_ns) * 1e-9 for fact in facts]
    late = [rank for rank, apart in enumerate(seconds) if apart > _MOST_SECONDS]
    if late:
        worst = max(late, key=lambda rank: seconds[rank])
        hosts = list(dict.fromkeys(job.hosts[rank] for rank in late))
        offset = facts[worst].offset_ns * 1e-9
        direction = "ahead of" if offset > 0 else "behind"
        return [
            SKEW.found(
                f"The clock of {job.hosts[worst]} is {abs(offset):.1f} s {direction} that of {job.hosts[0]} "
                f"(ranks {spans(late)}).",
                f"srun --exclude={','.join(hosts)} ..., or a time service (chrony) on these nodes.",
            )
        ]
    most = max((abs(fact.offset_ns) + fact.error_ns) * 1e-6 for fact in facts)
    return [fine("One node." if len(job.nodes) == 1 else f"Clocks of {len(job.nodes)} nodes are at most {most:.1f} ms apart.")]


CHECK = Check("clocks", "the wall clocks of the nodes against that of the first one", (SKEW,), gather, judge, joined=True)
