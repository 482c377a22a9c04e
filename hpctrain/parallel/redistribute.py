"""The operations that partitioning inserts into a graph: moves of a tensor between layouts, and sums of partial tensors.

They bring their own operators and work on plain memory, wherever that lies: what they compute is the arithmetic service's. Their
gradients are exact adjoints: a move's sends each gradient back to its owner and adds, a sum's hands out copies.

Between a start and its end the host waits for other ranks, so no program with one of these is captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpctrain.backend.kernels.abilities import Accumulating, AnyArrays, CallsHost, DeferredStart, RecomputedOutput
from hpctrain.backend.operators import Buffers, Operator, StepContext
from hpctrain.backend.specs import Shape, TensorSpec
from hpctrain.core.intervals import shape_of
from hpctrain.comm.posting_queue import Ticket
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.split_group import SplitGroup
from hpctrain.parallel.moves import TransferRunner, transfer

# A halo is kept for backward and put around the rank's own tile again, instead of both together, unless that saves little memory.
_RECOMPUTE_SHARE = 0.5


@dataclass(frozen=True)
class RedistributeSpec:
    """This rank's tensor of `source` becomes that of `target`. Collective over the split group.

    early: it is sent at its place in the graph and received just before its reader; it then has message buffers of its own.
    """

    source: Layout
    target: Layout
    rank: int
    purpose: str
    group: SplitGroup = field(compare=False, repr=False)
    early: bool = False

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        (x,) = inputs
        assert x.shape == shape_of(self.source.boxes[self.rank]), (x.shape, self.source.boxes[self.rank])
        return TensorSpec(shape_of(self.target.boxes[self.rank]), x.dtype)

    def flops(self, *inputs: Any, **none: Any) -> int:
        return 0

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return RedistributeOperator(self, inputs[0], training=training)


class RedistributeOperator(AnyArrays, CallsHost, Accumulating, DeferredStart, RecomputedOutput, Operator):
    """Forward packs and sends, copies the local elements while those travel, and unpacks; backward is the adjoint.

    `begin_backward` sends gradients ahead, so that they travel while the reader's weight gradients are computed. Where the
    target is little more than the source (a halo), it is recomputed for backward instead of being kept.

    Attributes:
        share: the pieces that this rank sends, receives and copies. message_bytes: of its message buffers.
    """

    def __init__(self, spec: RedistributeSpec, x: TensorSpec, *, training: bool) -> None:
        self.spec: RedistributeSpec = spec
        self.inputs, self.output = (x,), spec.output(x)
        self.share = transfer(spec.source, spec.target, spec.rank)
        self.message_bytes = self.share.buffer_bytes(x.item_bytes)
        received = self.share.receive_size
        self.begins_early = spec.early
        # An edge is small enough to be kept.
        self.recomputes_output = training and not spec.early and received <= _RECOMPUTE_SHARE * x.size
        self.saved_bytes = received * x.item_bytes if self.recomputes_output else 0
        self._sent: Ticket | None = None
        self._returned: Ticket | None = None

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        dtype = self.inputs[0].dtype
        self._runner = TransferRunner(
            self.share, self.spec.group, self.arithmetic, dtype, self.spec.purpose, own_memory=self.spec.early
        )
        self._kept = None if buffers.saved is None else buffers.saved.view(dtype)

    def begin_forward(self) -> None:
        self._sent = self._runner.start(self.buffers.inputs[0])

    def forward(self, context: StepContext) -> None:
        if self._sent is None:
            self.begin_forward()
        ticket, self._sent = self._sent, None
        assert ticket is not None
        self._runner.finish(ticket, self.buffers.inputs[0], self.buffers.output, self._kept)

    def recompute_output(self) -> None:
        self._runner.recompute(self.buffers.inputs[0], self.buffers.output, self._kept)

    def begin_backward(self) -> None:
        dy = self.buffers.output_grad
        assert dy is not None
        self._returned = self._runner.start_adjoint(dy)

    def backward_input(self) -> None:
        if self._returned is None:
            self.begin_backward()
        ticket, self._returned = self._returned, None
        assert ticket is not None
        dy, dx = self.buffers.output_grad, self.buffers.input_grads[0]
        assert dy is not None
        assert dx is not None
        self._runner.finish_adjoint(ticket, dy, dx, accumulate=self.buffers.accumulate[0])


@dataclass(frozen=True)
class ReduceScatterSpec:
    """Every rank holds a summand of all elements; rank r gets the sum of its box of `target`, a partition.

    The adjoint of a move from `target` to everybody. Collective over the split group.
    """

    target: Layout
    everything: Layout
    rank: int
    purpose: str
    group: SplitGroup = field(compare=False, repr=False)

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        (x,) = inputs
        assert x.shape == self.target.shape, (x.shape, self.target.shape)
        return TensorSpec(shape_of(self.target.boxes[self.rank]), x.dtype)

    def flops(self, *inputs: Any, **none: Any) -> int:
        return 0

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return ReduceScatterOperator(self, inputs[0])


class ReduceScatterOperator(AnyArrays, CallsHost, Operator):
    """Forward sends each summand to the owner of its elements, who adds in rank order; backward gathers the gradient.

    Attributes:
        share: this rank's, of the move whose adjoint the sum is. message_bytes: of its message buffers.
    """

    def __init__(self, spec: ReduceScatterSpec, x: TensorSpec) -> None:
        self.spec: ReduceScatterSpec = spec
        self.inputs, self.output = (x,), spec.output(x)
        self.share = transfer(spec.target, spec.everything, spec.rank)
        self.message_bytes = self.share.buffer_bytes(x.item_bytes)

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._runner = TransferRunner(self.share, self.spec.group, self.arithmetic, self.inputs[0].dtype, self.spec.purpose)

    def forward(self, context: StepContext) -> None:
        x = self.buffers.inputs[0]
        self._runner.finish_adjoint(self._runner.start_adjoint(x), x, self.buffers.output, accumulate=False)

    def backward_input(self) -> None:
        dy, dx = self.buffers.output_grad, self.buffers.input_grads[0]
        assert dy is not None
        assert dx is not None
        self._runner.finish(self._runner.start(dy), dy, dx)


@dataclass(frozen=True)
class PartialMeanSpec:
    """(N, h, w, C) -> (N, 1, 1, C): the sum of this rank's tile over the elements of the whole image."""

    elements: int

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        (x,) = inputs
        return TensorSpec((x.shape[0], 1, 1, x.shape[3]), x.dtype)

    def flops(self, *inputs: Any, **none: Any) -> int:
        shape: Shape = inputs[0].shape
        return shape[0] * shape[1] * shape[2] * shape[3]

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return PartialMeanOperator(self, inputs[0])


