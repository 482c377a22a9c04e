"""Where everything of a plan lies in one block of memory: tensors, what operators keep, scratch, partial gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.nn.lifetimes import Key, lifetimes
from hpctrain.nn.memory import pack
from hpctrain.nn.plan import ExecutionPlan


@dataclass(frozen=True)
class Arena:
    """Byte offsets of the blocks of `nn.lifetimes`, and the size of it all."""

    offsets: Mapping[Key, int]
    total_bytes: int


def arrange(plan: ExecutionPlan) -> Arena:
    """Pure: allocates nothing."""
    blocks = lifetimes(plan)
    offsets, total_bytes = pack(list(blocks.values()))
    return Arena(dict(zip(blocks, offsets, strict=True)), total_bytes)
