"""How long slices take on a link, against sums that are made by hand."""

from __future__ import annotations

import pytest

from hpctrain.averaging.rounding import Rounding
from hpctrain.averaging.slice_traffic import SliceTraffic
from hpctrain.averaging.slices import Compression, Slice
from hpctrain.comm.link import LinkModel

LINK = LinkModel(3.0, 0.5)


def test_a_dense_slice_crosses_all_ranks() -> None:
    piece = Slice("x", 0, 12, 0, ("x",))
    traffic = SliceTraffic([piece], ranks=4, item_bytes=8, batch=0)
    assert traffic.reduce_seconds(piece, LINK) == traffic.gather_seconds(piece, LINK) == LINK.allgather_seconds(96, 4)


def test_a_rounded_slice_takes_as_long_as_its_bytes() -> None:
    """Factors travel in full precision."""
    piece, factors = (Slice("x", 0, 12, 0, ("x",), unit=3, sufficient_factors=exchanged) for exchanged in (False, True))
    gradients, both = (
        SliceTraffic([piece, factors], 4, 8, 10, Rounding("bfloat16", parameters)) for parameters in ("float32", "bfloat16")
    )
    assert gradients.reduce_seconds(piece, LINK) == both.gather_seconds(piece, LINK) == LINK.allgather_seconds(24, 4)
    assert gradients.reduce_seconds(factors, LINK) == LINK.allgather_seconds(10 * 3 * 8, 4)
    assert gradients.gather_seconds(piece, LINK) == LINK.allgather_seconds(96, 4)


def test_factors_bring_errors_and_gather_rows() -> None:
    piece = Slice("x", 0, 12, 0, ("x",), unit=3, sufficient_factors=True)
    traffic = SliceTraffic([piece], ranks=4, item_bytes=8, batch=10)
    assert traffic.reduce_seconds(piece, LINK) == LINK.allgather_seconds(10 * 3 * 8, 4)
    assert traffic.gather_seconds(piece, LINK) == LINK.allgather_seconds(96, 4)


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 1), (2, 2), (2, 3)])
def test_of_a_compressed_slice_only_messages_cross_nodes(nodes: int, per_node: int) -> None:
    piece = Slice("x", 0, 1200, 0, ("x",), compression=Compression(nodes, 0.1))
    traffic, kept = SliceTraffic([piece], nodes * per_node, 4, 0), 120 // per_node
    within = (per_node - 1) * (3.0 + 0.5 * 4 * 1200 / per_node)
    across = (nodes - 1) * (3.0 + 0.5 * 8 * kept)
    assert traffic.reduce_seconds(piece, LINK) == pytest.approx(within + across)
    assert traffic.gather_seconds(piece, LINK) == pytest.approx(within)
