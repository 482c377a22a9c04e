"""State of an averager that steps change: iteration without duplicates, exchange with the parameters, and undoing of a step.

`unique_segments` yields each element of a group and of its optimiser's state on exactly one rank, for sums over ranks such as
hashes. `swap_parameters` exchanges the parameters with an optimiser state of the same size, such as their moving average.
`UndoCopy` is a copy from which a step can be undone.
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
    """Yield segments, with views of their state by name, that contain each element of the group exactly once over all ranks.

    If every rank holds all elements, each rank yields an even share. Gradients that are kept back are not included in the states.
    Not collective; call it after `drain`.
    """
    if averager.counted is not None:
        yield from averager.counted()
        return
    assert type(averager).owned is GradientAverager.owned, "an averager whose ranks own parts must define `counted`"
    group, comm = averager.group, averager.comm
    for segment in group.covering(*even_interval(group.size, comm.size, comm.rank)):
        whole = group.segment(segment.parameter)
        place = slice(segment.start - whole.start, segment.stop - whole.start)
        # An optimiser may find the state of bound segments only, not of parts of them.
        yield segment, {name: values[place] for name, values in averager.optimizer.state(whole).items()}


def copy_parameters(averager: GradientAverager, state: str) -> None:
    """Copy the parameters to the optimiser's state of that name, for segments that this rank owns. Call it after `drain`."""
    group = averager.group
    for segment in averager.owned():
        if segment.size:
            group.arithmetic.copy(averager.optimizer.state(segment)[state], group.data[segment.start : segment.stop])


def swap_parameters(averager: GradientAverager, state: str) -> None:
    """Exchange the parameters with the optimiser's state of that name, on every rank. A second call undoes the exchange.

    Each owner swaps its parts one segment at a time; then all ranks gather the result. Collective; call it after `drain`.
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
    """Copy of everything that a step changes: parameters, optimiser state, gradients that are kept back, and counters.

    It takes as much memory as the originals. Copying neither communicates nor waits: the copies of device arrays stay on the
    device.
    """

    def __init__(self, averager: GradientAverager) -> None:
        self._averager, self._group = averager, averager.group
        # Gradients that are kept back may be on the host although kernels run on a device.
        host, kernels = HostArithmetic(), self._group.arithmetic
        self._arrays: list[tuple[Array, Arithmetic]] = [
            (array, host if isinstance(array, np.ndarray) else kernels) for array in averager.changed()
        ]
        self._copies: list[Array] = [arithmetic.zeros(array.size, str(array.dtype)) for array, arithmetic in self._arrays]
        self._counters: Mapping[str, int] = {}

    def keep(self) -> None:
        """Copy the current state. Call it between steps, after a drain."""
        for copy, (array, arithmetic) in zip(self._copies, self._arrays, strict=True):
            arithmetic.copy(copy, array)
        self._counters = self._averager.counters()

    def restore(self) -> None:
        """Restore the copied state, bit for bit. Call it between steps, after a drain."""
        for copy, (array, arithmetic) in zip(self._copies, self._arrays, strict=True):
            arithmetic.copy(array, copy)
        self._group.refresh_shadow()
        # The next step announces parameters that it does not use with the gradients that they hold: these must be zero.
        self._group.arithmetic.fill(self._group.grad, 0.0)
        self._averager.load_counters(self._counters)
        self._averager.undone()
