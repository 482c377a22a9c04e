"""The GPUs of each node, and whether MPI takes messages from their memory, which a process of its own tries out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.device_probe import AWARE, GTL_WORDS, UNAWARE, UNTRIED, trial
from hpctrain.doctor.check import Check, JobView, OwnPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine

NO_GTL = FindingKind(
    "no-gtl",
    Severity.FAULT,
    "Cray MPICH is asked to take messages from GPUs (`MPICH_GPU_SUPPORT_ENABLED=1`), but its library for them is not loaded: "
    "MPI ends each rank when it starts.",
    "`export MPICH_GPU_SUPPORT_ENABLED=0`: trainings send through the host's memory then. Or link mpi4py to the site's "
    "libmpi_gtl_cuda.so.",
)
FEW_GPUS = FindingKind(
    "too-few-gpus",
    Severity.FAULT,
    "The configuration's backend is cuda, and a node has fewer GPUs than ranks.",
    "Start as many ranks on a node as it has GPUs.",
)
HOST_MEMORY = FindingKind(
    "not-gpu-aware",
    Severity.REMARK,
    "MPI takes no messages from the GPU's memory: trainings send through the host's (`transport: staged`).",
    "Use an MPI that was built for GPUs, or `transport: nccl`.",
)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs that a rank sees.

    Attributes:
        visible: their names, as the environment gives them, else as the driver does. confined: the environment names them.
        probe: AWARE, UNAWARE with a reason, UNTRIED, or what MPI said when it ended the process.
    """

    visible: tuple[str, ...] = ()
    confined: bool = False
    probe: str = UNTRIED


def gather(place: OwnPlace) -> GpuFacts:
    """The facts of this rank; the first one of a node starts a process where there is a GPU, or MPI is to support one."""
    named = os.environ.get(_VISIBLE)
    if named is not None:
        visible = tuple(entry.strip() for entry in named.split(",") if entry.strip())
    else:
        visible = tuple(sorted(path.name for path in _DRIVER.iterdir())) if _DRIVER.is_dir() else ()
    tries = place.leads_node and (bool(visible) or os.environ.get(_SUPPORT) == "1")
    return GpuFacts(visible, named is not None, trial() if tries else UNTRIED)


def from_start(text: str) -> DoctorFinding | None:
    """The finding that an MPI's last words lead to; None where they say nothing of GPUs."""
    if GTL_WORDS not in text:
        return None
    return NO_GTL.found("MPI says at its start: GPU support is asked for, but the GTL library is not linked.")


def judge(job: JobView, facts: Sequence[GpuFacts]) -> list[DoctorFinding]:
    """All that is wrong with GPUs, or what there is."""
    aborted = next((finding for fact in facts if (finding := from_start(fact.probe)) is not None), None)
    found = [] if aborted is None else [aborted]
    if job.config is not None and job.config.backend == "cuda":
        found += _cuda(job, facts)
    unaware = [rank for rank, fact in enumerate(facts) if fact.probe.startswith(UNAWARE)]
    if unaware:
        reason = facts[unaware[0]].probe.partition(": ")[2]
        found.append(HOST_MEMORY.found(f"MPI takes no messages from GPU memory on {job.hosts[unaware[0]]}: {reason}."))
    if found:
        return found
    counts = [_gpus_of(facts, ranks) for ranks in job.nodes.values()]
    if not any(counts):
        return [fine("No node shows a GPU.")]
    most = f"{min(counts)} to {max(counts)}" if min(counts) != max(counts) else f"{counts[0]}"
    aware = "; MPI takes messages from their memory (transport mpi)" if any(fact.probe == AWARE for fact in facts) else ""
    return [fine(f"GPUs per node: {most}{aware}.")]


def _cuda(job: JobView, facts: Sequence[GpuFacts]) -> list[DoctorFinding]:
    """Why backend cuda cannot be used on these ranks."""
    for ranks in job.nodes.values():
        gpus = _gpus_of(facts, ranks)
        if gpus < len(ranks):
            told = f"{job.hosts[ranks[0]]} has {gpus} {'GPU' if gpus == 1 else 'GPUs'} for {len(ranks)} ranks"
            most = f"at most {gpus} ranks on a node, or ask for {len(ranks)} GPUs" if gpus else "on nodes with GPUs"
            return [FEW_GPUS.found(f"{told}, and backend is cuda.", f"Start {most}: --gpus-per-task=1.")]
    return []


def _gpus_of(facts: Sequence[GpuFacts], ranks: Sequence[int]) -> int:
    """GPUs that the ranks of a node see together. Ranks that are each shown one, by the same number, may have different ones."""
    shown = [facts[rank].visible for rank in ranks]
    if len(ranks) > 1 and all(facts[rank].confined and len(facts[rank].visible) == 1 for rank in ranks):
        return len(ranks) if len(set(shown)) == 1 and shown[0] == ("0",) else len(set(shown))
    return len(set().union(*shown))


CHECK = Check(
    "GPUs",
    "the GPUs of each node, and MPI's messages from their memory",
    (NO_GTL, FEW_GPUS, HOST_MEMORY),
    gather,
    judge,
)
