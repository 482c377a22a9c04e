"""Traffic of moves against the elements that ranks hand to the communicator, which bytes of plans are counted from."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.boxes import even_intervals, intersect, shape_of, size_of
from hpctrain.nn.compile.plan import Action
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.redistribute import RedistributeSpec, ReduceScatterSpec
from hpctrain.parallel.transfer import moved, moved_back
from hpctrain.planner.move_traffic import is_move, move_traffic

SHAPE = (6, 8, 4, 5)
ITEM = 4


def _halo(ranks: int) -> Layout:
    boxes = []
    for start, stop in even_intervals(SHAPE[1], ranks):
        boxes.append(((0, 6), (start - 1, stop + 1), (0, 4), (0, 5)))
    return layout.needed(SHAPE, boxes)


LAYOUTS = {
    "samples": lambda ranks: layout.samples(SHAPE, [3, 2, 1, 0] if ranks == 4 else [4, 2]),
    "channels": lambda ranks: layout.channels(SHAPE, even_intervals(SHAPE[-1], ranks)),
    "tiles": lambda ranks: layout.tiles(SHAPE, (ranks, 1)),
    "everything": lambda ranks: layout.everything(SHAPE, ranks),
    "halo": _halo,
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("target", sorted(LAYOUTS))
@pytest.mark.parametrize("source", ["samples", "channels", "tiles"])
def test_what_is_packed_is_sent_and_what_arrives_is_unpacked(source: str, target: str, ranks: int) -> None:
    from_layout, to_layout = LAYOUTS[source](ranks), LAYOUTS[target](ranks)
    sent, returned = moved(from_layout, to_layout), moved_back(from_layout, to_layout)
    for rank in range(ranks):
        spec = RedistributeSpec(from_layout, to_layout, rank, "move", None)  # type: ignore[arg-type]
        operator = spec.operator((TensorSpec(shape_of(from_layout.boxes[rank])),), training=True)
        assert is_move(operator)
        common = intersect(from_layout.boxes[rank], to_layout.boxes[rank])
        local = 0 if common is None else size_of(common)
        there, back = move_traffic(operator, Action.FORWARD), move_traffic(operator, Action.INPUT, accumulate=True)
        assert there.packing == 2 * ITEM * sent[rank]
        assert back.packing == 2 * ITEM * returned[rank]
        keeps = 2 if operator.saved_bytes else 1
        assert there.unpacking == 2 * keeps * ITEM * returned[rank]
        assert back.unpacking == 3 * ITEM * sent[rank]
        assert back.copying == 3 * ITEM * local
        gaps = local + returned[rank] < operator.output.size
        assert there.copying == ITEM * (2 * local + gaps * operator.output.size)
        again = move_traffic(operator, Action.RECOMPUTE)
        assert (again.packing, again.copying, again.unpacking) == (0, there.copying, 2 * ITEM * returned[rank])
        assert move_traffic(operator, Action.BEGIN).total == move_traffic(operator, Action.FREE).total == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_is_the_adjoint_of_a_move_to_everybody(ranks: int) -> None:
    owners, summands = LAYOUTS["channels"](ranks), LAYOUTS["everything"](ranks)
    for rank in range(ranks):
        move = RedistributeSpec(owners, summands, rank, "move", None)  # type: ignore[arg-type]
        total = ReduceScatterSpec(owners, summands, rank, "sum", None)  # type: ignore[arg-type]
        forth = move.operator((TensorSpec(shape_of(owners.boxes[rank])),), training=False)
        back = total.operator((TensorSpec(SHAPE),), training=False)
        assert move_traffic(back, Action.FORWARD) == move_traffic(forth, Action.INPUT)
        assert move_traffic(back, Action.INPUT) == move_traffic(forth, Action.FORWARD)
