"""Parameters and statistics: named views into flat buffers.

A layer declares what it needs (`ParameterSpec`, `StatisticSpec`). `FlatGroup` gives every declared parameter its place in one
flat buffer for the data and one for the gradients, described by one table of segments that optimiser, averager, hash and
checkpoint share. `FlatStatistics` does the same for the running statistics of batch norms, next to what the last training
batches left, so that one message averages them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic, Array, Fetch
from hpctrain.backend.host_arithmetic import HostArithmetic, all_finite
from hpctrain.backend.specs import item_bytes

Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Interchange:
    """How an array of hpctrain becomes torchvision's: reshape to `shape`, permute by `axes`, then reshape to `final`.

    None leaves a step out. conv KRSC -> KCRS is axes (0, 3, 1, 2); linear (in, out) -> (out, in) is axes (1, 0);
    a linear layer after a flattened (H, W, C) image is shape (H, W, C, out), axes (3, 2, 0, 1), final (out, C*H*W).
    """

    shape: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    final: tuple[int, ...] | None = None

    def export(self, array: np.ndarray) -> np.ndarray:
        """Return an array in torchvision's layout, contiguous."""
        if self.shape is not None:
            array = array.reshape(self.shape)
        if self.axes is not None:
            array = array.transpose(self.axes)
        array = np.ascontiguousarray(array)
        return array if self.final is None else array.reshape(self.final)

    def exported_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of `export` of an array of `shape`."""
        if self.final is not None:
            return self.final
        reshaped = shape if self.shape is None else self.shape
        return reshaped if self.axes is None else tuple(reshaped[axis] for axis in self.axes)

    def restore(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array of torchvision's in hpctrain's layout, of `shape`, contiguous."""
        if self.axes is not None:
            permuted = shape if self.shape is None else self.shape
            array = array.reshape(tuple(permuted[axis] for axis in self.axes))
            array = array.transpose(np.argsort(self.axes))
        return np.ascontiguousarray(array).reshape(shape)


@dataclass(frozen=True)
class ParameterSpec:
    """A layer's declaration of a parameter: shape (KRSC, or (in, out)), first values, whether it has weight decay by default.

    sufficient_factors: the gradient is x^T dy of a linear layer's inputs and errors (for its bias, the sum of the errors), so it
    may be computed elsewhere from these.
    """

    shape: tuple[int, ...]
    initialise: Initializer
    decay: bool = True
    interchange: Interchange = Interchange()
    sufficient_factors: bool = False


@dataclass(frozen=True)
class StatisticSpec:
    """State that is not trained: running means and variances. `fill` is the first value."""

    shape: tuple[int, ...]
    fill: float
    momentum: float  # weight of the newest batch in the running value


@dataclass
class Parameter:
    """One trained tensor.

    Attributes:
        name: torchvision's dotted name.
        data, grad: views into the flat buffers of its group, of `spec.shape`.
        order: forward position, 0 nearest the input: the priority key.
        shadow: view of its group's shadow, if there is one.
    """

    name: str
    spec: ParameterSpec
    order: int
    data: Array
    grad: Array
    shadow: Array | None = None

    @property
    def size(self) -> int:
        return math.prod(self.spec.shape)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a flat buffer that belong to one parameter, or to a part of it if it is sliced or sharded."""

    parameter: str
    start: int
    stop: int
    order: int
    decay: bool

    @property
    def size(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Segment:
        """Return the elements of this segment inside [start, stop) of the flat buffer; empty if there are none."""
        low = min(max(start, self.start), self.stop)
        return Segment(self.parameter, low, max(low, min(stop, self.stop)), self.order, self.decay)


class GroupLayout:
    """The places of a group's parameters in its flat buffers: sizes, owners and orders follow from it, without the buffers.

    Segments lie in forward order without gaps, so a shard is a list of slices and the payload of a collective is exactly
    the parameters.

    Args:
        specs: name -> declared parameter, in forward order.
        dtype: "float32" or "float64".
        orders: forward positions of the parameters in the whole network; None: those in this group.

    Attributes:
        size: elements. item_bytes: bytes of one. segments: one per parameter, whole, in forward order.
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
        """Return the parts of segments that make up [start, stop), in order, empty ones left out."""
        parts = (segment.part(start, stop) for segment in self.segments)
        return tuple(part for part in parts if part.size)


class FlatGroup(GroupLayout):
    """Parameters averaged over one communicator: their layout, with the flat buffers of data and gradients.

    `data` and `grad` are 1-D arrays of `dtype`; every `Parameter.data` and `.grad` is a view into them. `shadow` is `data`
    rounded to another dtype, for kernels that read it instead; None if none do. Descents write it together with `data`; call
    `refresh_shadow` after any other write to `data`.

    Args:
        specs, dtype, orders: as in `GroupLayout`.
        arithmetic: makes the buffers and computes on them (a kernel set's; the host's by default).
        shadow_dtype: of the shadow; None: there is no shadow.
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
        """Round elements [start, stop) of `data` into the shadow, if there is one. Call it after any write but a descent's."""
        if self.shadow is not None:
            self.arithmetic.copy(self.shadow[start:stop], self.data[start:stop])


