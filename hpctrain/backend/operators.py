"""The interface between layers and arithmetic: operators, made at set-up and run every step, and the kernel sets that make them.

A kernel set turns a spec into an `Operator`. The program (nn) plans memory from the operator's declarations and binds the
operator to its buffers once. Afterwards it calls `forward`, `backward_parameters`, `backward_input` and methods of abilities. An
operator allocates nothing large after `bind` (scratch and saved memory are planned for it), and keeps no reference to anything
but its buffers.

Optional abilities of operators and kernel sets are base classes, one for each ability. A program also works without them, but
takes more memory, or waits when it could compute. A plan tests for abilities once, when it is made; a step hardly tests at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.graph import Graph
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.pixels import PixelBatch
from hpctrain.backend.specs import Shape, SoftmaxCrossEntropySpec, Spec, TensorSpec, item_bytes
from hpctrain.core.errors import DataError

ALIGNMENT_BYTES = 64  # a cache line, and the width of an AVX-512 register


def aligned(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the size, rounded up to a multiple of the alignment; default: 64 bytes, for CPUs."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True)
class MixedLabels:
    """Two labels of each sample.

    Attributes:
        first: labels (N,) whose share of the target is `weight`.
        second: labels (N,) with the remaining share.
        weight: share of the first labels. Accuracies count the label with the larger share.
    """

    first: np.ndarray
    second: np.ndarray
    weight: float


def checked_labels(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return labels (N,) of any integer dtype as int64, after checking that all are in [0, classes).

    Raises:
        DataError: a label is outside; the message states the first such label.
    """
    labels = np.asarray(labels).astype(np.int64)
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        most = int(labels.max())
        needed = f"; the labels need a model of at least {most + 1} classes" if most >= classes else ""
        raise DataError(f"Label {wrong[0]} is outside the model's classes 0 to {classes - 1}{needed}.")
    return labels


Array = Any  # numpy.ndarray or DeviceArray: the kernel set decides


@dataclass(frozen=True)
class StepContext:
    """Numbers of a step that every operator receives at the start of a forward pass.

    Attributes:
        training: whether to use batch statistics and dropout; otherwise running statistics and no dropout are used.
        step: number of the step, counted from 0 since the start of training.
        sample_ids: int64 (N,): index in the data set of each sample of this (micro-)batch on this rank.
    """

    training: bool = True
    step: int = 0
    sample_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


class StatisticsMerger(Protocol):
    """Merger of batch statistics over the ranks that share a step. For a single rank it is the identity."""

    @property
    def alone(self) -> bool:
        """Whether there is only one rank, so that merging changes nothing."""

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        """Replace `mean` and `m2` by their values over all ranks, merged in rank order, and return the total count.

        Both are float64 (C,); `m2` is the sum of squared deviations. Collective over the merger's ranks: a rank without samples
        passes count 0.
        """

    def sum(self, values: np.ndarray) -> None:
        """Replace `values` (float64) by their sum over the ranks, in rank order. Collective over the merger's ranks."""


class LocalStatistics:
    """Implementation of `StatisticsMerger` for a rank that shares its step with no other rank."""

    alone = True

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        return count

    def sum(self, values: np.ndarray) -> None:
        return None


@dataclass
class Buffers:
    """The memory of one operator, fixed for the life of a program.

    Arrays in plain layout have the logical shape; in a kernel set's own layout they are flat, with `TensorSpec.size` elements.

    An operator writes to `output`, to the gradients, the batch statistics, `saved` and `scratch`; in backward also to
    `output_grad`.

    `input_grads[i]` is None if the gradient is not needed. If `accumulate[i]` is set, the operator adds to the buffer instead of
    overwriting it; the plan sets it only for `Accumulating` operators.
    """

    inputs: tuple[Array, ...]
    output: Array
    input_grads: tuple[Array | None, ...] = ()
    output_grad: Array | None = None
    accumulate: tuple[bool, ...] = ()
    parameters: Mapping[str, Array] = field(default_factory=dict)  # by role: "weight", "bias"
    gradients: Mapping[str, Array] = field(default_factory=dict)  # same roles; overwritten, never added to
    shadows: Mapping[str, Array] = field(default_factory=dict)  # same roles: rounded parameters, if the set has any
    statistics: Mapping[str, Array] = field(default_factory=dict)  # by role: "running_mean", "batch_mean", ...
    saved: Array | None = None  # uint8 (saved_bytes), kept from forward to backward
    scratch: Array | None = None  # uint8 (scratch_bytes), shared with other operators, so valid only within one call
    merger: StatisticsMerger = field(default_factory=LocalStatistics)


