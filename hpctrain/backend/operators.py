"""The seam between layers and arithmetic: operators, made at set-up, run every step, and the kernel sets that make them.

A kernel set turns a spec into an `Operator`; the program (nn) plans memory from what the operator declares, binds it to its
buffers once, and then only calls `forward`, `backward_parameters` and `backward_input`. An operator allocates nothing after
`bind` (scratch and saved memory are planned for it) and never keeps a reference to anything but its buffers.

Abilities beyond `Operator` are classes to inherit from, each for one thing, none of them required. Without any of these a
plan works too: it takes more memory, or waits where it could compute. A plan asks an operator for them once, when it is made;
a step hardly asks at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic, PinnedBytes
from hpctrain.backend.graph import Graph
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.pixels import PixelBatch
from hpctrain.backend.specs import Shape, SoftmaxCrossEntropySpec, Spec, TensorSpec, item_bytes
from hpctrain.core.errors import DataError

ALIGNMENT_BYTES = 64  # a cache line, and the width of an AVX-512 register


def aligned(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the size, rounded up to a multiple of the alignment; by default that of a CPU."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True)
class MixedLabels:
    """Two labels of each sample, first and second (N,); the first has the share `weight`. Accuracies count the larger one."""

    first: np.ndarray
    second: np.ndarray
    weight: float


def checked_labels(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return the labels (N,) of any integer dtype as int64, all of them in [0, classes).

    Raises:
        DataError: the first label outside, with the nearest legal one.
    """
    labels = np.asarray(labels).astype(np.int64)
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        nearest = 0 if wrong[0] < 0 else classes - 1
        raise DataError(
            f"Label {wrong[0]} is outside the model's classes 0 to {classes - 1}; the nearest legal label is {nearest}, "
            f"or the model needs at least {int(labels.max()) + 1} classes."
        )
    return labels


Array = Any  # numpy.ndarray or DeviceArray: the kernel set decides


@dataclass(frozen=True)
class StepContext:
    """What every operator is given at the start of a forward pass.

    Args:
        training: batch statistics and dropout, or their evaluation counterparts.
        epoch, step: counted from 0 since the start of training (not since the last resume).
        sample_ids: int64 (N,), the data set's index of each sample of this (micro-)batch on this rank.
        global_count: samples of the whole step over all ranks and micro-batches.
    """

    training: bool = True
    epoch: int = 0
    step: int = 0
    sample_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    global_count: int = 0


class StatisticsMerger(Protocol):
    """Merges batch statistics over the ranks that share a step. One process: the identity."""

    @property
    def alone(self) -> bool:
        """Whether there is one rank only, and nothing to merge."""
        ...

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        """Replace `mean` and `m2` by those of all ranks, merged in rank order, and return the total count.

        Both are float64 (C,); `m2` is the sum of squared deviations. Collective: every rank calls it, with count 0 if it has no
        samples.
        """
        ...

    def sum(self, values: np.ndarray) -> None:
        """Replace `values`, float64, by their sum over the ranks, in rank order. Collective."""
        ...


class LocalStatistics:
    """The merger of a rank that shares its step with no other rank."""

    alone = True

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        return count

    def sum(self, values: np.ndarray) -> None:
        return None


@dataclass
class Buffers:
    """The memory that one operator works on, fixed for the life of a program.

    Arrays in plain layout have the logical shape; in a kernel set's own layout they are flat, `TensorSpec.size` long.

    input_grads[i] is None if it is not wanted. With `accumulate[i]` the operator adds to it instead of writing it; only
    `Accumulating` operators get that.
    """

    inputs: tuple[Array, ...]
    output: Array
    input_grads: tuple[Array | None, ...] = ()
    output_grad: Array | None = None
    accumulate: tuple[bool, ...] = ()
    parameters: Mapping[str, Array] = field(default_factory=dict)  # by role: "weight", "bias"
    gradients: Mapping[str, Array] = field(default_factory=dict)  # same roles; written, never added to
    shadows: Mapping[str, Array] = field(default_factory=dict)  # same roles: rounded parameters, if the set has any
    statistics: Mapping[str, Array] = field(default_factory=dict)  # by role: "running_mean", "batch_mean", ...
    saved: Array | None = None  # uint8 (saved_bytes), kept from forward to backward
    scratch: Array | None = None  # uint8 (scratch_bytes), shared with other operators, valid within one call
    merger: StatisticsMerger = field(default_factory=LocalStatistics)


