"""Where everything of a plan lies in one block of memory: tensors, what operators keep, scratch, partial gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.nn.memory import Block, pack
from hpctrain.nn.plan import ExecutionPlan, lifetimes


@dataclass(frozen=True)
class Arena:
    """Byte offsets of blocks by ("activation" | "gradient" | "saved" | "scratch" | "partial", number), and the size of it all.

    Beside the blocks of `nn.plan.lifetimes`: "scratch" is an operator's own while it runs; "partial" the gradients of a step's
    inputs that are added to what an earlier step of backward wrote. Both by step. first_writer: see `first_writers`.
    """

    offsets: Mapping[tuple[str, int], int]
    total_bytes: int
    first_writer: Mapping[int, tuple[int, int]]


def arrange(plan: ExecutionPlan) -> Arena:
    """Pure: allocates nothing."""
    writers = first_writers(plan)
    blocks = {**lifetimes(plan), **scratch(plan), **partials(plan, writers)}
    offsets, total_bytes = pack(list(blocks.values()))
    return Arena(dict(zip(blocks, offsets, strict=True)), total_bytes, writers)


def scratch(plan: ExecutionPlan) -> dict[tuple[str, int], Block]:
    """Blocks of the operators that need scratch, live in the time slots of `lifetimes` in which they run: large ones lie where
    what is kept for backward has not been written yet, or is no longer needed."""
    slots = backward_slots(plan)
    return {
        ("scratch", k): Block(step.operator.scratch_bytes, k, plan.ends(k), slots[k] if plan.training else None)
        for k, step in enumerate(plan.steps)
        if step.operator.scratch_bytes
    }


def partials(plan: ExecutionPlan, writers: Mapping[int, tuple[int, int]]) -> dict[tuple[str, int], Block]:
    """Blocks of the gradients that an operator which cannot accumulate leaves to be added, live while it runs in backward."""
    slots = backward_slots(plan)
    found: dict[tuple[str, int], Block] = {}
    for k, step in enumerate(plan.steps):
        added = [tensor for i, tensor in enumerate(step.inputs) if plan.needs_grad[tensor] and writers[tensor] != (k, i)]
        size = sum(plan.tensors[tensor].bytes for tensor in added)
        if size and not step.operator.can_accumulate:
            found["partial", k] = Block(size, *slots[k])
    return found


def backward_slots(plan: ExecutionPlan) -> list[tuple[int, int]]:
    """The first and the last time slot of backward in which each step runs: its own, and where it makes its output again or its
    input's gradient ahead of its turn, that of the step that asks for it."""
    n = len(plan.steps)
    found = [[2 * n - k] for k in range(n)]
    for k, step in enumerate(plan.steps):
        rebuilt = [position for tensor in step.inputs for position in plan.recipe(plan.storage[tensor])[1]]
        for position in (*rebuilt, *(plan.ahead(k)[0] if step.input_first else ())):
            found[position].append(2 * n - k)
    return [(min(slots), max(slots)) for slots in found]


def first_writers(plan: ExecutionPlan) -> dict[int, tuple[int, int]]:
    """Who writes a tensor's gradient first in backward: (step, input position); (-1, -1) is the loss."""
    writers = {plan.output: (-1, -1)}
    for k in reversed(range(len(plan.steps))):
        for i, tensor in enumerate(plan.steps[k].inputs):
            writers.setdefault(tensor, (k, i))
    return writers
