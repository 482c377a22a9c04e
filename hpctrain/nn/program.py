"""A model at one batch size, planned once and run many times: operators bound to one arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpctrain.backend.kernels.base import (
    Array,
    Buffers,
    LocalStatistics,
    LossOperator,
    LossSums,
    Operator,
    StatisticsMerger,
    StepContext,
)
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.nn.arena import arrange
from hpctrain.nn.hooks import StepHooks
from hpctrain.nn.lifetimes import first_writers
from hpctrain.nn.order import Action, BoundStep, backward_actions, forward_actions, passes_back
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.plan import ExecutionPlan, PlannedStep
from hpctrain.nn.statistics import FlatStatistics

_NO_HOOKS = StepHooks()
_NO_CONTEXT = StepContext()  # a copy between layouts has no use for one


class Program:
    """Runs forward, loss and backward of one plan. Allocates nothing after construction.

    Several programs share one arena, and only one runs at a time: `x`, logits and gradients are valid until another one starts.

    Attributes:
        x: input buffer (N, H, W, C), to be filled before each forward. logits: (N, classes).
        x_grad: gradient of the input, where it was asked for at set-up.
        activation_bytes: size of the arena that this program uses. memory: the arena, which begins with these.
        plan: what it runs.

    Args:
        plan: operators and who shares memory. parameters: by full name. statistics: of all batch norms.
        arena: gives a uint8 buffer of at least so many bytes. loss: None in a program that only predicts.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        *,
        parameters: Mapping[str, Parameter],
        statistics: FlatStatistics,
        arena: Callable[[int], Array],
        loss: LossOperator,
        mergers: Mapping[str, StatisticsMerger],
    ) -> None:
        self.plan = plan
        self._loss = loss
        binder = _Binder(plan, parameters, statistics, arena, mergers)
        self.memory = binder.memory
        self.activation_bytes = binder.total_bytes
        self.steps = tuple(binder.bind(k, step) for k, step in enumerate(plan.steps))
        self._forward_actions = forward_actions(plan)
        self._actions = backward_actions(plan)
        self.x: Array = binder.activation(0)
        self.logits: Array = binder.activation(plan.output)
        self.d_logits: Array | None = binder.gradient(plan.output) if plan.training else None
        self.x_grad: Array | None = binder.gradient(0) if plan.needs_grad[0] else None

    @property
    def batch(self) -> int:
        """N of this program."""
        return int(self.x.shape[0])

    def forward(self, context: StepContext, hooks: StepHooks = _NO_HOOKS) -> Array:
        """Logits (N, classes) of `x`. Collective where batch norm is synchronised."""
        for action, k in self._forward_actions:
            self._act_forward(action, k, context, hooks)
        return self.logits

    def loss(self, labels: Array, global_count: int) -> LossSums:
        """Sums over this batch; leaves the logits' gradient, divided by the step's global count, for `backward`.

        Args:
            labels: int64 (N,). global_count: samples of the step over all ranks and micro-batches.
        """
        return self._loss.run(self.logits, labels, global_count, self.d_logits)

    def backward(self, hooks: StepHooks = _NO_HOOKS) -> None:
        """Gradients of all parameters, last layer first, each announced as soon as it is final."""
        for action, k in self._actions:
            self._act_backward(action, k, hooks)

    def _act_forward(self, action: Action, k: int, context: StepContext, hooks: StepHooks) -> None:
        step = self.steps[k]
        if action is Action.BEGIN:
            step.operator.begin_forward()
            return
        if step.parameters:
            hooks.before_forward(step.parameters)
        if step.factors is not None and hooks.takes_sufficient_factors(step.parameters):
            hooks.input_ready(step.parameters, step.factors[0])
        step.operator.forward(context)
        hooks.operator_done(step.name, "forward")

    def _act_backward(self, action: Action, k: int, hooks: StepHooks) -> None:
        step = self.steps[k]
        if action is Action.PARAMETERS:
            self._parameter_gradients(step, hooks)
        elif action is Action.INPUT:
            self._input_gradient(step, hooks)
        elif action is Action.FREE:
            for parameter in step.parameters:
                hooks.data_free(parameter)
        elif action is Action.BEGIN:
            step.operator.begin_backward()
        elif action is Action.RECOMPUTE:
            step.operator.recompute_output()
        else:
            step.operator.forward(_NO_CONTEXT)

    def _parameter_gradients(self, step: BoundStep, hooks: StepHooks) -> None:
        if step.factors is not None and hooks.takes_sufficient_factors(step.parameters):
            step.operator.finish_output_grad()
            hooks.error_ready(step.parameters, step.factors[1])
            return
        step.operator.backward_parameters()
        for target, partial in step.gradient_sums:
            np.add(target, partial, out=target)
        hooks.operator_done(step.name, "parameters")
        if step.shared:
            return
        for parameter in reversed(step.parameters):
            hooks.grad_ready(parameter)

    def _input_gradient(self, step: BoundStep, hooks: StepHooks) -> None:
        step.operator.backward_input()
        for target, partial in step.add_partials:
            np.add(target, partial, out=target)
        hooks.operator_done(step.name, "input")

    def parameters_changed(self) -> None:
        """Parameters were written outside of a training step (a checkpoint, an averager): cached copies are stale."""
        for step in self.steps:
            step.operator.parameters_changed()


