"""The work of an operator's phase: floating-point operations, and bytes of memory read and written once each."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.specs import BatchNormSpec, Conv2dSpec, LinearSpec, Spec
from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.planner.machine import OperatorClass
from hpctrain.planner.move_traffic import is_move, move_traffic

_FORWARD = (Action.FORWARD, Action.RECOMPUTE, Action.COPY)
_PHASES = (*_FORWARD, Action.PARAMETERS, Action.INPUT)


@dataclass(frozen=True)
class OperatorWork:
    """The work of one call. flops: a multiply-add counts two."""

    kind: OperatorClass
    flops: int
    bytes: int

    @property
    def is_nothing(self) -> bool:
        """The call does nothing that takes time."""
        return not self.flops and not self.bytes


def class_of(spec: Spec | None) -> OperatorClass:
    """The class of an operation; a copy between layouts (None) is bound by memory."""
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    if isinstance(inner, Conv2dSpec):
        return OperatorClass.CONVOLUTION
    return OperatorClass.PRODUCT if isinstance(inner, LinearSpec) else OperatorClass.MEMORY


def work_of(step: PlannedStep, action: Action, memory: StepMemory | None = None) -> OperatorWork:
    """The work of a step's phase. memory: see `ComputeCosts.seconds`.

    The gradients of parameters and of each input of a product take about the operations of its forward pass.
    """
    operator = step.operator
    spec = operator.spec if step.node is not None else None
    kind = class_of(spec)
    if action not in _PHASES:
        return OperatorWork(kind, 0, 0)
    if is_move(operator):
        return OperatorWork(kind, 0, move_traffic(operator, action, accumulate=memory is not None and memory.accumulate[0]).total)
    if step.is_view:
        copied = action is Action.INPUT and memory is not None and memory.copies_gradient
        return OperatorWork(kind, 0, 2 * operator.output.bytes if copied else 0)
    flops = 0 if spec is None else spec.flops(*(x.plain() for x in operator.inputs))
    if action in _FORWARD:
        return OperatorWork(kind, flops, _forward_bytes(step, spec))
    if action is Action.PARAMETERS:
        return OperatorWork(kind, flops, _parameters_bytes(step, spec, memory))
    if step.joint_backward and step.has_parameters:
        return OperatorWork(kind, 0, 0)  # done with the gradients of the parameters
    asked = sum(_asked(step, memory))
    return OperatorWork(kind, flops if asked else 0, _input_bytes(step, spec, memory) if asked else 0)


def _forward_bytes(step: PlannedStep, spec: Spec | None) -> int:
    operator = step.operator
    n_bytes = sum(x.bytes for x in operator.inputs) + operator.output.bytes + _parameter_bytes(step, spec)
    if isinstance(spec, BatchNormSpec):  # once for the moments, once to normalise, and the sum is added in place
        n_bytes += operator.inputs[0].bytes + (2 * operator.output.bytes if spec.add else 0)
    return n_bytes


def _parameters_bytes(step: PlannedStep, spec: Spec | None, memory: StepMemory | None) -> int:
    operator = step.operator
    read = operator.inputs[0].bytes + operator.output.bytes
    if step.joint_backward:  # both sums first, then the input's gradient
        read += _input_bytes(step, spec, memory)
    return read + _parameter_bytes(step, spec)


def _input_bytes(step: PlannedStep, spec: Spec | None, memory: StepMemory | None) -> int:
    """The output's gradient and what backward needs are read, gradients written, or read and written where they are added to."""
    operator = step.operator
    n_bytes = operator.output.bytes + _parameter_bytes(step, spec)
    if class_of(spec) is OperatorClass.MEMORY:
        n_bytes += sum(x.bytes for x, needed in zip(operator.inputs, operator.needs_inputs, strict=False) if needed)
        n_bytes += operator.output.bytes if operator.needs_output else 0
    for i, (x, asked) in enumerate(zip(operator.inputs, _asked(step, memory), strict=True)):
        added = memory is not None and memory.accumulate[i]
        apart = memory is not None and any(number == i for number, _, _ in memory.sums)
        n_bytes += x.bytes * asked * (1 + added + 3 * apart)
    return n_bytes


def _asked(step: PlannedStep, memory: StepMemory | None) -> tuple[bool, ...]:
    """By input: somebody asks for its gradient."""
    if memory is None:
        return (True,) * len(step.inputs)
    return tuple(region is not None for region in memory.input_grads)


def _parameter_bytes(step: PlannedStep, spec: Spec | None) -> int:
    """Bytes of the parameters (float32 at least), from the spec: steps know their names alone."""
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    size = 0
    if isinstance(inner, Conv2dSpec | LinearSpec):
        size = 1
        for extent in inner.weight_shape:
            size *= extent
    elif isinstance(inner, BatchNormSpec):
        size = 2 * inner.channels
    return size * max(item_bytes("float32"), step.operator.inputs[0].item_bytes)
