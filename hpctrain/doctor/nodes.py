"""Checks of the nodes: memory, GPUs, kernels, start-up time, and the links between nodes.

For each check, `gather_...` returns the facts of a rank, and `judge_...` is a pure function of the facts of all ranks.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.assembly.recipe import columns
from hpctrain.backend.choice import NodePlace, make_backend
from hpctrain.backend.onednn.kernel_set import available
from hpctrain.comm.device_probe import AWARE, GTL_WORDS, UNAWARE, UNTRIED, trial
from hpctrain.config.schema import Config
from hpctrain.core.errors import HpctrainError
from hpctrain.core.text import counted, size_text
from hpctrain.doctor.check import (
    Check,
    DoctorFinding,
    FindingKind,
    JobView,
    JoinedPlace,
    OwnPlace,
    Severity,
    fine,
    present,
)
from hpctrain.planner.measure.measurement import facts_here
from hpctrain.planner.planned_run import description, prepare

TOO_LITTLE = FindingKind(
    "too-little-memory",
    Severity.FAULT,
    "By the plan of a step, the ranks of a node need more memory than it has, so the system would kill one of them.",
    "Set `micro_batches` higher, or start fewer ranks on a node.",
)
TIGHT = FindingKind(
    "tight-memory",
    Severity.WARNING,
    "The ranks of a node need more than 85 % of its memory, and little remains for caching data files.",
    "Set `micro_batches` higher, or start fewer ranks on a node.",
)

_TIGHT = 0.85
#: number of arrays of the parameters' size: parameters, gradients, and the optimiser's state
_COPIES = 3


@dataclass(frozen=True)
class MemoryFacts:
    """Memory of a node and, on rank 0, the maximum that a rank needs.

    Attributes:
        pass_bytes: memory of a pass through the network, maximum over ranks.
        held_bytes: memory that is always allocated, maximum over ranks.
        reason: why the need is unknown; "" if it is known.
    """

    node_bytes: int
    pass_bytes: int = 0
    held_bytes: int = 0
    reason: str = ""


def gather_memory(place: OwnPlace) -> MemoryFacts | None:
    """Return this node's memory, or None on all ranks but its first. Rank 0 plans a step with the largest share of a batch."""
    if not place.leads_node:
        return None
    node_bytes = facts_here().memory_bytes
    if place.config is None or not place.leads_job:
        return MemoryFacts(node_bytes, reason="no configuration was given")
    if place.config.automatic or place.config.backend == "cuda":
        return MemoryFacts(node_bytes, reason="the plan is auto" if place.config.automatic else "backend cuda has its own")
    try:
        ranks, number, local = place.launcher.expected_size, place.launcher.local_rank, place.launcher.local_size
        own = NodePlace(ranks or 1, number or 0, local or 1)
        return MemoryFacts(node_bytes, *planned_bytes(place.config, own))
    except HpctrainError as error:
        return MemoryFacts(node_bytes, reason=f"there is no plan ({error})")


def planned_bytes(config: Config, place: NodePlace) -> tuple[int, int]:
    """Return (bytes of a pass, bytes always allocated), each the maximum over ranks.

    A single split group is planned, with the largest share of the batch.

    Raises:
        HpctrainError: no plan is possible.
    """
    samples = math.ceil(config.batch / columns(config, place.ranks))
    grid = config.grid.model_copy(update={"cols": 1})
    share = {"batch": samples, "micro_batches": min(config.micro_batches, samples), "grid": grid}
    backend = make_backend(config.backend, config.dtype, config.precision, place)
    reports = description(prepare(config.model_copy(update=share), config.grid.rows, backend=backend)).memory or ()
    passing = max((report.activations + report.messages for report in reports), default=0)
    return passing, _COPIES * max((report.parameters for report in reports), default=0)


