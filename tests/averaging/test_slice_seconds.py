"""How long slices take on a link, against sums that are made by hand."""

from __future__ import annotations

import pytest

from hpctrain.averaging.slice_seconds import gather_seconds, reduce_seconds
from hpctrain.averaging.slices import Compression, Slice
from hpctrain.comm.link import LinkModel

LINK = LinkModel(3.0, 0.5)


def test_a_dense_slice_crosses_all_ranks() -> None:
    piece = Slice("x", 0, 12, 0, ("x",))
    assert reduce_seconds(piece, LINK, 4, 8, 0) == gather_seconds(piece, LINK, 4, 8) == LINK.allgather_seconds(96, 4)


def test_factors_bring_errors_and_gather_rows() -> None:
    piece = Slice("x", 0, 12, 0, ("x",), unit=3, sufficient_factors=True)
    assert reduce_seconds(piece, LINK, 4, 8, batch=10) == LINK.allgather_seconds(10 * 3 * 8, 4)
    assert gather_seconds(piece, LINK, 4, 8) == LINK.allgather_seconds(96, 4)


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 1), (2, 2), (2, 3)])
def test_of_a_compressed_slice_only_messages_cross_nodes(nodes: int, per_node: int) -> None:
    piece = Slice("x", 0, 1200, 0, ("x",), compression=Compression(nodes, 0.1))
    ranks, kept = nodes * per_node, 120 // per_node
    within = (per_node - 1) * (3.0 + 0.5 * 4 * 1200 / per_node)
    across = (nodes - 1) * (3.0 + 0.5 * 8 * kept)
    assert reduce_seconds(piece, LINK, ranks, 4, 0) == pytest.approx(within + across)
    assert gather_seconds(piece, LINK, ranks, 4) == pytest.approx(within)
