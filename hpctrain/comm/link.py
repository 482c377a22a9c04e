"""The link model: what an operation among ranks costs, from two measured numbers.

Every rank has one link, full duplex. Costs are those of the bandwidth-optimal algorithms (rings; recursive halving and doubling
move the same bytes), after Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005. n is the size of the whole buffer in bytes, P the number of ranks; one rank costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkModel:
    """Attributes: alpha_seconds: time of an empty message. beta_seconds_per_byte: the inverse of the link's rate."""

    alpha_seconds: float
    beta_seconds_per_byte: float

    def __post_init__(self) -> None:
        if self.alpha_seconds < 0 or self.beta_seconds_per_byte < 0:
            raise ValueError(f"A link's alpha and beta must not be negative, but got {self}; the nearest legal value is 0.")

    def point_to_point_seconds(self, n_bytes: int) -> float:
        """alpha + n beta."""
        return self.alpha_seconds + n_bytes * self.beta_seconds_per_byte

    def reduce_scatter_seconds(self, n_bytes: int, ranks: int) -> float:
        """(P - 1) alpha + (P - 1) / P n beta; n is the size of the buffer that every rank sends."""
        return (ranks - 1) * (self.alpha_seconds + n_bytes / ranks * self.beta_seconds_per_byte)

    def allgather_seconds(self, n_bytes: int, ranks: int) -> float:
        """(P - 1) alpha + (P - 1) / P n beta; n is the size of the gathered buffer."""
        return self.reduce_scatter_seconds(n_bytes, ranks)

    def allreduce_seconds(self, n_bytes: int, ranks: int) -> float:
        """2 (P - 1) alpha + 2 (P - 1) / P n beta: a reduce-scatter, then an allgather."""
        return self.reduce_scatter_seconds(n_bytes, ranks) + self.allgather_seconds(n_bytes, ranks)

    def alltoall_seconds(self, n_bytes: int, ranks: int) -> float:
        """(P - 1) alpha + (P - 1) / P n beta; n is the largest buffer that a rank sends or receives."""
        return self.reduce_scatter_seconds(n_bytes, ranks)

    def broadcast_seconds(self, n_bytes: int, ranks: int) -> float:
        """ceil(log2 P) (alpha + n beta): a binomial tree."""
        return _rounds(ranks) * self.point_to_point_seconds(n_bytes)

    def barrier_seconds(self, ranks: int) -> float:
        """ceil(log2 P) alpha: dissemination."""
        return _rounds(ranks) * self.alpha_seconds


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()
