"""The samples of a file that each rank reads, and those that it receives, where a job fills the memory of all nodes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class FillingPlan:
    """Samples 0 .. samples - 1 in chunks, one after another; in a round every rank reads one and sends it to the other memories.

    It follows from numbers that every rank knows, so nobody asks anybody.

    Args:
        samples: that every memory has a place for. at_once: samples of a chunk.
        memory_of: for each rank, the number of the memory that it shares with others, from 0.
    """

    samples: int
    at_once: int
    memory_of: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Rounds until all samples were read."""
        return -(-self.samples // (self.at_once * len(self.memory_of)))

    def done_after(self, rounds: int) -> int:
        """Samples that every memory holds after so many rounds."""
        return min(self.samples, rounds * self.at_once * len(self.memory_of))

    def chunk(self, turn: int, rank: int) -> tuple[int, int]:
        """The first sample that a rank reads in a round, and the one behind its last; both are the same where it reads none."""
        first = min(self.samples, self._number(turn, rank) * self.at_once)
        return first, min(self.samples, first + self.at_once)

    def receivers(self, turn: int, rank: int) -> tuple[int, ...]:
        """The ranks to which a rank sends what it reads in a round: one of each other memory, all of them in turn."""
        first, stop = self.chunk(turn, rank)
        if first == stop:
            return ()
        number = self._number(turn, rank)
        others = (ranks for memory, ranks in enumerate(self._ranks_of) if memory != self.memory_of[rank])
        return tuple(ranks[number % len(ranks)] for ranks in others)

    def senders(self, turn: int, rank: int) -> tuple[int, ...]:
        """The ranks whose chunks a rank receives in a round."""
        others = (other for other, memory in enumerate(self.memory_of) if memory != self.memory_of[rank])
        return tuple(other for other in others if rank in self.receivers(turn, other))

    @cached_property
    def _ranks_of(self) -> Sequence[Sequence[int]]:
        """The ranks of each memory."""
        ranks_of: list[list[int]] = [[] for _ in range(max(self.memory_of) + 1)]
        for rank, memory in enumerate(self.memory_of):
            ranks_of[memory].append(rank)
        return ranks_of

    def _number(self, turn: int, rank: int) -> int:
        return turn * len(self.memory_of) + rank
