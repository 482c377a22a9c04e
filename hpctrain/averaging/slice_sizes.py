"""How large slices are: from bytes, ranks, a link's alpha and beta, and what an operation costs a core.

Sizes decide which numbers are added first, so a repeated run needs the same ones: by default they follow by rule, from bytes and
ranks. What is measured then decides the order of operations only, which changes no bit.
"""

from __future__ import annotations

import math
from typing import Literal

from hpctrain.averaging.step_times import Times
from hpctrain.comm.link import LinkModel
from hpctrain.nn.parameter import GroupLayout

Sizes = Literal["rule", "measured"]
#: the link that sizes by rule are made for: a message costs as much as 64 KiB. Networks lie between 25 KiB (20 us at 10 Gb/s) and
#: some 200 KiB (shared memory); fused slices go with the square root of it, so they are never far from what is best. An operation
#: takes as long of a core as 6 KiB on the link: 50 us at 1 Gb/s, where it matters most which slices go first
RULE_LINK = LinkModel(alpha_seconds=65.536e-6, beta_seconds_per_byte=1e-9, operation_seconds=6.144e-6)

_LEAST_BUCKET_BYTES = 1 << 14
# Above some 32 MB an MPI may allocate, and touch again, what it needs for a collective each time.
_LARGEST_BYTES = 1 << 24
_LEAST_PART_BYTES = 1 << 20
# A slice on its way holds up what becomes ready meanwhile, so large layers are cut: at a few times what latency asks for.
_LARGEST_IN_BUCKETS = 4
# Between two polls of the messages, where it has not been measured: a large operator of a network for images.
_OPERATOR_SECONDS = 0.02
_LEAST_WINDOW = 4
# A message needs several polls on both sides, for its handshake and its end.
_POLLS = 3


def bucket_bytes(total_bytes: int, ranks: int, link: LinkModel | None) -> int:
    """The size of fused slices that a step exposes least with; a power of two.

    k slices of n / k bytes cost k (P - 1) alpha in latency, and the last one, which backward cannot hide, (P - 1) / P n / k beta.
    The sum is least at slices of sqrt(n P alpha / beta) bytes.
    """
    if ranks == 1 or link is None or link.beta_seconds_per_byte == 0.0:
        return max(_LEAST_BUCKET_BYTES, total_bytes)
    best = math.sqrt(total_bytes * ranks * link.alpha_seconds / link.beta_seconds_per_byte)
    return int(2 ** round(math.log2(max(_LEAST_BUCKET_BYTES, min(best, total_bytes)))))


def slice_elements(bucket: int | None, layout: GroupLayout, ranks: int, link: LinkModel | None) -> tuple[int, int]:
    """Least elements of fused slices, and the number above which one is cut.

    Args:
        bucket: bytes of a fused slice; None: those that a step exposes least with on `link`.
    """
    if bucket is None:
        bucket = bucket_bytes(layout.size * layout.item_bytes, ranks, link)
    return max(1, bucket // layout.item_bytes), max(1, largest_bytes(bucket) // layout.item_bytes)


def largest_bytes(bucket: int) -> int:
    """The size above which a slice is cut, where fused ones have `bucket` bytes."""
    return max(bucket, min(_LARGEST_IN_BUCKETS * bucket, _LARGEST_BYTES))


def slice_bytes(least: int, total_bytes: int, ranks: int, link: LinkModel | None) -> int:
    """The size of slices that may overtake each other, at least `least`: no smaller than what each costs a core allows.

    Several are in flight and hide each other's latency, but not what each takes of a core that computes: c for each of the P - 1
    messages of a reduction and of a gather. k slices of n / k bytes cost 2 k (P - 1) c of that, and the last one, which nothing
    hides, is twice (P - 1) / P n / k beta on its way. The sum is least at slices of sqrt(n P c / beta) bytes. The result is the
    nearest power of two times `least`; never so large that it had to be cut for another reason.
    """
    if ranks == 1 or link is None or link.beta_seconds_per_byte == 0.0:
        return least
    best = math.sqrt(total_bytes * ranks * link.operation_seconds / link.beta_seconds_per_byte)
    doublings = max(0, round(math.log2(max(best, 1.0) / least)))
    return max(least, min(least << doublings, _LARGEST_BYTES))


def parts_of(size: int, item_bytes: int, ranks: int) -> list[tuple[int, int]]:
    """[start, stop) of the collectives that an array of `size` elements is sent in, which cost no more than one of it all.

    They have 16 MiB at most, but no less than 1 MiB per rank, as latency grows with the ranks. Each but the last has a multiple
    of `ranks` elements, so that the ranks' parts add up to those of the whole.
    """
    most = max(1, max(_LARGEST_BYTES, ranks * _LEAST_PART_BYTES) // item_bytes)
    size_of_one = -(-size // max(1, -(-size // most)))
    step = max(1, -(-size_of_one // ranks)) * ranks
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]


def credit_window(size_bytes: int, ranks: int, link: LinkModel | None, times: Times | None) -> int | None:
    """How many slices of `size_bytes` in flight keep the link busy between polls; None: no limit.

    Args:
        times: measured ones; polls are at most as far apart as gradients are that become ready one after the other.
    """
    if link is None or ranks == 1:
        return None
    seconds = link.allgather_seconds(size_bytes, ranks)
    if seconds == 0.0:
        return None
    apart = _OPERATOR_SECONDS if times is None else times.longest_gap()
    return max(_LEAST_WINDOW, 1 + math.ceil(_POLLS * apart / seconds))
