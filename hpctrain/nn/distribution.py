"""The seam between a network and its distribution over ranks: what one rank does of a model. The engine knows no rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.backend.operators import Operator
from hpctrain.backend.graph import Graph


@dataclass(frozen=True)
class Shard:
    """A rank's part of a split parameter or statistic: elements [start, stop) of one dim."""

    dim: int
    interval: tuple[int, int]

    @property
    def index(self) -> tuple[slice | type(Ellipsis), ...]:  # type: ignore[valid-type]
        """The index of this part in an array that holds the whole."""
        interval = slice(*self.interval)
        return (interval,) if self.dim == 0 else (Ellipsis, interval)


class Distribution(Protocol):
    """The share of a model that one rank computes.

    Attributes:
        ranks: that compute together, of a split group.
    """

    @property
    def ranks(self) -> int: ...

    def prepare(self, graph: Graph) -> None:
        """Take the model, lowered for one sample; called before all else, and for images of each further shape."""
        ...

    def local(self, graph: Graph, counts: Sequence[int]) -> Graph:
        """This rank's graph, where the ranks of its split group hold `counts` samples of `graph`."""
        ...

    def message_bytes(self, operators: Sequence[Operator]) -> int:
        """Memory that these operators of one program take for messages inside the split group, beside the arena."""
        ...

    def shard(self, name: str) -> Shard | None:
        """This rank's part of a parameter or statistic, by full name; None: it holds all of it."""
        ...

    def contributes(self, name: str) -> tuple[bool, bool]:
        """Whether this rank adds a statistic to the step's sums for its own samples, and for those of its split group."""
        ...


class Undistributed:
    """A rank that computes whole layers on its own samples."""

    ranks: int = 1

    def prepare(self, graph: Graph) -> None:
        return None

    def local(self, graph: Graph, counts: Sequence[int]) -> Graph:
        return graph

    def message_bytes(self, operators: Sequence[Operator]) -> int:
        return 0

    def shard(self, name: str) -> Shard | None:
        return None

    def contributes(self, name: str) -> tuple[bool, bool]:
        return True, False