class Operator(ABC):
    """One planned computation, described by the attributes that a subclass sets.

    All attributes are fixed at construction, so that memory can be planned; `bind` then provides the memory. An operator declares
    optional abilities (work in place, add to gradients, start early ...) by inheriting from the classes below. Backward may read
    only the buffers that are declared here as needed; the plan may reuse all other buffers before.

    Attributes:
        inputs: specs, with layouts, of the inputs that the operator reads. The plan inserts copies if a neighbour's layout
            differs.
        output: spec, with layout, of the output.
        needs_inputs: whether backward reads each input.
        needs_output: whether backward reads the output.
        saved_bytes: size in bytes of the memory kept from forward to backward.
        scratch_bytes: size in bytes of the memory used within one call.
        fallback_reason: reason why the kernel set uses another set's operator, for reports; empty if it uses its own.
        copied_bytes: bytes that three phases read and write to copy parameters, or their gradients, between formats, for
            predictions. The phases are forward, the gradients of the parameters, and the gradients of the inputs.
        winograd_shares: for each of these phases, its operations relative to those of the spec; None unless it uses Winograd.
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
    copied_bytes: tuple[int, int, int] = (0, 0, 0)
    winograd_shares: tuple[float | None, float | None, float | None] = (None, None, None)

    def bind(self, buffers: Buffers) -> None:
        """Bind the buffers, and build everything that a step needs, such as views and argument lists."""
        self.buffers = buffers

    @abstractmethod
    def forward(self, context: StepContext) -> None:
        """Compute the output from the inputs."""

    def backward_parameters(self) -> None:  # noqa: B027  an operator without parameters has nothing to do
        """Write the parameters' gradients from output_grad (and inputs).

        A program calls it before `backward_input`, unless the node has `input_first` set. Once backward has begun, the operator
        owns output_grad: it may write there, and no other operator reads it.
        """

    @abstractmethod
    def backward_input(self) -> None:
        """Write each input_grads[i] that is not None."""


Request = tuple[Shape, str]  # shape, dtype


def total_bytes(requests: Iterable[Request], alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the size in bytes of a buffer that `carve` divides into these arrays."""
    return sum(aligned(math.prod(shape) * item_bytes(dtype), alignment_bytes) for shape, dtype in requests)


def carve(buffer: Array | None, requests: Iterable[Request], alignment_bytes: int = ALIGNMENT_BYTES) -> list[Array]:
    """Return arrays of these shapes and dtypes, one after another in `buffer` (uint8), each aligned.

    The buffer may be None if all arrays are empty, which are then arrays of the host.
    """
    buffer = np.empty(0, np.uint8) if buffer is None else buffer
    arrays, start = [], 0
    for shape, dtype in requests:
        size_bytes = math.prod(shape) * item_bytes(dtype)
        memory = buffer[start : start + size_bytes]
        assert memory.nbytes == size_bytes, "the buffer is smaller than the declared arrays"
        arrays.append(memory.view(dtype).reshape(shape))
        start += aligned(size_bytes, alignment_bytes)
    return arrays


class PlainOperator(Operator):
    """An operator on plain NHWC memory. A subclass's constructor calls `declare` last; `bind` then sets its arrays.

    Operators for training compute gradients. Other operators save nothing for gradients, and their backward methods must not be
    called.

    Attributes:
        saved: arrays kept from forward to backward, in the order of `declare`.
        scratch: arrays used within one call, in the order of `declare`.
    """

    #: alignment of declared arrays
    array_alignment_bytes: ClassVar[int] = ALIGNMENT_BYTES
    #: buffer of operators that declare no arrays
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
        """Declare the saved arrays, kept from forward to backward, and the scratch arrays, used within one call."""
        self._saved, self._scratch = saved, scratch
        self.saved_bytes = total_bytes(saved, self.array_alignment_bytes)
        self.scratch_bytes = total_bytes(scratch, self.array_alignment_bytes)

    def bind(self, buffers: Buffers) -> None:
        self.buffers = buffers
        saved, scratch = (self.no_buffer if each is None else each for each in (buffers.saved, buffers.scratch))
        self.saved = carve(saved, self._saved, self.array_alignment_bytes)
        self.scratch = carve(scratch, self._scratch, self.array_alignment_bytes)

    def input_grad(self, i: int = 0) -> Array | None:
        """Return the buffer of the gradient of input i; None if the gradient is not needed."""
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
    """Sums over one micro-batch, not means, since ranks may have different numbers of samples. A step adds them up."""

    loss: float  # sum over the samples, undivided
    top1: int  # number of samples whose label has the largest logit
    top5: int  # number of samples whose label is among the first `top` of the spec
    count: int  # number of samples

    def result(self) -> LossSums:
        """Return these sums, so that sums on the host implement `LossHandle`."""
        return self


