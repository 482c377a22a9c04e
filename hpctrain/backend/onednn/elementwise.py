"""ReLU: alone, after the residual sum, and after a convolution or linear layer of another kernel set."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.backend.numpy.elementwise import RectifiedOperator
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Call, Descriptor, Engine, Primitive
from hpctrain.backend.onednn.operator import BACKWARD, FORWARD, Copy, LibraryOperator, elements
from hpctrain.backend.operators import Accumulating, Array, Buffers, InPlace, Operator, StepContext, SufficientFactors
from hpctrain.backend.specs import AddSpec, ReluSpec, TensorSpec, WithRelu


class ReluMask:
    """Gradient of a ReLU with output y: dx = dy where y > 0, otherwise 0. It works in place if dx and dy are one buffer.

    Args:
        values: format of y, dy and dx.
    """

    def __init__(self, engine: Engine, label: str, values: Descriptor) -> None:
        attributes = Attributes(engine)
        arguments = (values, values, 0.0, 0.0)
        hint = Primitive(engine, "eltwise_forward", label, c.FORWARD_TRAINING, c.ELTWISE_RELU_USE_DST, *arguments, attributes)
        self._values = values
        self.primitive = Primitive(
            engine, "eltwise_backward", label, c.ELTWISE_RELU_USE_DST, values, values, values, 0.0, 0.0, hint, attributes
        )
        assert self.primitive.scratchpad_bytes == 0, label

    def bind(self, y: Array, dy: Array, dx: Array) -> Call:
        values = self._values
        return self.primitive.bind({c.ARG_DST: (values, y), c.ARG_DIFF_DST: (values, dy), c.ARG_DIFF_SRC: (values, dx)})


class GradientMask:
    """Backward pass of a ReLU after an operator, which masks the output's gradient in place, once per backward.

    Both halves of backward read the masked gradient, and either may come first, so each calls `apply`.
    """

    def __init__(self, engine: Engine, label: str, y: TensorSpec) -> None:
        self._mask = ReluMask(engine, f"{label} backward", elements(engine, y))
        self._call: Call | None = None
        self._applied = False

    def bind(self, buffers: Buffers) -> None:
        """Prepare the call, if the operator's output has a gradient."""
        if buffers.output_grad is not None:
            self._call = self._mask.bind(buffers.output, buffers.output_grad, buffers.output_grad)

    def begin_forward(self) -> None:
        """Reset the mask, so that the next backward applies it again."""
        self._applied = False

    def apply(self) -> None:
        """Mask the gradient, unless the other half of this backward has already done so."""
        if not self._applied:
            assert self._call is not None
            self._call()
            self._applied = True


class Addition:
    """Sum of tensors: y = a + b, then ReLU if `relu` is set; y may share the memory of a or b."""

    def __init__(self, engine: Engine, label: str, values: Descriptor, *, relu: bool = False) -> None:
        self._values = values
        attributes = Attributes(engine, relu=relu)
        self.primitive = Primitive(engine, "binary", label, c.BINARY_ADD, values, values, values, attributes)
        assert self.primitive.scratchpad_bytes == 0, label

    def bind(self, a: Array, b: Array, y: Array) -> Call:
        values = self._values
        return self.primitive.bind({c.ARG_SRC: (values, a), c.ARG_SRC_1: (values, b), c.ARG_DST: (values, y)})


class ReluOperator(InPlace, LibraryOperator):
    """Rectified linear unit: y = max(x, 0), in x's layout."""

    needs_output = True

    def __init__(self, engine: Engine, spec: ReluSpec, x: TensorSpec) -> None:
        self.spec, self.inputs, self.output = spec, (x,), x
        label = f"relu {x.shape}"
        self._values = elements(engine, x)
        self._primitive = Primitive(
            engine,
            "eltwise_forward",
            label,
            c.FORWARD_TRAINING,
            c.ELTWISE_RELU,
            self._values,
            self._values,
            0.0,
            0.0,
            Attributes(engine),
        )
        self._mask = ReluMask(engine, f"{label} backward", self._values)
        self.primitives = {FORWARD: self._primitive, BACKWARD: self._mask.primitive}

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        memories = {c.ARG_SRC: (self._values, buffers.inputs[0]), c.ARG_DST: (self._values, buffers.output)}
        self._forward = self._primitive.bind(memories)
        self._backward: Call | None = None
        if buffers.input_grads and buffers.input_grads[0] is not None:
            self._backward = self._mask.bind(buffers.output, buffers.output_grad, buffers.input_grads[0])

    def forward(self, context: StepContext) -> None:
        self._forward()

    def backward_input(self) -> None:
        if self._backward is not None:
            self._backward()


class AddOperator(InPlace, Accumulating, LibraryOperator):
    """Residual sum: y = a + b (then ReLU), all in one layout."""

    needs_inputs = (False, False)

    def __init__(self, engine: Engine, spec: AddSpec, a: TensorSpec) -> None:
        self.spec, self.inputs, self.output = spec, (a, a), a
        self.needs_output = spec.relu
        label = f"add {a.shape}"
        values = elements(engine, a)
        self._forward_sum = Addition(engine, label, values, relu=spec.relu)
        self._mask = ReluMask(engine, f"{label} backward", values) if spec.relu else None
        self._copy = Copy(engine, f"{label} backward", values, values)
        self._plain_sum = Addition(engine, f"{label} backward", values)
        self.primitives = {FORWARD: self._forward_sum.primitive, BACKWARD: None if self._mask is None else self._mask.primitive}

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._forward = self._forward_sum.bind(buffers.inputs[0], buffers.inputs[1], buffers.output)
        self._backward: Sequence[Call] = self._backward_calls() if any(g is not None for g in buffers.input_grads) else ()

    def _backward_calls(self) -> list[Call]:
        """Return the calls of backward.

        The masked gradient is written to the first input gradient that is not added to, or in place if there is none. From there
        it is copied or added to the other one.
        """
        buffers = self.buffers
        calls: list[Call] = []
        gradient: Array = buffers.output_grad
        written = [g for g, adds in zip(buffers.input_grads, buffers.accumulate, strict=True) if g is not None and not adds]
        if self._mask is not None:
            masked = written[0] if written else gradient
            calls.append(self._mask.bind(buffers.output, gradient, masked))
            gradient = masked
        for target, adds in zip(buffers.input_grads, buffers.accumulate, strict=True):
            if target is None:
                continue
            if adds:
                calls.append(self._plain_sum.bind(target, gradient, target))
            elif target.ctypes.data != gradient.ctypes.data:
                calls.append(self._copy.bind(gradient, target))
        return calls

    def forward(self, context: StepContext) -> None:
        self._forward()

    def backward_input(self) -> None:
        for call in self._backward:
            call()


class OnednnRectifiedOperator(RectifiedOperator):
    """A `RectifiedOperator` whose gradient oneDNN masks in place, without memory for the mask."""

    def __init__(self, engine: Engine, spec: WithRelu, inner: Operator) -> None:
        super().__init__(spec, inner)
        self.scratch_bytes = inner.scratch_bytes
        self._mask = GradientMask(engine, f"relu {self.output.shape}", self.output)

    def _bind_mask(self, buffers: Buffers) -> None:
        self._mask.bind(buffers)

    def forward(self, context: StepContext) -> None:
        super().forward(context)
        self._mask.begin_forward()

    def finish_output_grad(self) -> None:
        self._mask.apply()


class OnednnRectifiedLinear(OnednnRectifiedOperator, SufficientFactors):
    """A rectified linear layer, whose sufficient factors are its input and the masked gradient."""