def whole(segments: Iterable[Segment]) -> Sequence[tuple[int, int]]:
    """Return the maximal runs [start, stop) of touching segments."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and runs[-1][1] == segment.start:
            runs[-1] = (runs[-1][0], segment.stop)
        else:
            runs.append((segment.start, segment.stop))
    return runs


_BATCH_ROLE = {"running_mean": "batch_mean", "running_var": "batch_var"}


class ProgramStatistics(Protocol):
    """Statistics as one program sees them."""

    def by_role(self, names: Mapping[str, str]) -> dict[str, Array]:
        """Return the arrays of one operator, from its role -> full name: running statistics, and those of the batch."""

    def fetch_batch(self) -> Fetch:
        """Start to bring the batch statistics of the latest training forward to the host. Call it before the next forward."""

    def refresh(self) -> None:
        """Copy `running` to where kernels read it, if it has changed. Call it before an evaluation."""


class FlatStatistics:
    """Views into two flat arrays of one layout: `running`, on the host, and `batch`, which training forwards write.

    A step blends once: running = (1 - momentum) running + momentum * (count-weighted mean of the batch statistics over all ranks
    and micro-batches), so replicas agree bit by bit. Evaluation reads `running` only; kernels of a device read a copy of it.

    Args:
        specs: by full name. parts: of split statistics, the interval of channels that this rank computes; None: none is split.
        contributes: returns of a statistic whether this rank adds it to the step's sums weighted by its own samples, and weighted
            by the samples of its split group (see `Distribution.contributes`); None: all by its own samples.
        arithmetic: on arrays that lie where kernels compute; the host's by default.

    Attributes:
        running, batch: 1-D arrays of `dtype`; `batch` lies where kernels compute. momentum: float64, per element.
        views: every running statistic by full name ("bn1.running_mean"), in its shape.
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
        self._stale = not on_host  # what kernels read is older than `running`
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
        """See `ProgramStatistics`."""
        return self.with_batch(names, self.batch)

    def with_batch(self, names: Mapping[str, str], batch: Array) -> dict[str, Array]:
        """Return the same with another flat array of batch statistics."""
        views: dict[str, Array] = {}
        for role, name in names.items():
            place, shape = self._places[name]
            channels = slice(*self._parts.get(name, (None, None)))
            for its_role, flat in ((role, self._running_of_kernels), (_BATCH_ROLE[role], batch)):
                views[its_role] = flat[place].reshape(shape)[channels]
        return views

    def fetch_batch(self) -> Fetch:
        """See `ProgramStatistics`."""
        return self._arithmetic.fetch(self.batch)

    def with_own_batch(self) -> ProgramStatistics:
        """Return the statistics of another program that runs side by side with the first: with batch statistics of its own."""
        return _SecondBatch(self, self._arithmetic)

    def weighted(self, count: int, group_count: int, batch: np.ndarray) -> np.ndarray:
        """Return this rank's terms of the step's sums (float64, flat): batch statistics times the samples that they are of.

        Args:
            count: this rank's samples. group_count: those of its split group.
            batch: the result of `fetch_batch`.
        """
        weights = count * self._own_share + group_count * self._group_share
        terms = np.zeros(self.size)
        np.multiply(batch, weights, out=terms, where=weights > 0)
        return terms

    def not_finite(self, values: np.ndarray) -> tuple[str, ...]:
        """Return the names of the statistics that are not finite in `values`, an array in the layout of `running`."""
        if all_finite(values):
            return ()
        starts = np.cumsum([0, *(view.size for view in self.views.values())])
        return tuple(
            name for name, start, stop in zip(self.names, starts, starts[1:], strict=False) if not all_finite(values[start:stop])
        )

    def blend(self, weighted_sums: np.ndarray, count: float) -> None:
        """Move the running statistics towards weighted_sums / count (float64, flat), unless count is 0."""
        if count == 0:
            return
        target = weighted_sums / count
        self.running[...] = self.running + self.momentum * (target - self.running)
        self.running_changed()

    def running_changed(self) -> None:
        """Take note that `running` was written: `refresh` then copies it to where kernels read it."""
        self._stale = not self._arithmetic.on_host

    def refresh(self) -> None:
        """Copy `running` to where kernels read it, if it has changed. Call it before an evaluation."""
        if self._stale:
            self._arithmetic.from_host(self._running_of_kernels, self.running)
            self._stale = False


class _SecondBatch:
    """Implements `ProgramStatistics`: the running statistics of `of`, with batch statistics of its own."""

    def __init__(self, of: FlatStatistics, arithmetic: Arithmetic) -> None:
        self._of, self._arithmetic = of, arithmetic
        self._batch: Array = arithmetic.zeros(of.size, str(of.batch.dtype))

    def by_role(self, names: Mapping[str, str]) -> dict[str, Array]:
        return self._of.with_batch(names, self._batch)

    def fetch_batch(self) -> Fetch:
        return self._arithmetic.fetch(self._batch)

    def refresh(self) -> None:
        self._of.refresh()
