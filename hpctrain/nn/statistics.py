"""Running statistics of batch norm: flat, beside what the last training batches left, so that one message averages them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic, Array, Fetch
from hpctrain.backend.host_arithmetic import HostArithmetic, all_finite
from hpctrain.nn.parameter import StatisticSpec

_BATCH_ROLE = {"running_mean": "batch_mean", "running_var": "batch_var"}


_WHOLE: Mapping[str, tuple[int, int]] = MappingProxyType({})


def _for_its_samples(name: str) -> tuple[bool, bool]:
    return True, False


class ProgramStatistics(Protocol):
    """Statistics as one program sees them."""

    def by_role(self, names: Mapping[str, str]) -> dict[str, Array]:
        """The arrays of one operator, for its role -> full name: the running statistics and the batch's beside them."""

    def fetch_batch(self) -> Fetch:
        """The batch statistics of the latest training forward, on their way to the host. Ask for them before the next one."""

    def refresh(self) -> None:
        """Before an evaluation: let kernels read what `running` holds."""


class FlatStatistics:
    """Views into two flat arrays of one layout: `running`, on the host, and `batch`, which training forwards write.

    A step blends once: running = (1 - momentum) running + momentum * (count-weighted mean of the batch statistics over all ranks
    and micro-batches), so replicas agree bit by bit. Evaluation reads `running` only; where kernels cannot, a copy of it.

    Args:
        specs: by full name. parts: split statistics: the interval of channels that this rank computes.
        contributes: of a statistic, whether this rank adds it to the step's sums weighted by its own samples, and by those of all
            ranks that share them.
        arithmetic: on arrays that lie where kernels compute; the host's by default.

    Attributes:
        running, batch: 1-D arrays of `dtype`; `batch` lies where kernels compute. momentum: float64, per element.
        views: every running statistic by full name ("bn1.running_mean"), in its shape.
    """

    def __init__(
        self,
        specs: Mapping[str, StatisticSpec],
        dtype: str,
        parts: Mapping[str, tuple[int, int]] = _WHOLE,
        contributes: Callable[[str], tuple[bool, bool]] = _for_its_samples,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self._arithmetic = HostArithmetic() if arithmetic is None else arithmetic
        self.names = tuple(specs)
        self._parts = parts
        sizes = [math.prod(spec.shape) for spec in specs.values()]
        self.size = sum(sizes)
        self.batch: Array = self._arithmetic.zeros(self.size, dtype)
        self._running_of_kernels: Array = self._arithmetic.zeros(self.size, dtype)
        on_host = self._arithmetic.on_host
        self.running: np.ndarray = self._running_of_kernels if on_host else np.zeros(self.size, dtype)
        self._stale = not on_host  # what kernels read is older than `running`
        self.momentum = np.zeros(self.size, np.float64)
        self._own_share = np.zeros(self.size, bool)
        self._group_share = np.zeros(self.size, bool)
        self.views: dict[str, np.ndarray] = {}
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        start = 0
        for (name, spec), size in zip(specs.items(), sizes, strict=True):
            part = slice(start, start + size)
            self.running[part] = spec.fill
            self.momentum[part] = spec.momentum
            self.views[name] = self.running[part].reshape(spec.shape)
            self._places[name] = part, spec.shape
            low, high = parts.get(name, (0, size))
            own = slice(start + low, start + high)
            self._own_share[own], self._group_share[own] = contributes(name)
            start += size

    def by_role(self, names: Mapping[str, str]) -> dict[str, Array]:
        """As `ProgramStatistics` has it."""
        return self.with_batch(names, self.batch)

    def with_batch(self, names: Mapping[str, str], batch: Array) -> dict[str, Array]:
        """The same, with another array of the batch's."""
        views: dict[str, Array] = {}
        for role, name in names.items():
            place, shape = self._places[name]
            part = slice(*self._parts.get(name, (None, None)))
            for its_role, flat in ((role, self._running_of_kernels), (_BATCH_ROLE[role], batch)):
                views[its_role] = flat[place].reshape(shape)[part]
        return views

    def fetch_batch(self) -> Fetch:
        """As `ProgramStatistics` has it."""
        return self._arithmetic.fetch(self.batch)

    def beside(self) -> ProgramStatistics:
        """The statistics of a further program, which runs side by side with others: it has a batch of its own."""
        return _StatisticsBeside(self, self._arithmetic)

    def weighted(self, count: int, group_count: int, batch: np.ndarray | None = None) -> np.ndarray:
        """This rank's terms of the step's sums (float64, flat): batch statistics times the samples that it contributes for.

        Args:
            count: samples of its own. group_count: those of its split group.
            batch: what `fetch_batch` gave; None: it is fetched here, which waits.
        """
        if batch is None:
            batch = self.fetch_batch().result()
        weights = count * self._own_share + group_count * self._group_share
        terms = np.zeros(self.size)
        np.multiply(batch, weights, out=terms, where=weights > 0)
        return terms

    def not_finite(self, values: np.ndarray) -> tuple[str, ...]:
        """Names of the statistics with something that is not finite in `values`, which lie as `running` does."""
        if all_finite(values):
            return ()
        starts = np.cumsum([0, *(view.size for view in self.views.values())])
        return tuple(
            name for name, start, stop in zip(self.names, starts, starts[1:], strict=False) if not all_finite(values[start:stop])
        )

    def blend(self, weighted_sums: np.ndarray, count: float) -> None:
        """Move the running statistics towards weighted_sums / count (float64, flat); nothing where count is 0."""
        if count == 0:
            return
        target = weighted_sums / count
        self.running[...] = self.running + self.momentum * (target - self.running)
        self.running_changed()

    def running_changed(self) -> None:
        """`running` was written: what kernels read is refreshed before the next evaluation."""
        self._stale = not self._arithmetic.on_host

    def refresh(self) -> None:
        """Before an evaluation: let kernels read what `running` holds."""
        if self._stale:
            self._arithmetic.from_host(self._running_of_kernels, self.running)
            self._stale = False


class _StatisticsBeside:
    """Implements `ProgramStatistics`: batch statistics of its own beside the same running ones."""

    def __init__(self, of: FlatStatistics, arithmetic: Arithmetic) -> None:
        self._of, self._arithmetic = of, arithmetic
        self._batch: Array = arithmetic.zeros(of.size, str(of.batch.dtype))

    def by_role(self, names: Mapping[str, str]) -> dict[str, Array]:
        return self._of.with_batch(names, self._batch)

    def fetch_batch(self) -> Fetch:
        return self._arithmetic.fetch(self._batch)

    def refresh(self) -> None:
        self._of.refresh()
