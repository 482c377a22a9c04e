"""A kernel set whose arrays are not NumPy's, and which computes as late as it may: only on a wait.

It computes what the NumPy set does, to the last bit. Whatever reads or writes its arrays without it is refused by
`DeviceArray`, or finds numbers of a moment ago; whatever keeps back an array of the host that it was given finds it overwritten.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hpctrain.backend import operators
from hpctrain.backend.arithmetic import (
    Arithmetic,
    Array,
    Corrections,
    Descent,
    Fetch,
    MomentDescent,
    MomentRule,
    UpdateRun,
)
from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import Buffers, LossHandle, LossOperator, LossSums, Operator, StepContext
from hpctrain.backend.specs import SoftmaxCrossEntropySpec, Spec, TensorSpec
from hpctrain.core.intervals import Box

ABILITIES = [
    operators.InPlace,
    operators.InputView,
    operators.Accumulating,
    operators.OutputReadOnce,
    operators.JointBackward,
    operators.SufficientFactors,
]


def wrapped(array: np.ndarray) -> DeviceArray:
    """The same memory, which NumPy does not find."""
    return DeviceArray(array.ctypes.data, array.shape, str(array.dtype), array)


def unwrapped(value: Any) -> Any:
    """The contents of the memory as an array of NumPy; also in mappings and tuples. All else as it is."""
    if isinstance(value, DeviceArray):
        memory = (ctypes.c_uint8 * max(1, value.nbytes)).from_address(value.pointer)
        return np.frombuffer(memory, np.uint8, value.nbytes).view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: unwrapped(entry) for key, entry in value.items()}
    return tuple(map(unwrapped, value)) if isinstance(value, tuple) else value


class Queue:
    """Work in order. Attributes: waits: how much was done in each wait."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self.waits: list[int] = []

    def put(self, work: Callable[..., object], *arguments: Any) -> None:
        """Do it later, with the arrays of the arguments unwrapped then."""
        self._work.append(lambda: work(*map(unwrapped, arguments)))

    def wait(self) -> None:
        """Do all of it now."""
        self.waits.append(len(self._work))
        for work in self._work:
            work()
        self._work.clear()


@dataclass
class LateFetch:
    """A copy that is made in its turn."""

    queue: Queue
    values: np.ndarray

    def result(self) -> np.ndarray:
        self.queue.wait()
        return self.values


@dataclass
class LateDescent:
    """A descent of the host, by moments or not, done in its turn. shadow: written for each run of an update."""

    queue: Queue
    inner: Any
    data: DeviceArray
    shadow: DeviceArray | None

    def update(self, runs: Iterable[UpdateRun], *rest: Any) -> None:
        runs = list(runs)
        self.queue.put(lambda: self.inner.update(runs, *rest))
        for run in runs if self.shadow is not None else ():
            self.queue.put(np.copyto, self.shadow[run.start : run.stop], self.data[run.start : run.stop], "same_kind")

    def direct(self, runs: Iterable[UpdateRun], corrections: Corrections) -> None:
        runs = list(runs)
        self.queue.put(lambda: self.inner.direct(runs, corrections))


@dataclass(frozen=True)
class LateWordSums:
    """Sums of host arrays, computed in the order of enqueued work."""

    queue: Queue
    inner: Any
    count: int

    def remember(self) -> None:
        self.queue.put(self.inner.remember)

    def compare(self) -> None:
        self.queue.put(self.inner.compare)

    def fetch(self) -> LateFetch:
        return self._fetched(self.inner.fetch, np.empty(self.count, np.uint32))

    def fetch_changed(self) -> LateFetch:
        return self._fetched(self.inner.fetch_changed, np.empty(self.count, bool))

    def _fetched(self, fetch: Callable[[], Fetch], values: np.ndarray) -> LateFetch:
        self.queue.put(lambda: np.copyto(values, fetch().result()))
        return LateFetch(self.queue, values)