def judge_memory(job: JobView, facts: Sequence[MemoryFacts | None]) -> list[DoctorFinding]:
    """Return one finding on the node whose ranks need the largest fraction of its memory."""
    planned = facts[0]
    assert planned is not None, "rank 0 gathers facts"
    if planned.reason:
        return [fine(f"Not checked: {planned.reason}.")]
    ranks_of = {ranks[0]: len(ranks) for ranks in job.nodes.values()}
    rank_bytes = planned.pass_bytes + planned.held_bytes
    shares = {rank: ranks_of.get(rank, 1) * rank_bytes / fact.node_bytes for rank, fact in present(facts)}
    worst = max(shares, key=shares.__getitem__)
    node = facts[worst]
    assert node is not None
    count = ranks_of.get(worst, 1)
    sentence = (
        f"{counted(count, 'rank')} on {job.hosts[worst]} {'needs' if count == 1 else 'need'} "
        f"{size_text(count * rank_bytes)} for a step; the node has {size_text(node.node_bytes)}."
    )
    if shares[worst] <= _TIGHT:
        return [fine(sentence)]
    kind = TOO_LITTLE if shares[worst] > 1 else TIGHT
    return [kind.found(sentence)]


MEMORY = Check(
    "memory", "the memory of each node against the plan of a step on it", (TOO_LITTLE, TIGHT), gather_memory, judge_memory
)


NO_GTL = FindingKind(
    "no-gtl",
    Severity.FAULT,
    "Cray MPICH is configured to send messages from GPUs (`MPICH_GPU_SUPPORT_ENABLED=1`), but its GTL library is not linked, "
    "so MPI ends each rank when it starts.",
    "`export MPICH_GPU_SUPPORT_ENABLED=0`: trainings then send through host memory. Or link mpi4py to the site's "
    "libmpi_gtl_cuda.so.",
)
FEW_GPUS = FindingKind(
    "too-few-gpus",
    Severity.FAULT,
    "The configuration's backend is cuda, and a node has fewer GPUs than ranks.",
    "Start at most one rank per GPU on a node.",
)
HOST_MEMORY = FindingKind(
    "not-gpu-aware",
    Severity.REMARK,
    "MPI cannot send from GPU memory, so trainings send through host memory (`transport: staged`).",
    "Use an MPI with GPU support, or `transport: nccl`.",
)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class GpuFacts:
    """GPUs that a rank sees.

    Attributes:
        visible: names of the GPUs, from CUDA_VISIBLE_DEVICES or the driver.
        confined: whether CUDA_VISIBLE_DEVICES is set.
        probe: AWARE, UNAWARE with a reason, UNTRIED, or the output of MPI if it ended the process.
    """

    visible: tuple[str, ...] = ()
    confined: bool = False
    probe: str = UNTRIED


def gather_gpus(place: OwnPlace) -> GpuFacts:
    """Return the GPUs of this rank.

    The first rank of a node starts a test process if it sees a GPU or if MPI's GPU support is enabled.
    """
    named = os.environ.get(_VISIBLE)
    if named is not None:
        visible = tuple(entry.strip() for entry in named.split(",") if entry.strip())
    else:
        visible = tuple(sorted(path.name for path in _DRIVER.iterdir())) if _DRIVER.is_dir() else ()
    tries = place.leads_node and (bool(visible) or os.environ.get(_SUPPORT) == "1")
    return GpuFacts(visible, named is not None, trial() if tries else UNTRIED)


def from_start(text: str) -> DoctorFinding | None:
    """Return the finding on GPU support in the last output of MPI; None if the output does not concern GPUs."""
    if GTL_WORDS not in text:
        return None
    return NO_GTL.found("MPI reports at its start: GPU support is requested, but the GTL library is not linked.")


def judge_gpus(job: JobView, facts: Sequence[GpuFacts]) -> list[DoctorFinding]:
    """Return all faults of GPUs, or one finding with the number of GPUs per node."""
    aborted = next((finding for fact in facts if (finding := from_start(fact.probe)) is not None), None)
    findings = [] if aborted is None else [aborted]
    if job.config is not None and job.config.backend == "cuda":
        findings += _cuda(job, facts)
    unaware = [rank for rank, fact in enumerate(facts) if fact.probe.startswith(UNAWARE)]
    if unaware:
        reason = facts[unaware[0]].probe.partition(": ")[2].rstrip(".")
        findings.append(HOST_MEMORY.found(f"MPI cannot send from GPU memory on {job.hosts[unaware[0]]}: {reason}."))
    if findings:
        return findings
    counts = [_gpus_of(facts, ranks) for ranks in job.nodes.values()]
    if not any(counts):
        return [fine("No node shows a GPU.")]
    most = f"{min(counts)} to {max(counts)}" if min(counts) != max(counts) else f"{counts[0]}"
    aware = "; MPI can send from their memory (transport mpi)" if any(fact.probe == AWARE for fact in facts) else ""
    return [fine(f"GPUs per node: {most}{aware}.")]


