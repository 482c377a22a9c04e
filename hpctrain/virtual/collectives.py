"""Collectives and messages among virtual ranks: what each party receives, and how long the modelled link takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import CollectiveMismatchError
from hpctrain_testing.virtual.operations import Array, Moments, PostedOperation, Posting


class Allreduce(PostedOperation):
    """The sum in rank order, the same bits for everyone."""

    _sum: Array | None = None

    def result(self, party: int) -> Array:
        if self._sum is None:
            self._sum = _sum_in_order(self.parts())
        return self._sum

    def seconds(self, link: LinkModel) -> float:
        return link.allreduce_seconds(self.parts_bytes(), len(self.members))

    def parts_bytes(self) -> int:
        return max(p.contribution.nbytes for p in self.postings if p is not None and p.contribution is not None)


class ReduceScatter(Allreduce):
    """Party r receives part r of the sum."""

    def result(self, party: int) -> Array:
        posting = self.postings[party]
        assert posting is not None
        start = sum(posting.send_counts[:party])
        return super().result(party)[start : start + posting.send_counts[party]]

    def seconds(self, link: LinkModel) -> float:
        return link.reduce_scatter_seconds(self.parts_bytes(), len(self.members))


class Allgather(PostedOperation):
    """All parts in rank order."""

    _gathered: Array | None = None

    def result(self, party: int) -> Array:
        if self._gathered is None:
            self._gathered = np.concatenate(self.parts())
        return self._gathered

    def seconds(self, link: LinkModel) -> float:
        gathered_bytes = max(p.target.nbytes for p in self.postings if p is not None and p.target is not None)
        return link.allgather_seconds(gathered_bytes, len(self.members))


class Alltoall(PostedOperation):
    """Part p of every party's buffer goes to party p. Counts agree in pairs."""

    def post(self, party: int, posting: Posting, moments: Moments) -> None:
        for other, first in enumerate(self.postings):
            if first is not None and first.kind == posting.kind:
                there = first.send_counts[party], first.recv_counts[party]
                here = posting.recv_counts[other], posting.send_counts[other]
                if there != here:
                    raise CollectiveMismatchError(self._mismatch(first, posting))
        super().post(party, posting, moments)

    def result(self, party: int) -> Array:
        pieces = []
        for posting in self.postings:
            assert posting is not None
            assert posting.taken is not None
            start = sum(posting.send_counts[:party])
            pieces.append(posting.taken[start : start + posting.send_counts[party]])
        return np.concatenate(pieces)

    def seconds(self, link: LinkModel) -> float:
        buffers = [buffer for p in self.postings if p for buffer in (p.contribution, p.target) if buffer is not None]
        return link.alltoall_seconds(max(buffer.nbytes for buffer in buffers), len(self.members))


class Broadcast(PostedOperation):
    """The root's buffer to everyone."""

    def result(self, party: int) -> Array | None:
        assert self.root is not None
        root = self.postings[self.root]
        assert root is not None
        return root.taken

    def bytes(self) -> int:
        root = self.postings[self.root or 0]
        assert root is not None
        assert root.contribution is not None
        return root.contribution.nbytes

    def seconds(self, link: LinkModel) -> float:
        return link.broadcast_seconds(self.bytes(), len(self.members))


class Message(Broadcast):
    """From party 0, the root, to party 1. Lengths must agree, as the receiver has no other way to know."""

    def fits(self, first: Posting, second: Posting) -> bool:
        return first.agreed == second.agreed

    def seconds(self, link: LinkModel) -> float:
        return 0.0 if self.members[0] is self.members[1] else link.point_to_point_seconds(self.bytes())

    def _mismatch(self, first: Posting, second: Posting) -> str:
        both = " and ".join(f"{p.kind} of rank {p.owner.rank} ({p.text}) at {p.line}" for p in (first, second))
        return f"A message and its receive must have the same length and type, but these differ: {both}."


class Barrier(PostedOperation):
    """Nothing is moved."""

    def result(self, party: int) -> None:
        return None

    def seconds(self, link: LinkModel) -> float:
        return link.barrier_seconds(len(self.members))


class ObjectExchange(PostedOperation):
    """Pickled values of all parties, read through `parts`. Set-up only, so it costs nothing."""

    def result(self, party: int) -> None:
        return None

    def seconds(self, link: LinkModel) -> float:
        return 0.0


def _sum_in_order(parts: Sequence[Array]) -> Array:
    total = parts[0].copy()
    with np.errstate(all="ignore"):  # a transport does not warn of overflow
        for part in parts[1:]:
            total += part
    return total
