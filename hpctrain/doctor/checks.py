"""All checks of the doctor, in the order of its table. Those that need all ranks are made in this order on each of them."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.doctor.check import Check
from hpctrain.doctor.findings import FindingKind, Severity
from hpctrain.doctor.subjects import clocks, cores, directories, gpu, grid, kernels, mpi_library, progress, scratch, start_up, versions
from hpctrain.doctor import files, ranks, nodes

CHECKS: Sequence[Check] = (
    ranks.CHECK,
    mpi_library.CHECK,
    grid.CHECK,
    cores.BINDING,
    cores.THREADS,
    nodes.CHECK,
    progress.CHECK,
    gpu.CHECK,
    kernels.CHECK,
    versions.CHECK,
    start_up.CHECK,
    directories.DIRECTORY,
    directories.SHARED,
    files.CHECK,
    files.SAME,
    scratch.CHECK,
    clocks.CHECK,
)

#: kinds that belong to no check: they say how the doctor's own job has ended, and where a check could not be made
HANGS = FindingKind(
    "hangs",
    Severity.FAULT,
    "The ranks did not come to an end together within the time limit; the sentence says in what they were.",
    "See in the launcher's own messages whether all ranks were started; try another network, such as `export FI_PROVIDER=tcp`.",
)
ENDED = FindingKind(
    "ended",
    Severity.FAULT,
    "A library has ended the process, by a signal or an exit code; the sentence says in what it was, and its last words.",
    "Read what stands before this table on standard error.",
)
FAILED = FindingKind(
    "check-failed", Severity.WARNING, "A check could not be made; the sentence has the system's reason.", "See the reason."
)
JOB_KINDS = (HANGS, ENDED, FAILED)
