"""Convolution, with or without a ReLU behind it.

The flat weights (KRSC) are copied to the kernels' blocked format: in training at every forward and backward (they change every
step, so a cache would only cost memory), in evaluation once after `parameters_changed`. Weight gradients are copied back. Of
several operators that run side by side, the first one's copies serve the others where kernels read the same format.
"""

from __future__ import annotations

import numpy as np

from hpctrain.backend.kernels.abilities import Accumulating, FollowsOperator, OutputReadOnce, ParameterCopies
from hpctrain.backend.operators import Array, Buffers, Operator, StepContext
from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Descriptor, Engine
from hpctrain.backend.kernels.onednn.convolution import Convolution, choose
from hpctrain.backend.onednn.elementwise import ReluMask
from hpctrain.backend.onednn.operator import elements
from hpctrain.backend.kernels.onednn.memory import allocate
from hpctrain.backend.kernels.onednn.operator import BACKWARD_DATA, FORWARD, LibraryOperator
from hpctrain.backend.kernels.onednn.regions import Regions, part
from hpctrain.backend.kernels.onednn.reorder import Copy
from hpctrain.backend.kernels.onednn.tiles import Work
from hpctrain.backend.onednn.winograd import Product
from hpctrain.backend.specs import Conv2dSpec, TensorSpec

_ADDING = "backward data, adding"


def make_conv2d(
    engine: Engine, spec: Conv2dSpec | WithRelu, x: TensorSpec, *, training: bool, input_gradient: bool = True
) -> Conv2dOperator:
    """The operator on images of `x`, whatever layout they come in."""
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    assert isinstance(inner, Conv2dSpec)
    relu = isinstance(spec, WithRelu)
    plan = choose(engine, inner, x, training=training, relu=relu, input_gradient=input_gradient)
    kind = Conv2dOperator if plan.adding is None else AddingConv2dOperator
    return kind(engine, spec, plan, training=training)


