"""Parameters and statistics: named views into flat buffers.

A layer declares its parameters and statistics (`ParameterSpec`, `StatisticSpec`). `FlatGroup` places every parameter in one flat
buffer for the data and one for the gradients. One table of segments describes the places; optimiser, averager, hash and
checkpoint share it. `FlatStatistics` does the same for the running statistics of batch norms and the statistics of the last
training batches, so that one message averages them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic, Array, Fetch
from hpctrain.backend.host_arithmetic import HostArithmetic, all_finite
from hpctrain.backend.specs import item_bytes

Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Interchange:
    """Conversion of an hpctrain array to torchvision's layout: reshape to `shape`, permute by `axes`, then reshape to `final`.

    A step that is None is skipped. A convolution's KRSC -> KCRS is axes (0, 3, 1, 2). A linear layer's (in, out) -> (out, in) is
    axes (1, 0). A linear layer after a flattened (H, W, C) image has shape (H, W, C, out), axes (3, 2, 0, 1) and final (out,
    C*H*W).
    """

    shape: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    final: tuple[int, ...] | None = None

    def export(self, array: np.ndarray) -> np.ndarray:
        """Return a contiguous array in torchvision's layout."""
        if self.shape is not None:
            array = array.reshape(self.shape)
        if self.axes is not None:
            array = array.transpose(self.axes)
        array = np.ascontiguousarray(array)
        return array if self.final is None else array.reshape(self.final)

    def exported_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that `export` returns for an array of `shape`."""
        if self.final is not None:
            return self.final
        reshaped = shape if self.shape is None else self.shape
        return reshaped if self.axes is None else tuple(reshaped[axis] for axis in self.axes)

    def restore(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return a contiguous array with shape `shape` in hpctrain's layout, from an array in torchvision's layout."""
        if self.axes is not None:
            permuted = shape if self.shape is None else self.shape
            array = array.reshape(tuple(permuted[axis] for axis in self.axes))
            array = array.transpose(np.argsort(self.axes))
        return np.ascontiguousarray(array).reshape(shape)


@dataclass(frozen=True)
class ParameterSpec:
    """A layer's declaration of a parameter.

    Attributes:
        shape: (K, R, S, C) of a convolution's weight, (in, out) of a linear layer's.
        initialise: function that draws the initial values.
        decay: whether weight decay applies by default.
        interchange: conversion to torchvision's layout.
        sufficient_factors: whether the gradient is x^T dy of a linear layer's inputs and errors (for its bias, the sum of the
            errors), so that another rank or module can compute it from these.
        norm_bias: whether it is the bias of a batch norm.
    """

    shape: tuple[int, ...]
    initialise: Initializer
    decay: bool = True
    interchange: Interchange = Interchange()
    sufficient_factors: bool = False
    norm_bias: bool = False


@dataclass(frozen=True)
class StatisticSpec:
    """Declaration of untrained state (a running mean or variance). `fill` is the initial value."""

    shape: tuple[int, ...]
    fill: float
    momentum: float  # weight of the newest batch in the running value