def _cuda(job: JobView, facts: Sequence[GpuFacts]) -> list[DoctorFinding]:
    """Return a finding if these ranks cannot use backend cuda."""
    for ranks in job.nodes.values():
        gpus = _gpus_of(facts, ranks)
        if gpus < len(ranks):
            sentence = f"{job.hosts[ranks[0]]} has {counted(gpus, 'GPU')} for {len(ranks)} ranks"
            most = f"at most {gpus} ranks on a node, or ask for {len(ranks)} GPUs" if gpus else "on nodes with GPUs"
            return [FEW_GPUS.found(f"{sentence}, and backend is cuda.", f"Start {most}: --gpus-per-task=1.")]
    return []


def _gpus_of(facts: Sequence[GpuFacts], ranks: Sequence[int]) -> int:
    """Return the number of GPUs that the ranks of a node see together.

    Ranks that each see one GPU under the same number may have different GPUs.
    """
    shown = [facts[rank].visible for rank in ranks]
    if len(ranks) > 1 and all(facts[rank].confined and len(facts[rank].visible) == 1 for rank in ranks):
        return len(ranks) if len(set(shown)) == 1 and shown[0] == ("0",) else len(set(shown))
    return len(set().union(*shown))


GPUS = Check(
    "GPUs",
    "the GPUs of each node, and MPI's messages from their memory",
    (NO_GTL, FEW_GPUS, HOST_MEMORY),
    gather_gpus,
    judge_gpus,
)


NO_ONEDNN = FindingKind(
    "no-onednn",
    Severity.FAULT,
    "The configuration has backend onednn, which cannot be used on some node.",
    "pip install onednn-cpu-gomp==2023.2.0",
)
SLOW_KERNELS = FindingKind(
    "slow-kernels",
    Severity.WARNING,
    "oneDNN cannot be used; NumPy computes instead, several times slower.",
    "pip install onednn-cpu-gomp==2023.2.0",
)


@dataclass(frozen=True)
class KernelFacts:
    """Kernel set of a rank.

    Attributes:
        reason: why oneDNN cannot be used although it was wanted; "" otherwise.
    """

    name: str
    reason: str = ""


def gather_kernels(place: OwnPlace) -> KernelFacts | None:
    """Return the kernel set of this node, on its first rank. GPUs have their own check."""
    if not place.leads_node:
        return None
    backend, dtype = ("auto", "float32") if place.config is None else (place.config.backend, place.config.dtype)
    if backend in ("numpy", "cuda"):
        return KernelFacts(backend)
    if dtype != "float32":
        return KernelFacts("numpy")
    reason = available()
    return KernelFacts("onednn") if reason is None else KernelFacts("numpy", reason)


def judge_kernels(job: JobView, facts: Sequence[KernelFacts | None]) -> list[DoctorFinding]:
    """Return one finding: the kernel set, or the nodes that cannot use oneDNN."""
    looked = [(rank, fact) for rank, fact in enumerate(facts) if fact is not None]
    missing = [rank for rank, fact in looked if fact.reason]
    wanted = job.config is not None and job.config.backend == "onednn"
    if missing:
        reason = next(fact.reason for _, fact in looked if fact.reason)
        kind = NO_ONEDNN if wanted else SLOW_KERNELS
        where = "" if len(missing) == len(looked) else f" ({', '.join(dict.fromkeys(job.hosts[rank] for rank in missing))})"
        finding = kind.from_error(reason) if "; " in reason else kind.found(reason)
        return [kind.found(f"{finding.sentence.removesuffix('.')}{where}.", finding.fix)]
    return [fine(f"Kernels {looked[0][1].name}.")]


