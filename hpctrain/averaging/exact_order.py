"""The options of averaging that cannot keep an order of sums that is the same on any number of ranks, each with its sentence."""

from __future__ import annotations

from hpctrain.averaging.strategy import Strategy
from hpctrain.core.errors import ConfigError, OptionError


def check_order(name: str, strategy: Strategy) -> None:
    """Nothing, where a strategy can add gradients up in the order of shards, or is asked for no order.

    Two levels are no fault: with shards, sums have one level.

    Args:
        name: of the strategy, for messages.

    Raises:
        ConfigError: it adds up something else. OptionError: an option that does not go with such an order.
    """
    group, options = strategy.group, strategy.options
    if group.shards is None:
        return
    if not strategy.sums_shards:
        raise ConfigError(
            f"The averager {name} does not add up the gradients of each step as they are, which exact.shards needs; use sharded, "
            "priority, bucketed, overlap or blocking, or leave exact out."
        )
    for option in ("wire", "wire_parameters"):
        value = getattr(options, option, "float32")
        if value != "float32":
            raise OptionError(
                f"{option} is {value}, whose rounding follows the ranks, but exact.shards needs numbers as they are computed; "
                f"set {option} to float32.",
                option,
            )
    if getattr(options, "fc_exchange", None) == "always":
        raise OptionError(
            "fc_exchange is always, but products of exchanged inputs and errors add up samples in an order of their own, and "
            "exact.shards has another; set fc_exchange to auto or never.",
            "fc_exchange",
        )