@dataclass
class Parameter:
    """Parameter of a network, with its data and its gradient.

    Attributes:
        name: torchvision's dotted name.
        spec: declaration of the parameter.
        order: position in forward order, 0 next to the input; it is also the priority of the parameter's messages.
        data, grad: views into the flat buffers of the parameter's group, with shape `spec.shape`.
        shadow: view of the group's shadow; None if there is none.
    """

    name: str
    spec: ParameterSpec
    order: int
    data: Array
    grad: Array
    shadow: Array | None = None

    @cached_property
    def size(self) -> int:
        return math.prod(self.spec.shape)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a flat buffer that belong to one parameter, or to a part of a sliced or sharded parameter.

    `order` is the parameter's position in forward order, and `decay` is whether weight decay applies to it.
    """

    parameter: str
    start: int
    stop: int
    order: int
    decay: bool

    @property
    def size(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Segment:
        """Return the elements of this segment that lie in [start, stop) of the flat buffer; empty if there are none."""
        low = min(max(start, self.start), self.stop)
        return Segment(self.parameter, low, max(low, min(stop, self.stop)), self.order, self.decay)


class GroupLayout:
    """Places of a group's parameters in flat buffers, without the buffers themselves.

    Segments lie in forward order without gaps, so a shard is a list of slices, and the payload of a collective consists of the
    parameters only.

    Args:
        specs: declared parameters by name, in forward order.
        dtype: "float32" or "float64".
        orders: forward positions of the parameters in the whole network; None: positions in this group.

    Attributes:
        segments: one whole segment per parameter, in forward order.
    """

    def __init__(
        self, specs: Mapping[str, ParameterSpec], dtype: str = "float32", *, orders: Mapping[str, int] | None = None
    ) -> None:
        self.specs = dict(specs)
        self.dtype = dtype
        self.item_bytes = item_bytes(dtype)
        segments = []
        start = 0
        for position, (name, spec) in enumerate(specs.items()):
            stop = start + math.prod(spec.shape)
            segments.append(Segment(name, start, stop, position if orders is None else orders[name], spec.decay))
            start = stop
        self.size = start
        self.segments: tuple[Segment, ...] = tuple(segments)
        self._by_name = {segment.parameter: segment for segment in segments}

    def segment(self, name: str) -> Segment:
        """Return the whole segment of one parameter."""
        return self._by_name[name]

    def covering(self, start: int, stop: int) -> tuple[Segment, ...]:
        """Return the parts of segments that make up [start, stop), in order, without empty ones."""
        parts = (segment.part(start, stop) for segment in self.segments)
        return tuple(part for part in parts if part.size)


class FlatGroup(GroupLayout):
    """Parameters averaged over one communicator: their layout, and the flat buffers of data and gradients.

    `data` and `grad` are 1-D arrays of `dtype`; every `Parameter.data` and `.grad` is a view into them. `shadow` is `data`
    rounded to another dtype, for kernels that read that dtype; None if no kernels do. An optimiser's update writes it together
    with `data`. Call `refresh_shadow` after any other write to `data`.

    Args:
        specs, dtype, orders: see `GroupLayout`.
        arithmetic: arithmetic of the buffers' kernel set; default: the host's.
        shadow_dtype: dtype of the shadow; None: no shadow.
    """

    def __init__(
        self,
        specs: Mapping[str, ParameterSpec],
        dtype: str = "float32",
        *,
        arithmetic: Arithmetic | None = None,
        shadow_dtype: str | None = None,
        orders: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(specs, dtype, orders=orders)
        self.arithmetic = HostArithmetic() if arithmetic is None else arithmetic
        self.data: Array = self.arithmetic.zeros(self.size, dtype)
        self.grad: Array = self.arithmetic.zeros(self.size, dtype)
        self.shadow: Array | None = None if shadow_dtype is None else self.arithmetic.zeros(self.size, shadow_dtype)
        self.parameters: dict[str, Parameter] = {}
        for segment in self.segments:
            spec, place = specs[segment.parameter], slice(segment.start, segment.stop)
            data, grad = self.data[place].reshape(spec.shape), self.grad[place].reshape(spec.shape)
            shadow = None if self.shadow is None else self.shadow[place].reshape(spec.shape)
            self.parameters[segment.parameter] = Parameter(segment.parameter, spec, segment.order, data, grad, shadow)

    def refresh_shadow(self, start: int = 0, stop: int | None = None) -> None:
        """Round elements [start, stop) of `data` into the shadow, if there is one. Call it after each write by other code."""
        if self.shadow is not None:
            self.arithmetic.copy(self.shadow[start:stop], self.data[start:stop])


def whole(segments: Iterable[Segment]) -> Sequence[tuple[int, int]]:
    """Return the longest runs [start, stop) of adjacent segments."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and runs[-1][1] == segment.start:
            runs[-1] = (runs[-1][0], segment.stop)
        else:
            runs.append((segment.start, segment.stop))
    return runs


_BATCH_ROLE = {"running_mean": "batch_mean", "running_var": "batch_var"}


class ProgramStatistics(Protocol):
    """Running and batch statistics that the operators of one program read and write."""

    def by_role(self, names: Mapping[str, str]) -> dict[str, Array]:
        """Return the running and batch statistics of one operator by role.

        Args:
            names: full name of each running statistic by role.
        """

    def fetch_batch(self) -> Fetch:
        """Start copying the batch statistics of the latest training forward to the host. Call it before the next forward."""

    def refresh(self) -> None:
        """Copy the running statistics to the arrays that kernels read, if they have changed. Call it before an evaluation."""