class LossHandle(Protocol):
    """Sums that are being copied to the host."""

    def result(self) -> LossSums:
        """Wait for the sums and return them. The loss operator's second subsequent run reuses their memory."""


class LossOperator(ABC):
    """Softmax cross entropy over logits (N, classes)."""

    @abstractmethod
    def run(
        self,
        logits: Array,
        labels: Array | MixedLabels,
        global_count: int,
        d_logits: Array | None,
        class_scale: float | None = None,
    ) -> LossHandle:
        """Compute, without waiting, the sums over this batch, and d_logits = d(sum loss / global_count)/d logits if given.

        Args:
            labels: integers (N,) in the host's memory, or two labels of each sample; the arrays may change afterwards.
            class_scale: factor on the weights of classes, such that the mean over the step is the weighted mean: number of
                samples of the step divided by the sum of their labels' weights. None: weights of classes are not applied.
        """


class KernelSet(ABC):
    """Base of the kernel sets `numpy` (the reference), `onednn` (CPUs) and `cuda` (GPUs), which make operators and arrays.

    Attributes:
        name: name of the set in a configuration.
        dtypes: dtypes in which its operators compute.
        arithmetic: arithmetic service for the arrays of this set.
        alignment_bytes: alignment of every buffer in an arena.
        shadow_dtype: dtype of the rounded copies of parameters that operators read; None if operators read the parameters
            themselves.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    arithmetic: Arithmetic
    alignment_bytes: int = ALIGNMENT_BYTES
    shadow_dtype: str | None = None

    @property
    def version(self) -> str:
        """Version of the library that computes; "" for hpctrain's own kernels."""
        return ""

    @abstractmethod
    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        """Return the operator for `spec` on inputs of these shapes, in which N, H and W may be 0.

        Args:
            input_gradient: whether `backward_input` will be called. False for operators that read the images: kernels are then
                chosen without regard to the input's gradient.

        Raises:
            BackendError: the set cannot compute the spec in this dtype.
        """

    @abstractmethod
    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator: ...

    def begin(self, context: StepContext) -> None:  # noqa: B027  most operators take numbers from the context
        """Begin a forward pass: copy the context's numbers, without waiting, to the memory from which operators read them."""

    def wait(self) -> None:  # noqa: B027  kernels of the host are done when they return
        """Wait until all work of this set is done, for measurements. A step never calls it."""

    def free_bytes(self) -> int | None:
        """Return the number of bytes that `allocate` can still provide; None if the operating system decides."""
        return None

    def used_bytes(self) -> int | None:
        """Return the bytes of the device's memory that all processes use; None if kernels compute in the host's memory."""
        return None

    def fuse(self, graph: Graph, *, training: bool) -> Graph:
        """Return the graph with neighbouring nodes replaced by this set's fused nodes. Other nodes are unchanged."""
        return graph

    def reorder(self, source: TensorSpec, target: TensorSpec) -> Operator:
        """Return the operator that copies a tensor from one layout to another, and its gradient back."""
        raise NotImplementedError(f"The kernel set {self.name} cannot reorder tensors, because it has only one layout.")

    @abstractmethod
    def allocate(self, size_bytes: int) -> Array:
        """Return a zeroed uint8 buffer in the memory of the kernels, aligned to at least 64 bytes, on huge pages if possible."""


class PixelInput(ABC):
    """A kernel set that computes a network's input from stored pixels, in its own memory."""

    @abstractmethod
    def make_input(self, target: Array, images: PixelBatch) -> None:
        """Compute target (N, H, W, C) := images, with the values of `np.asarray(images)`, rounded to the target's dtype.

        The stored pixels may change afterwards.
        """


