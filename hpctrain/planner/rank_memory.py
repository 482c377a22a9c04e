"""The memory of a rank in training, in bytes: what its arrays take, not what a process takes beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind
from hpctrain.averaging.slicing import layer_slices
from hpctrain.backend.dtypes import item_bytes, parameter_dtype
from hpctrain.parallel.local_graph import LocalGraph, training_plan
from hpctrain.parallel.plan_report import message_words
from hpctrain.planner.job import Job

# Of a data loader: the batch that a step reads, and the one that is being made.
_BATCHES = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes. activations: the arena of a step, gradients of activations included. messages: buffers of the split group.

    parameters: their values. gradients: of parameters, sums of micro-batches included. averaging: buffers in which sums arrive.
    state: of the optimiser and of the weights' average, for what the rank owns. images: of the batch, and of the one behind it.
    """

    activations: int
    messages: int
    parameters: int
    gradients: int
    averaging: int
    state: int
    images: int

    @property
    def total(self) -> int:
        return self.activations + self.messages + self.parameters + self.gradients + self.averaging + self.state + self.images


def rank_memory(
    job: Job,
    graphs: Sequence[LocalGraph],
    samples: int,
    sizes: Mapping[str, int],
    schedules: Sequence[CollectiveSchedule | None],
) -> RankMemory:
    """The memory of a rank.

    Args:
        graphs: by micro-batch; they share one arena. samples: of the rank, of a step. sizes: of all parameters, as it holds them.
        schedules: of its parameter groups.
    """
    plans = [training_plan(local, job.kernels) for local in dict.fromkeys(graphs)]
    item, of_parameters = (item_bytes(dtype) for dtype in (job.dtype, parameter_dtype(job.dtype)))
    elements = sum(sizes.values())
    sharded = [schedule for schedule in schedules if schedule is not None and _has_owners(schedule)]
    owned = sum(_owned(schedule, sizes) for schedule in sharded) if sharded else elements
    arriving = sum(_arriving(schedule, job.batch, samples) for schedule in sharded if schedule.ranks > 1)
    return RankMemory(
        activations=max(plan.arena_bytes for plan in plans),
        messages=max(message_words(local) for local in graphs) * item,
        parameters=elements * of_parameters,
        gradients=elements * of_parameters * (2 if len(graphs) > 1 else 1),
        averaging=arriving * of_parameters,
        state=owned * of_parameters * job.state_arrays,
        images=_BATCHES * samples * math.prod(job.image_shape) * item,
    )


def _has_owners(schedule: CollectiveSchedule) -> bool:
    return any(operation.kind is OperationKind.ALLGATHER for operation in schedule.operations)


def _owned(schedule: CollectiveSchedule, sizes: Mapping[str, int]) -> int:
    """Elements that the first rank, which has most, updates."""
    replicated = sum(sizes[name] for piece in schedule.slices for name in piece.replicated)
    return replicated + sum(piece.owned_size(0, schedule.ranks) for piece in schedule.slices)


def _arriving(schedule: CollectiveSchedule, batch: int, samples: int) -> int:
    """Elements of the buffers for sums of the owned parts; of exchanging layers, for inputs and errors; and what owners keep."""
    total = 0
    rounded_parameters = schedule.rounding is not None and schedule.rounding.parameters != "float32"
    for k, piece in enumerate(schedule.slices):
        owned = piece.owned_size(0, schedule.ranks)
        if piece.compression is not None:  # the sum within the node, what is kept back, and what all nodes send
            pairs = piece.compression.nodes * piece.compression.kept(owned)
            total += owned * (2 if schedule.ranks > piece.copies else 1) + 2 * pairs
            continue
        if not piece.sufficient_factors:
            total += owned * (2 if rounded_parameters else 1)
            continue
        total += samples * piece.units + batch * (owned // piece.unit)
        total += batch * piece.unit if layer_slices(schedule.slices, k)[0] == k else 0
    return total