class LateArithmetic(Arithmetic):
    """The arithmetic of the host, done late."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._host = queue, HostArithmetic()

    def zeros(self, size: int, dtype: str) -> Array:
        return wrapped(np.zeros(size, dtype))

    def copy(self, target: Array, source: Array) -> None:
        assert target.size == source.size
        self._queue.put(self._host.copy, target, source)

    def fill(self, target: Array, value: float) -> None:
        self._queue.put(self._host.fill, target, value)

    def add(self, target: Array, source: Array) -> None:
        assert (target.size, target.dtype) == (source.size, source.dtype)
        self._queue.put(self._host.add, target, source)

    def subtract(self, target: Array, source: Array) -> None:
        assert (target.size, target.dtype) == (source.size, source.dtype)
        self._queue.put(self._host.subtract, target, source)

    def average_into(self, target: Array, source: Array, kept: float) -> None:
        assert (target.size, target.dtype) == (source.size, source.dtype)
        self._queue.put(lambda into, values: self._host.average_into(into, values, kept), target, source)

    def copy_box(self, target: Array, target_box: Box, source: Array, source_box: Box, *, accumulate: bool = False) -> None:
        def work(into: np.ndarray, values: np.ndarray) -> None:
            self._host.copy_box(into, target_box, values, source_box, accumulate=accumulate)

        self._queue.put(work, target, source)

    def sum_pixels(self, target: Array, source: Array, scale: float) -> None:
        self._queue.put(lambda into, values: self._host.sum_pixels(into, values, scale), target, source)

    def spread_pixels(self, target: Array, source: Array, scale: float) -> None:
        self._queue.put(lambda into, values: self._host.spread_pixels(into, values, scale), target, source)

    def square_sums(self, arrays: Sequence[Array]) -> np.ndarray:
        assert all(isinstance(array, DeviceArray) for array in arrays)
        self._queue.wait()
        return self._host.square_sums(unwrapped(tuple(arrays)))

    def fetch_finite(self, arrays: Sequence[Array]) -> Fetch:
        flags = np.zeros(len(arrays), bool)
        self._queue.put(lambda *values: np.copyto(flags, self._host.fetch_finite(values).result()), *arrays)
        return LateFetch(self._queue, flags)

    def word_sums(self, arrays: Sequence[Array]) -> LateWordSums:
        assert all(isinstance(array, DeviceArray) for array in arrays)
        return LateWordSums(self._queue, self._host.word_sums(unwrapped(tuple(arrays))), len(arrays))

    def fetch(self, array: Array) -> Fetch:
        values = np.empty(array.shape, array.dtype)
        self._queue.put(np.copyto, values, array)
        return LateFetch(self._queue, values)

    def to_host(self, array: Array) -> np.ndarray:
        assert isinstance(array, DeviceArray)
        self._queue.wait()
        values = np.array(unwrapped(array))
        values.flags.writeable = False
        return values

    def from_host(self, target: Array, source: np.ndarray) -> None:
        assert isinstance(source, np.ndarray)
        assert target.shape == source.shape
        self._queue.put(np.copyto, target, source.copy(), "same_kind")

    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        inner = self._host.descent(*unwrapped((data, gradient, momentum)), factor=factor, nesterov=nesterov)
        return LateDescent(self._queue, inner, data, shadow)

    def moment_descent(
        self, data: Array, gradient: Array, first: Array, second: Array, rule: MomentRule, *, shadow: Array | None = None
    ) -> MomentDescent:
        inner = self._host.moment_descent(*unwrapped((data, gradient, first, second)), rule)
        return LateDescent(self._queue, inner, data, shadow)


class LateOperator(Operator):
    """An operator of the NumPy set, whose calls are done late."""

    def __init__(self, inner: Operator, queue: Queue) -> None:
        self.spec, self.inputs, self.output = inner.spec, inner.inputs, inner.output
        self.needs_inputs, self.needs_output = inner.needs_inputs, inner.needs_output
        self.saved_bytes, self.scratch_bytes = inner.saved_bytes, inner.scratch_bytes
        self._inner, self._queue = inner, queue

    def bind(self, buffers: Buffers) -> None:
        self.buffers = buffers
        names = [field.name for field in fields(Buffers) if field.name not in ("merger", "shadows")]
        self._inner.bind(replace(buffers, **{name: unwrapped(getattr(buffers, name)) for name in names}))

    def forward(self, context: StepContext) -> None:
        self._queue.put(self._inner.forward, context)

    def backward_parameters(self) -> None:
        self._queue.put(self._inner.backward_parameters)

    def backward_input(self) -> None:
        self._queue.put(self._inner.backward_input)

    def finish_output_grad(self) -> None:
        """Of a linear layer."""
        assert isinstance(self._inner, operators.SufficientFactors)
        self._queue.put(self._inner.finish_output_grad)


class LateLoss(LossOperator):
    """The loss of the NumPy set, done late."""

    def __init__(self, inner: LossOperator, queue: Queue) -> None:
        self._inner, self._queue = inner, queue

    def run(
        self, logits: Array, labels: Array, global_count: int, d_logits: Array | None, class_scale: float | None = None
    ) -> LossHandle:
        labels, sums = np.array(labels), []
        self._queue.put(
            lambda *arrays: sums.append(self._inner.run(arrays[0], labels, global_count, arrays[1], class_scale)),
            *(logits, d_logits),
        )

        class Handle:
            def result(_) -> LossSums:
                self._queue.wait()
                (handle,) = sums
                return handle.result()

        return Handle()


class LateKernelSet(NumpyKernelSet):
    """See the module. Shadows are float32 with float64: they stand for bfloat16 with float32, which NumPy does not know."""

    shadow_dtype = "float32"

    def __init__(self) -> None:
        self.queue = Queue()
        self.arithmetic = LateArithmetic(self.queue)

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        inner = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        bases = [ability for ability in ABILITIES if isinstance(inner, ability)]
        mixed_in = [
            base for base in type(inner).__mro__ if base.__module__ == operators.__name__ and not issubclass(base, Operator)
        ]
        assert len(mixed_in) == len(bases), "an ability is left out"
        return type(f"Late{type(inner).__name__}", (LateOperator, *bases), {})(inner, self.queue)

    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator:
        return LateLoss(super().make_loss(spec), self.queue)

    def allocate(self, size_bytes: int) -> Array:
        return wrapped(super().allocate(size_bytes))
