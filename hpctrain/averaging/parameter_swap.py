"""Parameters and a state of the same size that their owners keep, such as their average: exchanged without a copy, or copied."""

from __future__ import annotations

from hpctrain.averaging.base import GradientAverager


def copy_parameters(averager: GradientAverager, state: str) -> None:
    """Make the optimiser's state of that name what the parameters are, in this rank's own parts. After `drain`."""
    group = averager.group
    for segment in averager.owned():
        if segment.size:
            group.arithmetic.copy(averager.optimizer.state(segment)[state], group.data[segment.start : segment.stop])


def swap_parameters(averager: GradientAverager, state: str) -> None:
    """Exchange the parameters with the optimiser's state of that name, on every rank; a second time undoes it.

    Each owner swaps its own parts, one segment at a time, and the other ranks get what the owners then have. Collective; after
    `drain`.
    """
    group = averager.group
    arithmetic = group.arithmetic
    owned = [segment for segment in averager.owned() if segment.size]
    spare = arithmetic.zeros(max((segment.size for segment in owned), default=0), group.dtype)
    for segment in owned:
        data, other = group.data[segment.start : segment.stop], averager.optimizer.state(segment)[state]
        arithmetic.copy(spare[: segment.size], data)
        arithmetic.copy(data, other)
        arithmetic.copy(other, spare[: segment.size])
    if averager.gather_parameters is not None:
        averager.gather_parameters()
    group.refresh_shadow()
