"""Sums over ranks in an order of additions that the number of ranks does not change: that of a tree over shards.

A reduce-scatter becomes an all-to-all of parts and a local sum in the order of the tree (`summation_tree`), an allreduce that and
an allgather of the sums. Where each rank has one term, the bytes are those of a ring. A rank with several terms sends all of
them: another order of additions would be needed to send one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from hpctrain.core.intervals import even
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.spare_buffers import SpareBuffers
from hpctrain.comm.order import Finished, Stages
from hpctrain.summation_tree import ShardsOfRank

#: this rank's terms of a sum, in order: one array, or a tuple of arrays of one size
Terms = np.ndarray | tuple[np.ndarray, ...]


class TreeSums:
    """Sums of 1-D arrays of float32 or float64 over the ranks of a communicator, in the order of a tree.

    Args:
        comm: carries the parts; other operations may be posted on it in between. shards: those of its ranks.
        gathers: the same ranks in the same order, for the second stage of allreduces alone; None: there are none.
    """

    def __init__(self, comm: Communicator, shards: ShardsOfRank, gathers: Communicator | None = None) -> None:
        assert (comm.rank, comm.size) == (shards.rank, shards.ranks)
        self._comm, self._gathers = comm, gathers
        self._terms_of = shards.sums_of_ranks
        self._additions = shards.additions_of_ranks
        self._spare = SpareBuffers()
        self._allreduces = Stages()

    def ireduce_scatter(self, send: Terms, recv: np.ndarray, counts: Sequence[int]) -> Handle:
        """As a communicator's; `send` has this rank's terms. Where there are several, they may be used again on return."""
        message, received = self._message(send, counts), self._received(counts, recv)
        handle = self._post(message, received, counts)

        def finish() -> None:
            self._add(received, recv)
            self._give_back(send, message, received)

        return Finished(handle, finish)

    def iallreduce(self, buffer: Terms) -> Handle:
        """As a communicator's; the sum is put into the last of this rank's terms."""
        gathers, rank = self._gathers, self._comm.rank
        assert gathers is not None, "these sums were made for reduce-scatters only"
        target = buffer[-1] if isinstance(buffer, tuple) else buffer
        counts = even(target.size, self._comm.size)
        message, received = self._message(buffer, counts), self._received(counts, target)
        handle = self._post(message, received, counts)
        start = sum(counts[:rank])

        def gather() -> Handle:
            self._add(received, target[start : start + counts[rank]])
            self._give_back(buffer, message, received)
            return gathers.iallgather(None, target, counts)

        return self._allreduces.add(handle, gather)

    def _message(self, terms: Terms, counts: Sequence[int]) -> np.ndarray:
        """For each rank its part of all terms, one after the other: the very term, where there is one."""
        if not isinstance(terms, tuple):
            return terms
        message: np.ndarray = self._spare.take(len(terms) * terms[0].size, terms[0])
        place = 0
        for start, stop in pairwise(accumulate(counts, initial=0)):
            for term in terms:
                message[place : place + stop - start] = term[start:stop]
                place += stop - start
        return message

    def _received(self, counts: Sequence[int], like: np.ndarray) -> np.ndarray:
        """A buffer for this rank's part of all ranks' terms."""
        received: np.ndarray = self._spare.take(sum(self._terms_of) * counts[self._comm.rank], like)
        return received

    def _post(self, message: np.ndarray, received: np.ndarray, counts: Sequence[int]) -> Handle:
        own, terms = counts[self._comm.rank], self._terms_of
        sent = [count * terms[self._comm.rank] for count in counts]
        return self._comm.ialltoall(message, received, sent, [own * number for number in terms])

    def _add(self, received: np.ndarray, total: np.ndarray) -> None:
        """Sum the terms of all ranks into `total`; the last addition writes there."""
        if not total.size:
            return
        terms = received.reshape(-1, total.size)
        with np.errstate(all="ignore"):  # a transport does not warn of overflow
            for step in self._additions[:-1]:
                terms[step.left] += terms[step.right]
            last = self._additions[-1]
            np.add(terms[last.left], terms[last.right], out=total)

    def _give_back(self, terms: Terms, message: np.ndarray, received: np.ndarray) -> None:
        self._spare.give_back(received)
        if isinstance(terms, tuple):
            self._spare.give_back(message)


def tree_sums_over(comm: Communicator, shards: ShardsOfRank, *, allreduces: bool) -> TreeSums | None:
    """The sums over `comm` in the order of the tree; None where one rank has all shards. Collective; set-up.

    Args:
        allreduces: they are asked for allreduces, too, which need a communicator of their own.
    """
    if comm.size == 1:
        return None
    gathers = comm.split(0, comm.rank, f"{comm.name} sums") if allreduces else None
    return TreeSums(comm, shards, gathers)
