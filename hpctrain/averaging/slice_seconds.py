"""How long a link takes to reduce and to gather a slice, whatever crosses it: gradients, factors or the largest elements."""

from __future__ import annotations

from hpctrain.averaging.slices import Slice
from hpctrain.comm.link import LinkModel

#: of an element's position, beside its value
INDEX_BYTES = 4


def reduce_seconds(piece: Slice, link: LinkModel, ranks: int, item_bytes: int, batch: int) -> float:
    """Seconds until a slice's sum is where it is used: reduced, or made from errors; within nodes and across, if compressed.

    Args:
        item_bytes: of an element. batch: nominal samples of a step over all ranks, for the errors of linear layers.
    """
    if piece.compression is not None:
        nodes, per_node = piece.compression.nodes, ranks // piece.compression.nodes
        message = piece.compression.kept(piece.owned_size(0, ranks)) * (item_bytes + INDEX_BYTES)
        return link.allgather_seconds(piece.size * item_bytes, per_node) + link.allgather_seconds(nodes * message, nodes)
    return link.allgather_seconds((batch * piece.unit if piece.sufficient_factors else piece.size) * item_bytes, ranks)


def gather_seconds(piece: Slice, link: LinkModel, ranks: int, item_bytes: int) -> float:
    """Seconds of the allgather of a slice's parameters: of all ranks, or of a node's, if it is compressed."""
    return link.allgather_seconds(piece.size * item_bytes, ranks // piece.copies)
