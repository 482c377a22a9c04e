"""A copy of all that a step of an averager changes, from which the step can be undone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.arithmetic import Arithmetic, Array
from hpctrain.backend.host_arithmetic import HostArithmetic


class UndoCopy:
    """Parameters, the optimiser's state, what is kept back, and counters, as they were before a step.

    It takes as much memory as these. Nothing communicates, and nothing waits: copies are made where the arrays lie.
    """

    def __init__(self, averager: GradientAverager) -> None:
        self._averager, self._group = averager, averager.group
        self._arrays = [(array, self._arithmetic_of(array)) for array in averager.changed()]
        self._copies: list[Array] = [arithmetic.zeros(array.size, str(array.dtype)) for array, arithmetic in self._arrays]
        self._counters: Mapping[str, int] = {}

    def _arithmetic_of(self, array: Array) -> Arithmetic:
        """On where an array lies: what is kept back may be on the host where kernels compute elsewhere."""
        return HostArithmetic() if isinstance(array, np.ndarray) else self._group.arithmetic

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
