"""Sixth pass: blocks with lifetimes packed into one arena. Pure arithmetic, no arrays."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpctrain.backend.alignment import ALIGNMENT_BYTES, aligned


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

    @property
    def live(self) -> int:
        """Its time slots as the bits of a number: two blocks meet in the bits that both have."""
        return sum(((1 << (last - first + 1)) - 1) << first for first, last in self.spans)

    def meets(self, other: Block) -> bool:
        """True where some time slot belongs to both."""
        return bool(self.live & other.live)


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
    best: tuple[list[int], int] | None = None
    for order in orders:
        found = _pack(blocks, order, alignment_bytes)
        if best is None or found[1] < best[1]:
            best = found
        if best[1] == bound:
            break
    assert best is not None
    return best


def _pack(blocks: Sequence[Block], order: Callable[[Block], tuple[int, ...]], alignment_bytes: int) -> tuple[list[int], int]:
    offsets = [0] * len(blocks)
    placed: list[tuple[int, int, int]] = []  # (offset, end, its time slots), by offset, then in order
    arena = 0
    for index in sorted(range(len(blocks)), key=lambda i: (*order(blocks[i]), i)):
        block = blocks[index]
        size = aligned(block.size_bytes, alignment_bytes)
        live = block.live
        offset = _best_gap(placed, live, size)
        offsets[index] = offset
        insort(placed, (offset, offset + size, live), key=lambda entry: entry[0])
        arena = max(arena, offset + size)
    return offsets, arena


def _best_gap(placed: Sequence[tuple[int, int, int]], live: int, size: int) -> int:
    best_offset, best_room = -1, 0
    cursor = 0
    for offset, end, other in placed:
        if not live & other:
            continue
        room = offset - cursor
        if room >= size and (best_offset < 0 or room < best_room):
            best_offset, best_room = cursor, room
        cursor = max(cursor, end)
    return cursor if best_offset < 0 else best_offset


def lower_bound(blocks: Sequence[Block], alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Bytes that no packing can go below: the most that is live in one time slot."""
    changes: defaultdict[int, int] = defaultdict(int)
    for block in blocks:
        for first, last in block.spans:
            changes[first] += aligned(block.size_bytes, alignment_bytes)
            changes[last + 1] -= aligned(block.size_bytes, alignment_bytes)
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)
