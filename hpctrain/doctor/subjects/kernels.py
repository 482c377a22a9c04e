"""The kernel set that a training would compute with, on every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.backend.onednn.kernel_set import available
from hpctrain.doctor.check import Check, JobView, OwnPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine

NO_ONEDNN = FindingKind(
    "no-onednn",
    Severity.FAULT,
    "The configuration asks for backend onednn, which cannot be used on some node.",
    "pip install onednn-cpu-gomp==2023.2.0",
)
SLOW_KERNELS = FindingKind(
    "slow-kernels",
    Severity.WARNING,
    "oneDNN cannot be used, so that NumPy computes, several times slower.",
    "pip install onednn-cpu-gomp==2023.2.0",
)
UNLIKE_KERNELS = FindingKind(
    "unlike-kernels",
    Severity.FAULT,
    "Ranks would compute with different kernels: the slowest node holds up all others, and results depend on the node.",
    "Give all nodes the same environment, or set `backend` to numpy.",
)


@dataclass(frozen=True)
class KernelFacts:
    """The kernel set of a rank. reason: why it is not oneDNN's, where that was wanted; empty where it is."""

    name: str
    reason: str = ""


def gather(place: OwnPlace) -> KernelFacts | None:
    """The facts of this node; a GPU is looked at elsewhere."""
    if not place.leads_node:
        return None
    backend, dtype = ("auto", "float32") if place.config is None else (place.config.backend, place.config.dtype)
    if backend in ("numpy", "cuda"):
        return KernelFacts(backend)
    if dtype != "float32":
        return KernelFacts("numpy")
    reason = available()
    return KernelFacts("onednn") if reason is None else KernelFacts("numpy", reason)


def judge(job: JobView, facts: Sequence[KernelFacts | None]) -> list[DoctorFinding]:
    """One finding."""
    looked = [(rank, fact) for rank, fact in enumerate(facts) if fact is not None]
    missing = [rank for rank, fact in looked if fact.reason]
    wanted = job.config is not None and job.config.backend == "onednn"
    if missing:
        reason = next(fact.reason for _, fact in looked if fact.reason)
        kind = NO_ONEDNN if wanted else UNLIKE_KERNELS if len(missing) < len(looked) else SLOW_KERNELS
        where = "" if len(missing) == len(looked) else f" ({', '.join(dict.fromkeys(job.hosts[rank] for rank in missing))})"
        finding = kind.from_error(reason) if "; " in reason else kind.found(reason)
        return [kind.found(f"{finding.sentence.removesuffix('.')}{where}.", finding.mend)]
    return [fine(f"Kernels {looked[0][1].name}.")]


CHECK = Check("kernels", "the kernel set that computes on each node", (NO_ONEDNN, SLOW_KERNELS, UNLIKE_KERNELS), gather, judge)