class Operator(ABC):
    """One planned computation, described by the attributes that a subclass sets.

    inputs, output: the specs (with layouts) that it wants; the plan inserts copies if a neighbour's layout differs.
    needs_inputs[i], needs_output: backward reads inputs[i], the output. All other buffers are overwritten before backward.
    saved_bytes, scratch_bytes: memory that it keeps from forward to backward, and that it works in within one call.
    forward, backward_parameters, backward_input: the computation.

    All but the computation is fixed at construction, so that memory can be planned; `bind` then provides the memory. An operator
    declares what else it can do (work in place, add to gradients, start early ...) by inheriting from the abilities below.

    Other attributes: spec: what it computes. fallback_reason: why a kernel set took another set's operator, for reports; empty
    for an operator of its own.
    """

    spec: Spec
    inputs: tuple[TensorSpec, ...]
    output: TensorSpec
    needs_inputs: tuple[bool, ...] = (False,)
    needs_output: bool = False
    saved_bytes: int = 0
    scratch_bytes: int = 0
    buffers: Buffers
    fallback_reason: str = ""

    def bind(self, buffers: Buffers) -> None:
        """Take the buffers and build everything that a step will use (views, argument lists)."""
        self.buffers = buffers

    @abstractmethod
    def forward(self, context: StepContext) -> None:
        """Write the output from the inputs."""

    def backward_parameters(self) -> None:  # noqa: B027  an operator without parameters has nothing to do
        """Write the parameters' gradients from output_grad (and inputs).

        A program calls it before `backward_input`, unless the node says otherwise. Once backward has begun, the operator owns
        output_grad: it may write there, and nothing else reads it.
        """

    @abstractmethod
    def backward_input(self) -> None:
        """Write each input_grads[i] that is not None."""


Request = tuple[Shape, str]  # shape, dtype


