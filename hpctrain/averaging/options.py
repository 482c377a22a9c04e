"""Options that several strategies have, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.averaging.rounding import check_wire
from hpctrain.averaging.slice_sizes import Sizes
from hpctrain.comm.sums import Wire
from hpctrain.core.errors import OptionError


@dataclass(frozen=True)
class NoOptions:
    """The options of a strategy that has none."""


@dataclass(frozen=True)
class WireOptions:
    """Options of strategies that send each gradient once, in messages whose sizes are not for choice.

    Args:
        wire: How gradients travel: "float32" as they are computed; "bfloat16" and "float16" rounded to 16 bits, and added up in
            full precision.

    Raises:
        OptionError: an unknown value of wire.
    """

    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(wire=self.wire)


def check_at_least_one(**values: int | None) -> None:
    """Check options that are counts; None: not set by hand.

    Raises:
        OptionError: a value is below 1; the first one.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise OptionError(f"{name} is {value}, but must be at least 1.", name)


def check_sizes(sizes: Sizes, **by_hand: int | None) -> None:
    """Check that sizes are not to be measured where an option sets them by hand.

    Raises:
        OptionError: both are given.
    """
    for name, value in by_hand.items():
        if sizes == "measured" and value is not None:
            raise OptionError(f"sizes is measured, but {name} is {value}, which sets them; leave one of the two out.", "sizes")


def words_of_sizes(sizes: Sizes) -> str:
    """The words that the option adds to those that a stored schedule is known by; sizes by rule, the default, add nothing."""
    return ", sizes measured" if sizes == "measured" else ""