class CapturedWork(Protocol):
    """Calls of operators that were captured instead of executed."""

    def launch(self) -> None:
        """Enqueue all captured work at once, on the memory that it was captured with. The call may be repeated."""


class CapturesWork(ABC):
    """A kernel set that can capture the calls of its operators, as in CUDA graphs."""

    captures: bool = True  # whether programs capture their calls

    def stop_capturing(self) -> None:
        """Let all networks made from now on run operator by operator, without capturing their programs."""
        self.captures = False

    @abstractmethod
    def capture(self) -> AbstractContextManager[CapturedWork]:
        """Capture operators' calls inside this context instead of executing them.

        Each call must have been executed once before.
        """


class AnyArrays:
    """An operator that computes only through the arithmetic service, and therefore runs on the arrays of any kernel set.

    Specs that make their own operators (see `nn.compile`) can use it, since they are independent of kernel sets.

    Attributes:
        arithmetic: arithmetic service; default: the host's.
    """

    arithmetic: Arithmetic = HostArithmetic()

    def use(self, arithmetic: Arithmetic) -> None:
        """Set the arithmetic service. Call this before `bind`."""
        self.arithmetic = arithmetic


class InPlace:
    """An operator that can work in place: inputs[0] and the output may share a buffer, and so may output_grad and input_grads[0].

    The plan decides whether they do. Forward and backward must work element by element. Sharing saves the memory of an activation
    and of a gradient.
    """


class InputView:
    """An operator whose output is the memory of inputs[0] in another shape, so that nothing is computed.

    The gradients of the input and the output share memory too. If other operators read the input, its gradient is a sum, and the
    program copies the output's gradient to it.
    """


class ViewOperator(InputView, Operator):
    """Operator of flatten and of the identity: the output is the input's memory.

    Args:
        keeps_layout: whether the output has the input's shape and layout, instead of the spec's output in plain memory.
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
    """An operator whose `backward_input` adds to input_grads[i] if `Buffers.accumulate[i]` is set.

    This saves the memory of a partial gradient, and the pass that adds it.
    """


class OutputReadOnce:
    """An operator that reads its output only in the first half of backward. The output's memory is free during the second half.

    An example is a fused ReLU, whose mask is applied to the output's gradient once, at the start of backward. See also
    `needs_output`.
    """


class JointBackward:
    """An operator whose `backward_parameters` also writes the inputs' gradients, so that a later `backward_input` does nothing.

    The plan then reserves the buffers of these gradients one action earlier.
    """


class DeferredStart:
    """An operator whose backward takes time without computing, such as a message, and may start before its result is needed."""

    def begin_backward(self) -> None:
        """Start the backward work without waiting. The output's gradient is complete. The plan may omit this call."""
        raise NotImplementedError


class RecomputedOutput:
    """An operator whose output need not be kept from forward to backward: it is computed again if backward reads it.

    Attributes:
        recomputes_output: whether recomputation is worthwhile at these shapes.
    """

    recomputes_output: bool = True

    def recompute_output(self) -> None:
        """Write the output again, from inputs[0] and the saved arrays."""
        raise NotImplementedError


class SufficientFactors:
    """An operator with the weight gradient x^T dy, of inputs[0] = x (N, in) and output_grad = dy (N, out).

    The bias's gradient is the sum of dy over N. An averager may therefore send x and dy instead of gradients (Xie et al. 2015),
    and compute the gradients in place of `backward_parameters`.
    """

    def finish_output_grad(self) -> None:
        """Apply the gradient of a fused activation to output_grad, which becomes the gradient of the linear map's output."""


class ParameterCopies:
    """An operator that copies parameters to its own format and reuses the copies in later evaluations."""

    def parameters_changed(self) -> None:
        """Mark the copies as stale, because the parameters have changed since the last forward pass."""
        raise NotImplementedError


class FollowsOperator:
    """An operator that may read the parameter copies of an equal operator in another program that runs side by side."""

    def follow(self, first: Operator) -> None:
        """Declare, before `bind`, that each call follows the same call of `first`.

        `first` is an operator of the same spec with the same parameters. Between its call and this operator's call, `first` is
        not called again, and no other code writes to the arrays that `first` is bound to.
        """
        raise NotImplementedError


class CallsHost:
    """An operator whose calls may need numbers from other ranks, which the host exchanges.

    Such a call waits and is never captured.

    Attributes:
        calls_host: whether the calls need the host; final after `bind`.
    """

    calls_host: bool = True