class FlatStatistics:
    """Running and batch statistics as views into two flat arrays of one layout.

    A step blends once: running = (1 - momentum) * running + momentum * mean, where the mean of the batch statistics over all
    ranks and micro-batches is weighted by the number of samples. All ranks compute the same bits. Evaluation reads `running`
    only; kernels on a device read a copy of it.

    Args:
        specs: declared statistics by full name.
        parts: channels [start, stop) that this rank computes, for each split statistic; None: no statistic is split.
        contributes: function that returns how this rank adds a statistic to the step's sums (see `Distribution.contributes`);
            None: all statistics are weighted by this rank's samples.
        arithmetic: arithmetic of the kernel set's arrays; default: the host's.

    Attributes:
        running: running statistics, 1-D of `dtype`, on the host.
        batch: statistics of the latest training forward, 1-D of `dtype`, in the memory of the kernels.
        momentum: weight of the newest batch for each element, float64.
        views: views of the running statistics by full name ("bn1.running_mean"), in their shapes.
    """

    def __init__(
        self,
        specs: Mapping[str, StatisticSpec],
        dtype: str,
        parts: Mapping[str, tuple[int, int]] | None = None,
        contributes: Callable[[str], tuple[bool, bool]] | None = None,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self._arithmetic = HostArithmetic() if arithmetic is None else arithmetic
        self.names = tuple(specs)
        self._parts = parts or {}
        sizes = [math.prod(spec.shape) for spec in specs.values()]
        self.size = sum(sizes)
        self.batch: Array = self._arithmetic.zeros(self.size, dtype)
        self._running_of_kernels: Array = self._arithmetic.zeros(self.size, dtype)
        on_host = self._arithmetic.on_host
        self.running: np.ndarray = self._running_of_kernels if on_host else np.zeros(self.size, dtype)
        self._stale = not on_host  # the kernels' copy is older than `running`
        self.momentum = np.zeros(self.size, np.float64)
        self._own_share = np.zeros(self.size, bool)
        self._group_share = np.zeros(self.size, bool)
        self.views: dict[str, np.ndarray] = {}
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        start = 0
        for (name, spec), size in zip(specs.items(), sizes, strict=True):
            place = slice(start, start + size)
            self.running[place] = spec.fill
            self.momentum[place] = spec.momentum
            self.views[name] = self.running[place].reshape(spec.shape)
            self._places[name] = place, spec.shape
            low, high = self._parts.get(name, (0, size))
            computed = slice(start + low, start + high)
            shares = (True, False) if contributes is None else contributes(name)
            self._own_share[computed], self._group_share[computed] = shares
            start += size

    def by_role(self, names: Mapping[str, str]) -> dict[str, Array]:
        """Return one operator's running and batch statistics by role; see `ProgramStatistics.by_role`."""
        return self.with_batch(names, self.batch)

    def with_batch(self, names: Mapping[str, str], batch: Array) -> dict[str, Array]:
        """Return the arrays of `by_role` with `batch` as the flat array of batch statistics."""
        views: dict[str, Array] = {}
        for role, name in names.items():
            place, shape = self._places[name]
            channels = slice(*self._parts.get(name, (None, None)))
            for its_role, flat in ((role, self._running_of_kernels), (_BATCH_ROLE[role], batch)):
                views[its_role] = flat[place].reshape(shape)[channels]
        return views

    def fetch_batch(self) -> Fetch:
        """Start copying `batch` to the host; see `ProgramStatistics.fetch_batch`."""
        return self._arithmetic.fetch(self.batch)

    def with_own_batch(self) -> ProgramStatistics:
        """Return statistics for another program that runs side by side with the first, with separate batch statistics."""
        return _SecondBatch(self, self._arithmetic)

    def weighted(self, count: int, group_count: int, batch: np.ndarray) -> np.ndarray:
        """Return this rank's terms of the step's sums (float64, flat): batch statistics times their number of samples.

        Args:
            count, group_count: number of samples of this rank, and of its split group.
            batch: result of `fetch_batch`.
        """
        weights = count * self._own_share + group_count * self._group_share
        terms = np.zeros(self.size)
        np.multiply(batch, weights, out=terms, where=weights > 0)
        return terms

    def not_finite(self, values: np.ndarray) -> tuple[str, ...]:
        """Return the names of the statistics with non-finite elements in `values`, an array in the layout of `running`."""
        if all_finite(values):
            return ()
        starts = np.cumsum([0, *(view.size for view in self.views.values())])
        return tuple(
            name for name, start, stop in zip(self.names, starts, starts[1:], strict=False) if not all_finite(values[start:stop])
        )

    def blend(self, weighted_sums: np.ndarray, count: float) -> None:
        """Move the running statistics towards weighted_sums / count (float64, flat); do nothing for a step of `count` 0."""
        if count == 0:
            return
        target = weighted_sums / count
        self.running[...] = self.running + self.momentum * (target - self.running)
        self.running_changed()

    def running_changed(self) -> None:
        """Mark the kernels' copy of `running` as outdated, so that `refresh` copies it. Call it after a write to `running`."""
        self._stale = not self._arithmetic.on_host

    def refresh(self) -> None:
        """Copy `running` to the arrays that kernels read, if it has changed. Call it before an evaluation."""
        if self._stale:
            self._arithmetic.from_host(self._running_of_kernels, self.running)
            self._stale = False


class _SecondBatch:
    """Statistics of a second program, with the running statistics of `of` and separate batch statistics."""

    def __init__(self, of: FlatStatistics, arithmetic: Arithmetic) -> None:
        self._of, self._arithmetic = of, arithmetic
        self._batch: Array = arithmetic.zeros(of.size, str(of.batch.dtype))

    def by_role(self, names: Mapping[str, str]) -> dict[str, Array]:
        return self._of.with_batch(names, self._batch)

    def fetch_batch(self) -> Fetch:
        return self._arithmetic.fetch(self._batch)

    def refresh(self) -> None:
        self._of.refresh()
