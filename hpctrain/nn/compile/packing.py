"""Sixth pass: blocks with lifetimes packed into one arena. Pure arithmetic, no arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hpctrain.backend.operators import ALIGNMENT_BYTES, aligned


@dataclass(frozen=True)
class Block:
    """`size_bytes` that are live in all time slots from `first` to `last`, both included, and in each interval of `again`.

    The intervals are disjoint.
    """

    size_bytes: int
    first: int
    last: int
    again: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The intervals of time slots in which it is live."""
        return ((self.first, self.last), *self.again)

    @property
    def slots(self) -> int:
        """In how many time slots it is live."""
        return sum(last - first + 1 for first, last in self.spans)

    def meets(self, other: Block) -> bool:
        """True where some time slot belongs to both."""
        return any(a[0] <= b[1] and b[0] <= a[1] for a in self.spans for b in other.spans)


def pack(blocks: Sequence[Block], alignment_bytes: int = ALIGNMENT_BYTES) -> tuple[list[int], int]:
    """Byte offsets of the blocks and the size of the arena; blocks that live at one time never overlap.

    Greedy, each block in the smallest gap that holds it (Pisarchyk and Lee 2020, "greedy by size for offset calculation"), by
    size, by size times life and by life, whichever needs least. Offsets are multiples of `alignment_bytes`. Deterministic, so the
    same on every rank.
    """
    orders: tuple[Callable[[Block], tuple[int, ...]], ...] = (
        lambda block: (-block.size_bytes,),
        lambda block: (-block.size_bytes * block.slots,),
        lambda block: (-block.slots, -block.size_bytes),
    )
    bound = lower_bound(blocks, alignment_bytes)
    sizes = [aligned(block.size_bytes, alignment_bytes) for block in blocks]
    meets = meetings(blocks)
    best: tuple[list[int], int] | None = None
    for order in orders:
        found = _pack(sorted(range(len(blocks)), key=lambda i: (*order(blocks[i]), i)), sizes, meets)
        if best is None or found[1] < best[1]:
            best = found
        if best[1] == bound:
            break
    assert best is not None
    return best


def meetings(blocks: Sequence[Block]) -> np.ndarray:
    """Whether two blocks live at one time: bool (blocks, blocks)."""
    if not blocks:
        return np.zeros((0, 0), bool)
    spans = np.array([span for block in blocks for span in block.spans])
    first, last = spans[:, 0], spans[:, 1]
    both = (first[:, None] <= last) & (first <= last[:, None])
    counts = [len(block.spans) for block in blocks]
    of_blocks = np.cumsum([0, *counts[:-1]])
    meets: np.ndarray = both[np.ix_(of_blocks, of_blocks)]
    for k in np.flatnonzero(np.array(counts) > 1):  # few blocks live in several intervals
        row = np.logical_or.reduceat(both[of_blocks[k] : of_blocks[k] + counts[k]].any(axis=0), of_blocks)
        meets[k] |= row
        meets[:, k] |= row
    return meets


def _pack(order: Sequence[int], sizes: Sequence[int], meets: np.ndarray) -> tuple[list[int], int]:
    """Offsets, and the arena's size. order: of the blocks. sizes: aligned."""
    offsets, ends = np.zeros((2, len(sizes)), np.int64)
    placed = np.zeros(len(sizes), np.intp)  # those so far, by offset, then in order
    arena = 0
    for count, index in enumerate(order):
        among = placed[:count]
        neighbours = among[meets[index][among]]
        offset = _best_gap(offsets[neighbours], ends[neighbours], sizes[index])
        place = int(np.searchsorted(offsets[among], offset, "right"))
        placed[place + 1 : count + 1] = placed[place:count].copy()
        placed[place] = index
        offsets[index], ends[index] = offset, offset + sizes[index]
        arena = max(arena, offset + sizes[index])
    return offsets.tolist(), arena


def _best_gap(offsets: np.ndarray, ends: np.ndarray, size: int) -> int:
    """The offset of the smallest gap that holds `size`, the first of equals; behind all where none does.

    Args:
        offsets, ends: int64 (n,), of blocks by offset; they may overlap.
    """
    if not len(ends):
        return 0
    behind = np.maximum.accumulate(ends)
    rooms = offsets.copy()
    rooms[1:] -= behind[:-1]
    fitting = np.flatnonzero(rooms >= size)
    if not len(fitting):
        return int(behind[-1])
    best = int(fitting[np.argmin(rooms[fitting])])
    return int(behind[best - 1]) if best else 0


def lower_bound(blocks: Sequence[Block], alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Bytes that no packing can go below: the most that is live in one time slot."""
    changes: defaultdict[int, int] = defaultdict(int)
    for block in blocks:
        for first, last in block.spans:
            changes[first] += aligned(block.size_bytes, alignment_bytes)
            changes[last + 1] -= aligned(block.size_bytes, alignment_bytes)
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)