KERNELS = Check(
    "kernels",
    "the kernel set that computes on each node",
    (NO_ONEDNN, SLOW_KERNELS),
    gather_kernels,
    judge_kernels,
)


SLOW_IMPORT = FindingKind(
    "slow-import",
    Severity.WARNING,
    "The slowest rank took more than 5 s to load Python and all modules of a training.",
    "Copy the environment to local disks of the nodes before the job, for example as an archive with `sbcast`, and use it there.",
)

_MOST_START_SECONDS = 5.0


def gather_start_up(place: OwnPlace) -> float | None:
    """Return the start-up time of this rank in seconds; None if it was not measured."""
    return place.start_seconds


def judge_start_up(job: JobView, facts: Sequence[float | None]) -> list[DoctorFinding]:
    """Return one finding on the rank that took longest to start."""
    known = present(facts)
    if not known:
        return [fine("Not measured.")]
    rank, seconds = max(known, key=lambda one: one[1])
    sentence = f"{f'Rank {rank} ({job.hosts[rank]})' if job.size > 1 else 'The program'} loaded in {seconds:.1f} s."
    return [SLOW_IMPORT.found(sentence) if seconds > _MOST_START_SECONDS else fine(sentence)]


START_UP = Check(
    "start-up", "the time to load Python and all modules of a training", (SLOW_IMPORT,), gather_start_up, judge_start_up
)


SLOW_LINK = FindingKind(
    "slow-link",
    Severity.WARNING,
    "A node exchanges messages with other nodes at less than 100 MB/s, or at less than a quarter of the usual rate of the nodes.",
    "Exclude the node, or let MPI use the fast network: see `FI_PROVIDER`, `UCX_TLS` or `OMPI_MCA_btl` in the site's manual.",
)

_LINK_BYTES = 8 << 20
_LINK_ROUNDS = 3
_LINK_TAG = 7302
#: lowest rate of a link without a finding, in bytes per second; Ethernet of 1 Gb/s reaches 115 MB/s
_LEAST_RATE = 1e8
_LEAST_SHARE = 0.25


def gather_link(place: JoinedPlace) -> float | None:
    """Measure the rate at which this node sends to the next node while it receives from the previous one. Collective.

    Return bytes per second on the first rank of each node; None on other ranks, or if there is only one node.
    """
    world, wait = place.world, place.progress.wait_handle
    leaders = [rank for rank, leads in enumerate(world.allgather_object(place.node.rank == 0)) if leads]
    if len(leaders) == 1 or world.rank not in leaders:
        return None
    position = leaders.index(world.rank)
    following, previous = leaders[(position + 1) % len(leaders)], leaders[position - 1]
    sent, received = np.zeros(_LINK_BYTES, np.uint8), np.zeros(_LINK_BYTES, np.uint8)
    seconds = []
    for _ in range(_LINK_ROUNDS):
        begin = time.perf_counter()
        arrival = world.irecv(received, previous, _LINK_TAG)
        wait(world.isend(sent, following, _LINK_TAG), "a message to the next node")
        wait(arrival, "a message of the previous node")
        seconds.append(time.perf_counter() - begin)
    return _LINK_BYTES / min(seconds)


def judge_link(job: JobView, facts: Sequence[float | None]) -> list[DoctorFinding]:
    """Return one finding: the node with the slowest link, if it is too slow, or the lowest rate."""
    known = present(facts)
    if not known:
        return [fine("One node.")]
    rank, rate = min(known, key=lambda one: one[1])
    usual = statistics.median(rate for _, rate in known)
    if rate < max(_LEAST_RATE, _LEAST_SHARE * usual):
        usually = f"; the median of all nodes is {size_text(int(usual))}/s" if len(known) > 2 else ""
        return [SLOW_LINK.found(f"{job.hosts[rank]} exchanges messages at {size_text(int(rate))}/s{usually}.")]
    return [fine(f"Nodes exchange messages at {size_text(int(rate))}/s or more.")]


LINK = Check("link", "the rate of messages between nodes", (SLOW_LINK,), gather_link, judge_link, joined=True)
