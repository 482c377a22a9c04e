"""Everything that the steps of an averager change, read, exchanged and restored from outside of a step.

`unique_segments`: each element of a group and of its optimiser's state on one rank, for what is summed over ranks, such as
hashes. `swap_parameters`: parameters exchanged with a state of the same size that their owners keep, such as their average.
`UndoCopy`: a copy from which a step can be undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.arithmetic import Arithmetic, Array
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.core.intervals import even_interval
from hpctrain.nn.parameter import Segment


def unique_segments(averager: GradientAverager) -> Iterator[tuple[Segment, dict[str, Array]]]:
    """Yield segments that have each element of the group once over the ranks, with views of their state by name.

    Even shares where every rank has all. Gradients that are kept back are not among the states. Not collective; after `drain`.
    """
    if averager.counted is not None:
        yield from averager.counted()
        return
    assert type(averager).owned is GradientAverager.owned, "an averager whose ranks own parts defines which of them count"
    group, comm = averager.group, averager.comm
    for segment in group.covering(*even_interval(group.size, comm.size, comm.rank)):
        whole = group.segment(segment.parameter)
        place = slice(segment.start - whole.start, segment.stop - whole.start)
        # Optimisers know whole segments that they were given, and need not know parts of these.
        yield segment, {name: values[place] for name, values in averager.optimizer.state(whole).items()}


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


class UndoCopy:
    """A copy of what a step changes: parameters, the optimiser's state, gradients kept back, and counters.

    It takes as much memory as these. Nothing communicates, and nothing waits: copies are made where the arrays lie.
    """

    def __init__(self, averager: GradientAverager) -> None:
        self._averager, self._group = averager, averager.group
        # What is kept back may be on the host although kernels compute elsewhere.
        host, kernels = HostArithmetic(), self._group.arithmetic
        self._arrays: list[tuple[Array, Arithmetic]] = [
            (array, host if isinstance(array, np.ndarray) else kernels) for array in averager.changed()
        ]
        self._copies: list[Array] = [arithmetic.zeros(array.size, str(array.dtype)) for array, arithmetic in self._arrays]
        self._counters: Mapping[str, int] = {}

    def keep(self) -> None:
        """Remember all as it is. Between steps, after a drain."""
        for copy, (array, arithmetic) in zip(self._copies, self._arrays, strict=True):
            arithmetic.copy(copy, array)
        self._counters = self._averager.counters()

    def restore(self) -> None:
        """Make all as it was, to the last bit. Between steps, after a drain."""
        for copy, (array, arithmetic) in zip(self._copies, self._arrays, strict=True):
            arithmetic.copy(array, copy)
        self._group.refresh_shadow()
        # The next step announces parameters that it does not use with whatever gradient they hold.
        self._group.arithmetic.fill(self._group.grad, 0.0)
        self._averager.load_counters(self._counters)
        self._averager.undone()