class _ViewCopy(Operator):
    """Stands in for a view whose gradient cannot share memory: its input has several readers."""

    def __init__(self, inner: Operator) -> None:
        self.spec, self.inputs, self.output = inner.spec, inner.inputs, inner.output
        self._inner = inner

    def forward(self, context: StepContext) -> None:
        self._inner.forward(context)

    def backward_input(self) -> None:
        target = self.buffers.input_grads[0]
        assert target is not None
        np.copyto(target, self.buffers.output_grad.reshape(target.shape))  # type: ignore[union-attr]


class _Binder:
    """Places a plan's buffers in the arena and binds its operators, in forward order."""

    def __init__(
        self,
        plan: ExecutionPlan,
        parameters: Mapping[str, Parameter],
        statistics: FlatStatistics,
        arena: Callable[[int], Array],
        mergers: Mapping[str, StatisticsMerger],
    ) -> None:
        self._plan, self._parameters, self._statistics, self._mergers = plan, parameters, statistics, mergers
        self._shared = self._shares()
        self._partial_gradients: dict[str, Array] = {}
        self._arena = arrange(plan)
        self._first_writer = first_writers(plan)
        self.total_bytes = self._arena.total_bytes
        self.memory = arena(self.total_bytes)

    def activation(self, tensor: int) -> Array:
        """The buffer of a tensor, in its shape (flat in a layout that is not plain)."""
        return self._view(self._arena.offsets["activation", self._plan.storage[tensor]], self._plan.tensors[tensor])

    def gradient(self, tensor: int) -> Array:
        """The buffer of a tensor's gradient."""
        return self._view(self._arena.offsets["gradient", self._plan.grad_storage[tensor]], self._plan.tensors[tensor])

    def bind(self, k: int, step: PlannedStep) -> BoundStep:
        operator = step.operator
        plan = self._plan
        shared = plan.grad_storage[step.inputs[0]] == plan.grad_storage[step.output]
        if operator.view and not shared and plan.needs_grad[step.inputs[0]]:
            operator = _ViewCopy(operator)
        grads: list[Array | None] = []
        accumulate: list[bool] = []
        partials: list[tuple[Array, Array]] = []
        partial_at = self._arena.offsets.get(("partial", k), 0)
        for i, tensor in enumerate(step.inputs):
            if not plan.needs_grad[tensor]:
                grads.append(None)
                accumulate.append(False)
                continue
            target = self.gradient(tensor)
            adds = self._first_writer[tensor] != (k, i)
            accumulate.append(adds and operator.can_accumulate)
            if adds and not operator.can_accumulate:
                partial = self._view(partial_at, plan.tensors[tensor])
                partial_at += plan.tensors[tensor].bytes
                partials.append((target, partial))
                target = partial
            grads.append(target)
        parameters = self._bind_buffers(k, step, operator, tuple(grads), tuple(accumulate))
        return BoundStep(
            step.name,
            operator,
            parameters,
            passes_back(plan, k),
            tuple(partials),
            self._factors(step),
            self._gradient_sums(k),
            step.node is not None and step.node.shared,
        )

    def _bind_buffers(
        self, k: int, step: PlannedStep, operator: Operator, grads: tuple[Array | None, ...], accumulate: tuple[bool, ...]
    ) -> tuple[Parameter, ...]:
        node = step.node
        roles = dict(node.parameters) if node is not None else {}
        own = {role: self._parameters[name] for role, name in roles.items()}
        statistics = self._statistics.by_role(node.statistics) if node is not None else {}
        plan = self._plan
        operator.bind(
            Buffers(
                inputs=tuple(self.activation(i) for i in step.inputs),
                output=self.activation(step.output),
                input_grads=grads,
                output_grad=self.gradient(step.output) if plan.needs_grad[step.output] else None,
                accumulate=accumulate,
                parameters={role: parameter.data for role, parameter in own.items()},
                gradients={role: self._gradient(k, parameter) for role, parameter in own.items()} if plan.training else {},
                statistics=statistics,
                saved=self._own("saved", k, operator.saved_bytes),
                scratch=self._own("scratch", k, operator.scratch_bytes),
                merger=self._merger(step),
            )
        )
        return tuple(own.values())

    def _shares(self) -> dict[str, list[int]]:
        """Steps by parameter, of those that several steps have."""
        users: dict[str, list[int]] = {}
        for k, step in enumerate(self._plan.steps):
            for name in step.node.parameters.values() if step.node is not None else ():
                users.setdefault(name, []).append(k)
        return {name: steps for name, steps in users.items() if len(steps) > 1}

    def _gradient(self, k: int, parameter: Parameter) -> Array:
        """Where step k writes a parameter's gradient: the last of several in forward's order is the first in backward's."""
        if k == self._shared.get(parameter.name, [k])[-1]:
            return parameter.grad
        if parameter.name not in self._partial_gradients:
            self._partial_gradients[parameter.name] = np.empty_like(parameter.grad)
        return self._partial_gradients[parameter.name]

    def _gradient_sums(self, k: int) -> tuple[tuple[Array, Array], ...]:
        names = [name for name, steps in self._shared.items() if k in steps[:-1]] if self._plan.training else []
        return tuple((self._parameters[name].grad, self._partial_gradients[name]) for name in names)

    def _merger(self, step: PlannedStep) -> StatisticsMerger:
        group = getattr(step.operator.spec, "merge", None) if step.node is not None else None
        return LocalStatistics() if group is None else self._mergers[group]

    def _factors(self, step: PlannedStep) -> tuple[Array, Array] | None:
        if not step.operator.gives_sufficient_factors or not self._plan.training:
            return None
        return self.activation(step.inputs[0]), self.gradient(step.output)

    def _own(self, kind: str, k: int, size: int) -> Array | None:
        """What step k has to itself."""
        return self._bytes(self._arena.offsets[kind, k], size) if size else None

    def _bytes(self, offset: int, size: int) -> Array:
        return self.memory[offset : offset + size]

    def _view(self, offset: int, spec: TensorSpec) -> Any:
        flat = self._bytes(offset, spec.bytes).view(spec.dtype)
        return flat.reshape(spec.shape) if spec.layout == "NHWC" else flat


def macs(plan: ExecutionPlan) -> int:
    """Multiply-adds of one forward pass, for reports."""
    return sum(
        step.node.spec.flops(*(plan.tensors[i].plain() for i in step.inputs)) // 2 for step in plan.steps if step.node is not None
    )


def parameter_bytes(parameters: Mapping[str, Parameter]) -> int:
    """Bytes of all parameters' data."""
    return sum(math.prod(p.spec.shape) * p.data.itemsize for p in parameters.values())