def total_bytes(requests: Iterable[Request], alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the bytes of a buffer that `carve` divides into these arrays."""
    return sum(aligned(math.prod(shape) * item_bytes(dtype), alignment_bytes) for shape, dtype in requests)


def carve(buffer: Array | None, requests: Iterable[Request], alignment_bytes: int = ALIGNMENT_BYTES) -> list[Array]:
    """Return arrays of these shapes and dtypes, one after another in `buffer` (uint8), each aligned.

    Args:
        buffer: None, an empty one of the host, if all arrays are empty.
    """
    buffer = np.empty(0, np.uint8) if buffer is None else buffer
    arrays, start = [], 0
    for shape, dtype in requests:
        size_bytes = math.prod(shape) * item_bytes(dtype)
        memory = buffer[start : start + size_bytes]
        assert memory.nbytes == size_bytes, "the buffer is smaller than what was declared"
        arrays.append(memory.view(dtype).reshape(shape))
        start += aligned(size_bytes, alignment_bytes)
    return arrays


class PlainOperator(Operator):
    """An operator on plain NHWC memory. A subclass's constructor calls `declare` last; `bind` then gives it arrays.

    Training operators compute gradients; the others keep nothing for them, and must not be asked for any.

    Attributes:
        saved, scratch: the arrays that were declared, in that order.
    """

    #: alignment of declared arrays, and the buffer of operators that declare none
    array_alignment_bytes: ClassVar[int] = ALIGNMENT_BYTES
    no_buffer: ClassVar[Array] = np.empty(0, np.uint8)

    def __init__(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool) -> None:
        self.spec = spec
        self.inputs = tuple(x.plain() for x in inputs)
        self.output = spec.output(*self.inputs)
        self.dtype = self.inputs[0].dtype
        self.training = training
        self.needs_inputs = (False,) * len(inputs)
        self.saved: Sequence[Array] = ()
        self.scratch: Sequence[Array] = ()
        self._saved: Sequence[Request] = ()
        self._scratch: Sequence[Request] = ()

    def declare(self, *, saved: Sequence[Request] = (), scratch: Sequence[Request] = ()) -> None:
        """Declare the arrays that this operator keeps from forward to backward, and those that it uses within one call."""
        self._saved, self._scratch = saved, scratch
        self.saved_bytes = total_bytes(saved, self.array_alignment_bytes)
        self.scratch_bytes = total_bytes(scratch, self.array_alignment_bytes)

    def bind(self, buffers: Buffers) -> None:
        self.buffers = buffers
        saved, scratch = (self.no_buffer if each is None else each for each in (buffers.saved, buffers.scratch))
        self.saved = carve(saved, self._saved, self.array_alignment_bytes)
        self.scratch = carve(scratch, self._scratch, self.array_alignment_bytes)

    def input_grad(self, i: int = 0) -> Array | None:
        """Return the buffer of the gradient of input i; None if it is not wanted."""
        return self.buffers.input_grads[i] if i < len(self.buffers.input_grads) else None

    def accumulates(self, i: int = 0) -> bool:
        """Return whether the gradient of input i is added to its buffer."""
        return i < len(self.buffers.accumulate) and self.buffers.accumulate[i]

    @property
    def output_grad(self) -> Array:
        """The buffer of the output's gradient."""
        assert self.buffers.output_grad is not None, f"{type(self).__name__} is bound without a gradient of its output"
        return self.buffers.output_grad


@dataclass
class LossSums:
    """The terms that one micro-batch adds to the step's sums: not means, so that each rank counts by its samples."""

    loss: float  # sum over the samples, undivided
    top1: int
    top5: int
    count: int

    def result(self) -> LossSums:
        """Return these sums themselves: sums that have arrived are a `LossHandle`."""
        return self


class LossHandle(Protocol):
    """Sums that are being copied to the host."""

    def result(self) -> LossSums:
        """Wait for the sums and return them. Call it before the loss is run for the second time after this one."""
        ...


class LossOperator(ABC):
    """Softmax cross entropy over logits (N, classes)."""

    @abstractmethod
    def run(self, logits: Array, labels: Array | MixedLabels, global_count: int, d_logits: Array | None) -> LossHandle:
        """Compute the sums over this batch, and d_logits = d(sum loss / global_count)/d logits if given. Never waits.

        Args:
            labels: integers of the host (N,), or two of each sample with their shares; may change afterwards.
        """


class KernelSet(ABC):
    """Makes operators. numpy: the reference, float32 and float64; onednn: float32, fast on CPUs; cuda: GPUs.

    Attributes:
        arithmetic: arithmetic service for the arrays of this set.
        alignment_bytes: alignment of every buffer in an arena.
        shadow_dtype: dtype of a rounded copy of all parameters, which operators read instead; None if they need none.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    arithmetic: Arithmetic
    alignment_bytes: int = ALIGNMENT_BYTES
    shadow_dtype: str | None = None

    @property
    def version(self) -> str:
        """Version of the library that computes; "" for kernels of our own."""
        return ""

    @abstractmethod
    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        """Return the operator for `spec` on inputs of these shapes. Accepts N = 0, H = 0 and W = 0.

        input_gradient: whether `backward_input` will be called. False for operators that read the images: kernels are then
            chosen without regard to the input's gradient.

        Raises:
            BackendError: a spec or dtype that this set cannot compute.
        """

    @abstractmethod
    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator: ...

    def begin(self, context: StepContext) -> None:  # noqa: B027  most operators take numbers from the context
        """Begin a forward pass: copy numbers of the step to where operators read them in memory. Never waits."""

    def wait(self) -> None:  # noqa: B027  kernels of the host are done when they return
        """Wait until all work of this set is done, to time it. A step never does."""

    def free_bytes(self) -> int | None:
        """Return the bytes that `allocate` still has; None if the operating system decides."""
        return None

    def used_bytes(self) -> int | None:
        """Return the bytes of the device's memory that are in use; None if kernels compute in the process's own memory."""
        return None

    def pinned_bytes(self) -> PinnedBytes | None:
        """Return the pinned memory so far; None if kernels compute in the memory of the host."""
        return None

    def pinned_input_bytes(self, samples: int, stored: tuple[int, int, int], *, resizes: bool) -> int:
        """Return the pinned bytes of batches of at most `samples` stored images (h, w, C). resizes: images are resized first."""
        return 0

    def fuse(self, graph: Graph, *, training: bool) -> Graph:
        """Replace neighbours by fused nodes if this set has them; all others stay as they are."""
        return graph

    def reorder(self, source: TensorSpec, target: TensorSpec) -> Operator:
        """Return the operator that copies a tensor from one layout to another (backward: the gradient back)."""
        raise NotImplementedError(f"the {self.name} kernel set has one layout")

    @abstractmethod
    def allocate(self, size_bytes: int) -> Array:
        """Return a zeroed uint8 buffer of the device, aligned to 64 bytes at least, on huge pages if possible."""


class PixelInput(ABC):
    """A kernel set that makes a network's input of stored pixels, in its own memory."""

    @abstractmethod
    def make_input(self, target: Array, images: PixelBatch) -> None:
        """Compute target (N, H, W, C) := images, exactly the numbers of these as an array, rounded to the target's dtype.

        The pixels may change afterwards.
        """


class CapturedWork(Protocol):
    """Work of operators that was captured instead of done."""

    def launch(self) -> None:
        """Enqueue all of it at once, on the memory that it was captured with. May be called any number of times."""
        ...


class CapturesWork(ABC):
    """A kernel set whose operators' calls can be captured: CUDA graphs.

    captures: whether programs shall capture them.
    """

    captures: bool = True

    @abstractmethod
    def capture(self) -> AbstractContextManager[CapturedWork]:
        """Capture operators' calls inside this context instead of doing them. The same calls have been made outside before."""


class AnyArrays:
    """The operator computes by the arithmetic service alone, so it runs on the arrays of any kernel set.

    Specs that make their own operators (see `nn.compile`) may need it, because they know no kernel set.

    arithmetic: the service, that of the host until another one is given.
    """

    arithmetic: Arithmetic = HostArithmetic()

    def use(self, arithmetic: Arithmetic) -> None:
        """Compute by this service. Called before `bind`."""
        self.arithmetic = arithmetic


class InPlace:
    """The output may share the buffer of inputs[0], and input_grads[0] that of output_grad; the plan decides.

    Forward and backward must work element by element. Saves an activation and a gradient.
    """


class InputView:
    """The output is inputs[0]'s memory under another shape, its gradient too; forward and backward do nothing.

    If the input has other readers, its gradient is a sum, and the program copies the output's gradient to it.
    """


class ViewOperator(InputView, Operator):
    """The output is the input's memory: flatten, and the identity.

    Args:
        keeps_layout: the output has the input's shape and layout, instead of the spec's output in plain memory.
    """

    def __init__(self, spec: Spec, x: TensorSpec, *, keeps_layout: bool = False) -> None:
        self.spec = spec
        self.inputs = (x if keeps_layout else x.plain(),)
        self.output = x if keeps_layout else spec.output(x.plain())

    def forward(self, context: StepContext) -> None:
        """Do nothing: the memory is shared."""

    def backward_input(self) -> None:
        """Do nothing: the memory is shared."""


class Accumulating:
    """`backward_input` adds to input_grads[i] if `Buffers.accumulate[i]` is set. Saves a partial gradient, and adding it."""


class OutputReadOnce:
    """Only the first of the two halves of backward reads the output (`needs_output`), so it is free during the second.

    An example is a mask that is applied to the output's gradient before both halves.
    """


class JointBackward:
    """`backward_parameters` writes the inputs' gradients too, and a `backward_input` after it does nothing.

    The plan then reserves these gradients one action earlier.
    """


class DeferredStart:
    """Work that takes time without computing (a message) may start before it has to be complete.

    begins_early: `begin_forward` is called at the operator's place, `forward` just before its first reader; else only `forward`.
    """

    begins_early: bool = False

    def begin_forward(self) -> None:
        """Start the forward work: the input is complete, and stays so until `forward`, which follows later. Must not wait."""
        raise NotImplementedError

    def begin_backward(self) -> None:
        """Start the backward work, if the plan calls it: the output's gradient is complete. Must not wait."""
        raise NotImplementedError


class RecomputedOutput:
    """The output need not be kept from forward to backward: if backward needs it, it is computed again.

    recomputes_output: whether that is worth it at these shapes.
    """

    recomputes_output: bool = True

    def recompute_output(self) -> None:
        """Write the output again, from inputs[0] and what was saved."""
        raise NotImplementedError


class SufficientFactors:
    """The weight's gradient is x^T dy of inputs[0] (N, in) and output_grad (N, out), the bias's the sum of dy over N.

    So an averager may send x and dy instead (Xie et al. 2015), and compute the gradients in place of `backward_parameters`.
    """

    def finish_output_grad(self) -> None:
        """Turn output_grad into the gradient of the linear map itself: apply the gradient of an activation fused after it."""


class ParameterCopies:
    """The operator keeps copies of parameters, in a format of its own, from one evaluation to the next."""

    def parameters_changed(self) -> None:
        """Note that parameters have changed since the last forward: the copies are stale."""
        raise NotImplementedError


class FollowsOperator:
    """If several programs run side by side, copies of parameters that the first program's operator makes may serve the others."""

    def follow(self, first: Operator) -> None:
        """Announce before `bind` that each call follows the same call of `first`.

        `first` is an operator of the same spec with the same parameters. Between its call and that of this operator it is not
        called again, and nothing else writes to the arrays that it is bound to.
        """
        raise NotImplementedError


class CallsHost:
    """Its calls may need numbers of other ranks, which the host fetches. Such a call waits, and is never captured.

    calls_host: whether they do, once it is bound.
    """

    calls_host: bool = True
