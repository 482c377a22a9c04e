"""Bytes of memory that one rank's share of a move between layouts reads and writes: packing, local copies and unpacking."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.backend.operators import Operator
from hpctrain.core.intervals import size_of
from hpctrain.nn.compile.plan import Action
from hpctrain.parallel.redistribute import RedistributeOperator, RedistributeSpec, ReduceScatterOperator, ReduceScatterSpec
from hpctrain.parallel.moves import Transfer


@dataclass(frozen=True)
class MoveTraffic:
    """Bytes read and written on one rank.

    packing: before the messages are posted. copying: while they travel. unpacking: when they have arrived.
    """

    packing: int
    copying: int
    unpacking: int

    @property
    def total(self) -> int:
        return self.packing + self.copying + self.unpacking


def is_move(operator: Operator) -> bool:
    """The operator exchanges messages with its split group."""
    return isinstance(getattr(operator, "spec", None), RedistributeSpec | ReduceScatterSpec)


def transfer_of(operator: Operator) -> Transfer:
    """A move's share of its rank."""
    assert isinstance(operator, RedistributeOperator | ReduceScatterOperator)
    return operator.share


def move_traffic(operator: Operator, action: Action, *, accumulate: bool = False) -> MoveTraffic:
    """The traffic of a move's phase: FORWARD, INPUT or RECOMPUTE; of all others, none.

    accumulate: the input's gradient is added to.
    """
    item_bytes, share = operator.inputs[0].item_bytes, transfer_of(operator)
    owned, wanted = operator.inputs[0].size, operator.output.size
    if isinstance(operator.spec, ReduceScatterSpec):  # the adjoint of a move from the owners to everybody
        owned, wanted = wanted, owned
        action = {Action.FORWARD: Action.INPUT, Action.INPUT: Action.FORWARD}.get(action, action)
    if action is Action.FORWARD:
        keeps = isinstance(operator, RedistributeOperator) and operator.recomputes_output
        elements = _forward(share, wanted, keeps=keeps)
    elif action is Action.INPUT:
        elements = _adjoint(share, owned, accumulate=accumulate)
    elif action is Action.RECOMPUTE:
        _, copying, unpacking = _forward(share, wanted, keeps=False)
        elements = 0, copying, unpacking
    else:
        elements = 0, 0, 0
    return MoveTraffic(*(count * item_bytes for count in elements))


def _forward(share: Transfer, wanted: int, *, keeps: bool) -> tuple[int, int, int]:
    """Elements read and written. wanted: of the local target. keeps: received ones are copied once more."""
    zeroed = wanted if share.gaps else 0
    return 2 * share.send_size, 2 * _local_size(share) + zeroed, (2 + 2 * keeps) * share.receive_size


def _adjoint(share: Transfer, owned: int, *, accumulate: bool) -> tuple[int, int, int]:
    """Elements read and written. owned: of the local source, which received gradients are added to."""
    zeroed = owned if share.spare and not accumulate else 0
    return 2 * share.receive_size, (2 + accumulate) * _local_size(share) + zeroed, 3 * share.send_size


def _local_size(share: Transfer) -> int:
    return 0 if share.local is None else size_of(share.local[0])
