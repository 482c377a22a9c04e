"""The memory that the ranks of a node will take, by the plan of a training step, against what the node has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.schema import Config
from hpctrain.doctor.check import Check, JobView, OwnPlace, present
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.core.errors import HpctrainError
from hpctrain.planner.measurement import facts_here
from hpctrain.planner.planned_run import description, prepare
from hpctrain.config.grid import columns

TOO_LITTLE = FindingKind(
    "too-little-memory",
    Severity.FAULT,
    "The ranks of a node need more memory than it has, by the plan of a step: the system would kill one of them.",
    "Set `micro_batches` higher, or start fewer ranks on a node.",
)
TIGHT = FindingKind(
    "tight-memory",
    Severity.WARNING,
    "The ranks of a node need more than 85 % of its memory; data files are cached in the rest.",
    "Set `micro_batches` higher, or start fewer ranks on a node.",
)

_TIGHT = 0.85
#: parameters, their gradients, and the optimiser's state
_COPIES = 3


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of a node, and, on rank 0, of the rank that needs most.

    Attributes:
        node_bytes: of all its ranks together. pass_bytes: of a pass through the network. held_bytes: of what is always there.
        samples: of the rank, of a step. reason: why there is nothing of the rank; empty where there is.
    """

    node_bytes: int
    pass_bytes: int = 0
    held_bytes: int = 0
    samples: int = 0
    reason: str = ""


def gather(place: OwnPlace) -> MemoryFacts | None:
    """The facts of this node. Rank 0 plans a step of the largest share of the batch, in a second or two."""
    if not place.leads_node:
        return None
    node_bytes = facts_here().memory_bytes
    if place.config is None or not place.leads_job:
        return MemoryFacts(node_bytes, reason="no configuration was given")
    if place.config.automatic or place.config.backend == "cuda":
        return MemoryFacts(node_bytes, reason="the plan is auto" if place.config.automatic else "backend cuda has its own")
    try:
        return MemoryFacts(node_bytes, *planned_bytes(place.config, place.launcher.expected_size or 1))
    except HpctrainError as error:
        return MemoryFacts(node_bytes, reason=f"there is no plan ({error})")


def planned_bytes(config: Config, ranks: int) -> tuple[int, int, int]:
    """(bytes of a pass, bytes that are always held, samples of a step) of the rank that needs most, from one split group alone.

    Raises:
        HpctrainError: there is no such plan.
    """
    samples = math.ceil(config.batch / columns(config, ranks))
    grid = config.grid.model_copy(update={"cols": 1})
    share = {"batch": samples, "micro_batches": min(config.micro_batches, samples), "grid": grid}
    reports = description(prepare(config.model_copy(update=share), config.grid.rows)).memory or ()
    passing = max((report.activations + report.messages for report in reports), default=0)
    return passing, _COPIES * max((report.parameters for report in reports), default=0), samples


def judge(job: JobView, facts: Sequence[MemoryFacts | None]) -> list[DoctorFinding]:
    """One finding, about the node with the least room."""
    planned = facts[0]
    assert planned is not None, "the first rank looks"
    if planned.reason:
        return [fine(f"Not looked at: {planned.reason}.")]
    ranks_of = {ranks[0]: len(ranks) for ranks in job.nodes.values()}
    rank_bytes = planned.pass_bytes + planned.held_bytes
    shares = {rank: ranks_of.get(rank, 1) * rank_bytes / fact.node_bytes for rank, fact in present(facts)}
    worst = max(shares, key=shares.__getitem__)
    node = facts[worst]
    assert node is not None
    count = ranks_of.get(worst, 1)
    need = count * rank_bytes / 1e9
    told = (
        f"{'1 rank' if count == 1 else f'{count} ranks'} on {job.hosts[worst]} {'needs' if count == 1 else 'need'} "
        f"{need:{'.1f' if need >= 0.1 else '.2g'}} GB by the plan of a step; it has {node.node_bytes / 1e9:.1f} GB."
    )
    if shares[worst] <= _TIGHT:
        return [fine(told)]
    kind = TOO_LITTLE if shares[worst] > 1 else TIGHT
    return [kind.found(told, _mend(job.config, planned, count, node.node_bytes))]


def _mend(config: Config | None, planned: MemoryFacts, ranks: int, node_bytes: int) -> str:
    """The number of micro-batches with which the ranks fit, or that of ranks."""
    room = _TIGHT * node_bytes - ranks * planned.held_bytes
    if room > 0 and config is not None:
        micro_batches = math.ceil(ranks * planned.pass_bytes / room) * config.micro_batches
        if micro_batches <= planned.samples:  # a pass has at least one sample
            return f"Train with micro_batches={micro_batches}, or start fewer ranks on a node."
    fitting = int(_TIGHT * node_bytes // (planned.pass_bytes + planned.held_bytes))
    if not fitting:
        return "Take nodes with more memory, or a smaller network."
    return f"Start at most {'1 rank' if fitting == 1 else f'{fitting} ranks'} on a node."


CHECK = Check("memory", "the memory of each node against the plan of a step on it", (TOO_LITTLE, TIGHT), gather, judge)
