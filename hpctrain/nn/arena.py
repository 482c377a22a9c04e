"""Where everything of a plan lies in one block of memory: tensors, what operators keep, scratch, partial gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.nn.memory import ALIGNMENT_BYTES, pack
from hpctrain.nn.plan import ExecutionPlan, lifetimes


@dataclass(frozen=True)
class Arena:
    """Byte offsets.

    offsets: of the blocks of `nn.plan.lifetimes`. scratch_at: `scratch_bytes` that all operators share. partial_at: gradients of
    a step's inputs that are added to what an earlier step of backward wrote. first_writer: see `first_writers`.
    """

    offsets: Mapping[tuple[str, int], int]
    scratch_at: int
    scratch_bytes: int
    partial_at: int
    total_bytes: int
    first_writer: Mapping[int, tuple[int, int]]


def arrange(plan: ExecutionPlan) -> Arena:
    """Pure: allocates nothing."""
    blocks = dict(lifetimes(plan))
    writers = first_writers(plan)
    scratch_bytes = max((step.operator.scratch_bytes for step in plan.steps), default=0)
    offsets, packed_bytes = pack(list(blocks.values()))
    partial_at = packed_bytes + -(-scratch_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    total_bytes = partial_at + _largest_partial(plan, writers)
    return Arena(dict(zip(blocks, offsets, strict=True)), packed_bytes, scratch_bytes, partial_at, total_bytes, writers)


def first_writers(plan: ExecutionPlan) -> dict[int, tuple[int, int]]:
    """Who writes a tensor's gradient first in backward: (step, input position); (-1, -1) is the loss."""
    writers = {plan.output: (-1, -1)}
    for k in reversed(range(len(plan.steps))):
        for i, tensor in enumerate(plan.steps[k].inputs):
            writers.setdefault(tensor, (k, i))
    return writers


def _largest_partial(plan: ExecutionPlan, writers: Mapping[int, tuple[int, int]]) -> int:
    largest = 0
    for k, step in enumerate(plan.steps):
        if step.operator.can_accumulate:
            continue
        sizes = (
            plan.tensors[tensor].bytes
            for i, tensor in enumerate(step.inputs)
            if plan.needs_grad[tensor] and writers[tensor] != (k, i)
        )
        largest = max(largest, sum(sizes))
    return largest