class Conv2dOperator(OutputReadOnce, ParameterCopies, FollowsOperator, LibraryOperator):
    """y = x * weight + bias, then ReLU where the spec says so."""

    needs_inputs = (True,)

    def __init__(self, engine: Engine, spec: Conv2dSpec | WithRelu, plan: Convolution, *, training: bool) -> None:
        self.spec, self._engine, self._plan, self._training = spec, engine, plan, training
        relu = isinstance(spec, WithRelu)
        self.primitives = plan.phases
        self._what = plan.what
        self._turns = plan.spec.window.kernel != (1, 1)
        self.inputs, self.output = (plan.x,), plan.y
        self.needs_output = relu
        self._mask = ReluMask(engine, f"{self._what} backward", elements(engine, plan.y)) if relu and training else None
        self._first: Conv2dOperator | None = None
        self._place_memory()

    def _place_memory(self) -> None:
        """Scratch: the library's own, one blocked copy of weights or their gradient, and the turned kernel."""
        plan = self._plan
        formats = [plan.weights]
        turned_bytes = 0
        if self._training:
            formats.append(plan.diff_weights)
            if plan.backward_data is not None:
                formats.append(plan.backward_data_weights)
            if plan.adding is not None:
                formats.append(plan.adding_weights)
                turned_bytes = plan.plain_weights.size_bytes if self._turns else 0
        regions = Regions()
        self._library_part = regions.add(max(primitive.scratchpad_bytes for primitive in plan.primitives))
        self._weights_part = regions.add(max(each.size_bytes for each in formats))
        self._turned_part = regions.add(turned_bytes)
        others = (plan.winograd, plan.winograd_data, plan.winograd_weights)
        self.scratch_bytes = max(regions.total_bytes, *(0 if other is None else other.scratch_bytes for other in others))

    def follow(self, first: Operator) -> None:
        self._first = first if isinstance(first, Conv2dOperator) and self._training else None

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        plan, scratch = self._plan, buffers.scratch
        library = part(scratch, self._library_part)
        blocked = part(scratch, self._weights_part) if self._training else allocate(plan.weights.size_bytes)
        self._stale = True
        self._copied: dict[str, tuple[Descriptor, Array]] = {}  # by use, the format and the place of the copies made here
        self._load: Work | None = None
        self._forward: Work = self._bind_forward(buffers, library, blocked)
        self._load_backward: Work | None = None
        self._backward_data: Work | None = None
        self._turn: tuple[Array, Array] | None = None
        if buffers.gradients:
            self._bind_weights(buffers, library, blocked)
        if buffers.input_grads and buffers.input_grads[0] is not None:
            self._bind_input(buffers, library, blocked)
        if self._mask is not None and buffers.output_grad is not None:
            self._apply_mask = self._mask.bind(buffers.output, buffers.output_grad, buffers.output_grad)
        self._masked = False

    def _bind_forward(self, buffers: Buffers, library: Array, blocked: Array) -> Work:
        plan, weight = self._plan, buffers.parameters["weight"]
        if plan.winograd is not None:
            x, y, first = buffers.inputs[0], buffers.output, self._first
            leader = None if first is None else first._leading(first._plan.winograd)
            return plan.winograd.bind(x, weight, buffers.parameters.get("bias"), y, buffers.scratch, leader=leader)
        self._load, weights = self._prepare(FORWARD, plan.plain_weights, weight, plan.weights, blocked)
        memories = {
            c.ARG_SRC: (plan.source, buffers.inputs[0]),
            c.ARG_WEIGHTS: (plan.weights, weights),
            c.ARG_DST: (plan.destination, buffers.output),
        }
        if plan.bias is not None:
            memories[c.ARG_BIAS] = (plan.bias, buffers.parameters["bias"])
        return plan.forward.bind(memories, library)

    def _prepare(self, use: str, source: Descriptor, plain: Array, target: Descriptor, room: Array) -> tuple[Work | None, Array]:
        """(what copies the weights, where the kernel reads them): nothing to copy where the formats agree, or others have."""
        if source.equals(target):
            return None, plain
        copied = None if self._first is None else self._first._copied.get(use)
        if copied is not None and copied[0].equals(target):
            return None, copied[1]
        self._copied[use] = target, room
        return Copy(self._engine, f"{self._what} weights", source, target).bind(plain, room), room

    def _leading(self, product: Product | None) -> tuple[Product, Array] | None:
        """One of the plan's products, and where it keeps its weights."""
        return None if product is None else (product, self.buffers.scratch)

    def _bind_weights(self, buffers: Buffers, library: Array, blocked: Array) -> None:
        plan = self._plan
        assert plan.backward_weights is not None
        self._store: Work | None = None
        if plan.winograd_weights is not None:
            x, dy, gradients = buffers.inputs[0], buffers.output_grad, buffers.gradients
            bound = plan.winograd_weights.bind(x, dy, gradients["weight"], gradients.get("bias"), buffers.scratch)
            self._backward_weights: Work = bound
            return
        direct = plan.diff_weights.equals(plan.plain_weights)
        diff_weights = buffers.gradients["weight"] if direct else blocked
        memories = {
            c.ARG_SRC: (plan.source, buffers.inputs[0]),
            c.ARG_DIFF_DST: (plan.destination, buffers.output_grad),
            c.ARG_DIFF_WEIGHTS: (plan.diff_weights, diff_weights),
        }
        if plan.bias is not None:
            memories[c.ARG_DIFF_BIAS] = (plan.bias, buffers.gradients["bias"])
        self._backward_weights = plan.backward_weights.bind(memories, library)
        store = Copy(self._engine, f"{self._what} weight gradient", plan.diff_weights, plan.plain_weights)
        self._store = None if direct else store.bind(blocked, buffers.gradients["weight"])

    def _bind_input(self, buffers: Buffers, library: Array, blocked: Array) -> None:
        plan = self._plan
        weight, dx, first = buffers.parameters["weight"], buffers.input_grads[0], self._first
        if plan.winograd_data is not None:
            adds = buffers.accumulate[0]
            dy = buffers.output_grad
            leader = None if first is None else first._leading(first._plan.winograd_data)
            self._backward_data = plan.winograd_data.bind(dy, weight, None, dx, buffers.scratch, accumulate=adds, leader=leader)
            return
        if buffers.accumulate[0]:
            assert plan.adding is not None
            if self._turns:
                turned = part(buffers.scratch, self._turned_part).view(weight.dtype).reshape(weight.shape)
                self._turn = (turned, weight[:, ::-1, ::-1])
                weight = turned
            self._load_backward, weights = self._prepare(_ADDING, plan.transposed_weights, weight, plan.adding_weights, blocked)
            if self._load_backward is None and weights is not weight:
                self._turn = None  # another operator has turned them
            self._backward_data = plan.adding.bind(
                {
                    c.ARG_SRC: (plan.destination, buffers.output_grad),
                    c.ARG_WEIGHTS: (plan.adding_weights, weights),
                    c.ARG_DST: (plan.source, dx),
                },
                library,
            )
            return
        assert plan.backward_data is not None
        source, target = plan.plain_weights, plan.backward_data_weights
        self._load_backward, weights = self._prepare(BACKWARD_DATA, source, weight, target, blocked)
        self._backward_data = plan.backward_data.bind(
            {
                c.ARG_DIFF_DST: (plan.destination, buffers.output_grad),
                c.ARG_WEIGHTS: (plan.backward_data_weights, weights),
                c.ARG_DIFF_SRC: (plan.source, dx),
            },
            library,
        )

    def forward(self, context: StepContext) -> None:
        if self._load is not None and (self._training or self._stale):
            self._load()
            self._stale = False
        self._forward()
        self._masked = False

    def _mask_gradient(self) -> None:
        """Once per backward, whichever half comes first."""
        if self._mask is not None and not self._masked:
            self._apply_mask()
            self._masked = True

    def backward_parameters(self) -> None:
        self._mask_gradient()
        self._backward_weights()
        if self._store is not None:
            self._store()

    def backward_input(self) -> None:
        if self._backward_data is None:
            return
        self._mask_gradient()
        if self._turn is not None:
            np.copyto(*self._turn)
        if self._load_backward is not None:
            self._load_backward()
        self._backward_data()

    def parameters_changed(self) -> None:
        self._stale = True


class AddingConv2dOperator(Accumulating, Conv2dOperator):
    """A convolution that can add to its input's gradient."""
