"""The configured strategy of a parameter group: made alike for a run and for a plan without ranks, and priced for a planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from hpctrain.averaging.agreement import check_order
from hpctrain.averaging.base import PlannedGroup, Strategy, StrategyCosts
from hpctrain.core.errors import ConfigError
from hpctrain.core.registry import Registry, check_options

#: keywords that the program gives, or knows by itself from other keys: none of them is an option
_GIVEN = ("group", "optimizer", "comm", "progress", "norms", "nodes", "nominal_batch", "micro_batches")
AVERAGERS: Registry[Strategy] = Registry("hpctrain.averaging.strategies", "averager", Strategy, _GIVEN)


def strategy_costs(name: str, options: Mapping[str, Any]) -> StrategyCosts:
    """Return what a planner prices the strategy of that name by, the user's own included. Pure.

    Raises:
        ConfigError: an unknown name, or an option that is wrong.
    """
    strategy = cast(type[Strategy], AVERAGERS.find(name))
    with AVERAGERS.refusals(name):
        checked = check_options(strategy, f'averager "{name}"', options, AVERAGERS.given)
    return strategy.costs(checked["options"] if "options" in checked else strategy.Options())


def make_strategy(name: str, options: Mapping[str, Any], group: PlannedGroup) -> Strategy:
    """Make the strategy of that name for one group of parameters. Pure.

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
