"""The configured strategy of a parameter group: made alike for a run, for a plan without ranks, and to check its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.averaging.agreement import check_order
from hpctrain.averaging.base import PlannedGroup, Strategy
from hpctrain.core.errors import ConfigError
from hpctrain.core.registry import Registry

#: keywords that the program gives, or knows by itself from other keys: none of them is an option
_GIVEN = ("group", "optimizer", "comm", "progress", "norms", "nodes", "nominal_batch", "micro_batches")
AVERAGERS: Registry[Strategy] = Registry("hpctrain.averaging.strategies", "averager", Strategy, _GIVEN)


def make_strategy(name: str, options: Mapping[str, Any], group: PlannedGroup) -> Strategy:
    """The strategy of that name for one group of parameters. Pure.

    Raises:
        ConfigError: an unknown name, an option that is wrong or does not fit the group, norms that the strategy does not add up,
            or an order of sums that it cannot keep.
    """
    strategy = AVERAGERS.create(name, options, group=group)
    check_order(name, strategy)
    if group.needs_norms and not strategy.adds_norms:
        raise ConfigError(
            f"The averager {name} adds up no norms (its class does not set adds_norms), which optimizer.clip_norm and lars need; "
            f"leave clip_norm out and use sgd, or use another averager."
        )
    return strategy
