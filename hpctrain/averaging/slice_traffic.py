"""Slices on a link, and how long they take: gradients, factors or the largest elements, in full or rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.averaging.rounding import Rounding, wire_bytes
from hpctrain.averaging.slicing import INDEX_BYTES, Slice
from hpctrain.comm.link import LinkModel


@dataclass(frozen=True)
class SliceTraffic:
    """The slices that ranks exchange in a step.

    Attributes:
        item_bytes: of an element in memory. batch: nominal samples of a step over all ranks, for the errors of linear layers.
        rounding: how gradients and parameters travel.
        norms: slices that are gathered once norms of all of them are complete.
    """

    slices: Sequence[Slice]
    ranks: int
    item_bytes: int
    batch: int
    rounding: Rounding = field(default_factory=Rounding)
    norms: Sequence[range] = ()

    def reduce_seconds(self, piece: Slice, link: LinkModel) -> float:
        """Seconds until a slice's sum is where it is used: reduced, or made from errors; in a node and across, if compressed."""
        if piece.compression is not None:
            nodes, per_node = piece.compression.nodes, self.ranks // piece.compression.nodes
            message = piece.compression.kept(piece.owned_size(0, self.ranks)) * (self.item_bytes + INDEX_BYTES)
            within = link.allgather_seconds(piece.size * self.item_bytes, per_node)
            return within + link.allgather_seconds(nodes * message, nodes)
        if piece.sufficient_factors:
            return link.allgather_seconds(self.batch * piece.unit * self.item_bytes, self.ranks)
        return link.allgather_seconds(wire_bytes(piece.size, self.item_bytes, self.rounding.gradients), self.ranks)

    def gather_seconds(self, piece: Slice, link: LinkModel) -> float:
        """Seconds of the allgather of a slice's parameters: of all ranks, or of a node's, if it is compressed."""
        n_bytes = wire_bytes(piece.size, self.item_bytes, self.rounding.parameters)
        return link.allgather_seconds(n_bytes, self.ranks // piece.copies)
