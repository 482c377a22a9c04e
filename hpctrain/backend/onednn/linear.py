"""Fully connected layer on the flat weights (in, out), without a copy of them."""

from __future__ import annotations

from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Call, Descriptor, Engine, Primitive
from hpctrain.backend.onednn.elementwise import GradientMask
from hpctrain.backend.onednn.operator import BACKWARD_DATA, BACKWARD_WEIGHTS, FORWARD, LibraryOperator, Regions, part, vector
from hpctrain.backend.operators import Array, Buffers, StepContext, SufficientFactors
from hpctrain.backend.specs import LinearSpec, TensorSpec, WithRelu

#: minimum number of weights for which the input's gradient is a matrix product (matmul) instead of oneDNN's inner product. With
#: AVX-512, matmul takes 0.3 to 0.9 of the time for 4096 x 4096 weights and 4 to 128 rows, up to twice the time for 2048 x 1000
#: weights and 4 rows; with AVX2 both are one kernel (measured).
_PRODUCT_WEIGHTS = 1 << 22


class LinearOperator(SufficientFactors, LibraryOperator):
    """Linear layer: y = x @ weight + bias, then ReLU if the spec is a `WithRelu`."""

    needs_inputs = (True,)

    def __init__(self, engine: Engine, spec: LinearSpec | WithRelu, x: TensorSpec, *, training: bool) -> None:
        relu = isinstance(spec, WithRelu)
        inner = spec.inner if isinstance(spec, WithRelu) else spec
        assert isinstance(inner, LinearSpec)
        self.spec, self._linear, self._training = spec, inner, training
        self.inputs, self.output = (x.plain(),), inner.output(x)
        self.needs_output = relu
        label = f"linear {inner.features_in}->{inner.features_out} on {x.shape}"
        self._x, self._y = Descriptor.tagged(engine, x.shape, "ab"), Descriptor.tagged(engine, self.output.shape, "ab")
        self._weights = Descriptor.tagged(engine, (inner.features_out, inner.features_in), "ba")
        self._bias = vector(engine, inner.features_out) if inner.bias else None
        self.primitives = self._make_primitives(engine, label, relu)
        self._mask = GradientMask(engine, label, self.output) if relu and training else None
        scratch = Regions()
        self._library_part = scratch.add(max(primitive.scratchpad_bytes for primitive in self.primitives.values()))
        self.scratch_bytes = scratch.total_bytes

    def _make_primitives(self, engine: Engine, label: str, relu: bool) -> dict[str, Primitive]:
        x, weights, bias, y, defaults = self._x, self._weights, self._bias, self._y, Attributes(engine)
        kind = c.FORWARD_TRAINING if self._training else c.FORWARD_INFERENCE
        forward = "inner_product_forward"
        attributes = Attributes(engine, relu=relu)
        self._forward_primitive = Primitive(engine, forward, f"{label} forward", kind, x, weights, bias, y, attributes)
        if not self._training:
            return {FORWARD: self._forward_primitive}
        hint = Primitive(engine, forward, label, c.FORWARD_TRAINING, x, weights, bias, y, defaults)
        self._data_product = self._linear.features_in * self._linear.features_out >= _PRODUCT_WEIGHTS
        if self._data_product:
            self._data_primitive = Primitive(engine, "matmul", f"{label} backward data", y, weights, None, x, defaults)
        else:
            self._data_primitive = Primitive(
                engine, "inner_product_backward_data", f"{label} backward data", x, weights, y, hint, defaults
            )
        self._weights_primitive = Primitive(
            engine, "inner_product_backward_weights", f"{label} backward weights", x, weights, bias, y, hint, defaults
        )
        return {FORWARD: self._forward_primitive, BACKWARD_DATA: self._data_primitive, BACKWARD_WEIGHTS: self._weights_primitive}

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        library = part(buffers.scratch, self._library_part)
        x, weight = (self._x, buffers.inputs[0]), (self._weights, buffers.parameters["weight"])
        memories = {c.ARG_SRC: x, c.ARG_WEIGHTS: weight, c.ARG_DST: (self._y, buffers.output)}
        if self._bias is not None:
            memories[c.ARG_BIAS] = (self._bias, buffers.parameters["bias"])
        self._forward = self._forward_primitive.bind(memories, library)
        self._backward_data: Call | None = None
        if buffers.output_grad is not None and self._training:
            self._bind_backward(buffers, library)

    def _bind_backward(self, buffers: Buffers, library: Array) -> None:
        dy = (self._y, buffers.output_grad)
        if self._mask is not None:
            self._mask.bind(buffers)
        if buffers.gradients:
            memories = {c.ARG_SRC: (self._x, buffers.inputs[0]), c.ARG_DIFF_DST: dy}
            memories[c.ARG_DIFF_WEIGHTS] = (self._weights, buffers.gradients["weight"])
            if self._bias is not None:
                memories[c.ARG_DIFF_BIAS] = (self._bias, buffers.gradients["bias"])
            self._backward_weights = self._weights_primitive.bind(memories, library)
        if buffers.input_grads[0] is not None:
            source, target = (c.ARG_SRC, c.ARG_DST) if self._data_product else (c.ARG_DIFF_DST, c.ARG_DIFF_SRC)
            memories = {source: dy, c.ARG_WEIGHTS: (self._weights, buffers.parameters["weight"])}
            memories[target] = (self._x, buffers.input_grads[0])
            self._backward_data = self._data_primitive.bind(memories, library)

    def forward(self, context: StepContext) -> None:
        self._forward()
        if self._mask is not None:
            self._mask.begin_forward()

    def finish_output_grad(self) -> None:
        if self._mask is not None:
            self._mask.apply()

    def backward_parameters(self) -> None:
        self.finish_output_grad()
        self._backward_weights()

    def backward_input(self) -> None:
        if self._backward_data is None:
            return
        self.finish_output_grad()
        self._backward_data()