class PartialMeanOperator(AnyArrays, Operator):
    """The partial mean; zero for an empty tile."""

    def __init__(self, spec: PartialMeanSpec, x: TensorSpec) -> None:
        self.inputs, self.output = (x,), spec.output(x)
        self.spec = spec
        self._scale = 1.0 / max(1, spec.elements)

    def forward(self, context: StepContext) -> None:
        self.arithmetic.sum_pixels(self.buffers.output, self.buffers.inputs[0], self._scale)

    def backward_input(self) -> None:
        dy, dx = self.buffers.output_grad, self.buffers.input_grads[0]
        assert dy is not None
        assert dx is not None
        self.arithmetic.spread_pixels(dx, dy, self._scale)


@dataclass(frozen=True)
class NothingSpec:
    """An operation with an empty output on this rank (it holds no channel of it): the gradient of its input is zero."""

    spec: Any
    shape: Shape

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        return TensorSpec(self.shape, inputs[0].dtype)

    def flops(self, *inputs: Any, **none: Any) -> int:
        return 0

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return NothingOperator(self, inputs)


class NothingOperator(AnyArrays, Operator):
    """Computes nothing; its parameters on this rank are empty too."""

    def __init__(self, spec: NothingSpec, inputs: tuple[TensorSpec, ...]) -> None:
        self.inputs, self.output = inputs, spec.output(*inputs)
        self.spec = spec
        self.needs_inputs = (False,) * len(inputs)

    def forward(self, context: StepContext) -> None:
        return None

    def backward_input(self) -> None:
        for dx in self.buffers.input_grads:
            if dx is not None:
                self.arithmetic.fill(dx, 0.0)
