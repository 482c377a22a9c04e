"""When it pays to send the largest elements of a slice alone: predicted from bytes, messages and the work of choosing.

Between m nodes, a part of d elements of b_v bytes costs 2 (m - 1) (alpha + d b_v beta / m) where all of it is reduced and
gathered, and (m - 1) (alpha + k (b_v + b_i) beta) + c d where the k largest travel with positions of b_i bytes, of which choosing
and updating take c seconds for each of the d. Without alpha and c that is less for k / d < 2 b_v / (m (b_v + b_i)). What travels
within nodes is the same in both cases, and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.averaging.slicing import INDEX_BYTES
from hpctrain.comm.link import LinkModel

#: of an element of a part, float32, on one core of a server: 2 ns to add the residual and to choose (benchmarks/compress.py), and
#: 1 ns as all nodes update it, not one of m
SELECTION_SECONDS = 3e-9


@dataclass(frozen=True)
class PartOnLink:
    """A part that crosses between nodes.

    Attributes:
        elements: d. nodes: m. item_bytes: b_v. selection_seconds: c, of an element; 0: bytes and messages alone decide.
    """

    elements: int
    nodes: int
    item_bytes: int
    selection_seconds: float = 0.0

    @property
    def pair_bytes(self) -> int:
        """Bytes of a value and its position."""
        return self.item_bytes + INDEX_BYTES

    def dense_seconds(self, link: LinkModel) -> float:
        """Seconds of the reduce-scatter and the allgather of all elements."""
        return 2 * link.allgather_seconds(self.elements * self.item_bytes, self.nodes)

    def sparse_seconds(self, link: LinkModel, kept: int) -> float:
        """Seconds of choosing `kept` elements and of their allgather."""
        messages = link.allgather_seconds(self.nodes * kept * self.pair_bytes, self.nodes)
        return messages + self.elements * self.selection_seconds


def sparse_pays(part: PartOnLink, link: LinkModel, kept: int) -> bool:
    """Whether sending `kept` elements of a part takes less time than sending all of it."""
    return part.nodes > 1 and part.sparse_seconds(link, kept) < part.dense_seconds(link)


def crossover_density(part: PartOnLink, link: LinkModel) -> float:
    """The share of elements below which it pays; 0 or less where it never does."""
    others = part.nodes - 1
    spare = part.dense_seconds(link) - part.elements * part.selection_seconds - others * link.alpha_seconds
    return spare / (others * part.pair_bytes * link.beta_seconds_per_byte * part.elements)
