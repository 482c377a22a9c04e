"""Max and average pooling over windows of one size."""

from __future__ import annotations

from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Call, Engine, Primitive
from hpctrain.backend.onednn.operator import (
    BACKWARD,
    FORWARD,
    LibraryOperator,
    Regions,
    images,
    in_layout,
    part,
    pooling_geometry,
)
from hpctrain.backend.operators import Buffers, StepContext
from hpctrain.backend.specs import AdaptiveAveragePoolSpec, PoolSpec, TensorSpec, Window


def plain_pool(spec: PoolSpec | AdaptiveAveragePoolSpec, x: TensorSpec) -> PoolSpec | None:
    """Return an equivalent pooling that oneDNN supports, with windows of one size; None if there is none."""
    if isinstance(spec, AdaptiveAveragePoolSpec):
        _, h, w, _ = x.shape
        if h % spec.size[0] or w % spec.size[1]:
            return None
        kernel = (h // spec.size[0], w // spec.size[1])
        return PoolSpec("average", Window(kernel, kernel, (0, 0, 0, 0)))
    _, ho, wo, _ = spec.output(x).shape
    _, extra = pooling_geometry(spec.window, (x.shape[1], x.shape[2]), (ho, wo))
    padded = any(spec.window.padding) and spec.count_include_pad
    # If ceil mode makes a window extend beyond the padding, only the elements inside the image count.
    if spec.kind == "average" and any(extra):
        return None if padded else PoolSpec(spec.kind, spec.window, spec.ceil_mode, count_include_pad=False)
    return spec


class PoolOperator(LibraryOperator):
    """Max or average pooling, in x's layout. Max pooling saves the position of each maximum for backward."""

    def __init__(self, engine: Engine, given: PoolSpec | AdaptiveAveragePoolSpec, x: TensorSpec, *, training: bool) -> None:
        spec = plain_pool(given, x)
        assert spec is not None
        self.spec, self.inputs = given, (x,)
        plain = spec.output(x)
        self.output = in_layout(plain, x.layout)
        label = f"{spec.kind} pool of {x.shape}"
        self._x, self._y = images(engine, x), images(engine, plain, x.layout)
        geometry, _ = pooling_geometry(spec.window, x.shape[1:3], plain.shape[1:3])
        average = c.POOLING_AVERAGE_INCLUDE_PADDING if spec.count_include_pad else c.POOLING_AVERAGE_EXCLUDE_PADDING
        algorithm = c.POOLING_MAX if spec.kind == "max" else average
        kind = c.FORWARD_TRAINING if training else c.FORWARD_INFERENCE
        defaults = Attributes(engine)
        self._forward_primitive = Primitive(
            engine, "pooling_forward", f"{label} forward", kind, algorithm, self._x, self._y, *geometry, defaults
        )
        self._workspace = self._forward_primitive.descriptor(c.QUERY_WORKSPACE_MD)
        self._workspace_bytes = self._workspace.size_bytes if training else 0
        primitives = {FORWARD: self._forward_primitive}
        if training:
            hint = self._forward_primitive
            self._backward_primitive = Primitive(
                engine, "pooling_backward", f"{label} backward", algorithm, self._x, self._y, *geometry, hint, defaults
            )
            primitives[BACKWARD] = self._backward_primitive
        self.primitives = primitives
        self.saved_bytes = self._workspace_bytes
        scratch = Regions()
        self._library_part = scratch.add(max(primitive.scratchpad_bytes for primitive in primitives.values()))
        self.scratch_bytes = scratch.total_bytes

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        library = part(buffers.scratch, self._library_part)
        workspace = {c.ARG_WORKSPACE: (self._workspace, buffers.saved)} if self._workspace_bytes else {}
        memories = {c.ARG_SRC: (self._x, buffers.inputs[0]), c.ARG_DST: (self._y, buffers.output)}
        self._forward = self._forward_primitive.bind(memories | workspace, library)
        self._backward: Call | None = None
        if buffers.input_grads and buffers.input_grads[0] is not None:
            gradients = {c.ARG_DIFF_DST: (self._y, buffers.output_grad), c.ARG_DIFF_SRC: (self._x, buffers.input_grads[0])}
            self._backward = self._backward_primitive.bind(gradients | workspace, library)

    def forward(self, context: StepContext) -> None:
        self._forward()

    def backward_input(self) -> None:
        if self._backward is not None:
            self._backward()
