"""The operators of a plan at their places in memory: each with its arrays, its parameters and where their gradients go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.kernels.abilities import FollowsOperator, SufficientFactors
from hpctrain.backend.operators import Array, Buffers, LocalStatistics, Operator, StatisticsMerger, StepContext
from hpctrain.backend.specs import TensorSpec
from hpctrain.nn.compile.plan import Action, ExecutionPlan, PlannedStep, Region, StepMemory
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.statistics import ProgramStatistics


@dataclass(frozen=True)
class BoundStep:
    """A planned step with its parameters and what is left to do by the program itself.

    add_partials: (target, partial) pairs to add after `backward_input`, where the operator cannot accumulate.
    gradient_sums: (target, partial) pairs to add after `backward_parameters`, where the parameters are also those of other steps.
    shared: an earlier step has the same parameters: it announces their gradients.
    sufficient_factors: (x, dy) of a linear layer that is trained: its weight's gradient is x^T dy, and may be made elsewhere.
    """

    name: str
    operator: Operator
    parameters: tuple[Parameter, ...]
    passes_back: bool
    add_partials: tuple[tuple[Array, Array], ...]
    sufficient_factors: tuple[Array, Array] | None
    gradient_sums: tuple[tuple[Array, Array], ...] = ()
    shared: bool = False


class _ViewCopy(Operator):
    """Stands in for a view whose gradient cannot share memory: its input has several readers."""

    def __init__(self, inner: Operator, arithmetic: Arithmetic) -> None:
        self.spec, self.inputs, self.output = inner.spec, inner.inputs, inner.output
        self._inner, self._arithmetic = inner, arithmetic

    def forward(self, context: StepContext) -> None:
        self._inner.forward(context)

    def backward_input(self) -> None:
        target = self.buffers.input_grads[0]
        assert target is not None
        self._arithmetic.copy(target, self.buffers.output_grad)


class Binder:
    """Makes arrays of a plan's places in the arena and binds its operators to them, in forward order."""

    def __init__(
        self,
        plan: ExecutionPlan,
        arithmetic: Arithmetic,
        parameters: Mapping[str, Parameter],
        statistics: ProgramStatistics,
        memory: Array,
        mergers: Mapping[str, StatisticsMerger],
        leading: Sequence[BoundStep],
        home: Callable[[Parameter], Array],
    ) -> None:
        self._arithmetic, self._leading, self._home = arithmetic, leading, home
        self._plan, self._parameters, self._statistics, self._mergers = plan, parameters, statistics, mergers
        self._memory = memory
        self._shared = self._shares()
        self._partial_gradients: dict[str, Array] = {}

    def view(self, region: Region, spec: TensorSpec) -> Any:
        """The array of a tensor, in its shape (flat in a layout that is not plain)."""
        flat = self._memory[region.offset : region.end].view(spec.dtype)
        return flat.reshape(spec.shape) if spec.layout == "NHWC" else flat

    def bind(self, k: int, step: PlannedStep) -> BoundStep:
        memory, specs = self._plan.memory[k], [self._plan.tensors[tensor] for tensor in step.inputs]
        operator = _ViewCopy(step.operator, self._arithmetic) if memory.copies_gradient else step.operator
        parameters = self._bind_buffers(k, operator)
        return BoundStep(
            step.name,
            operator,
            () if step.node is not None and step.node.frozen else parameters,
            any(action is Action.INPUT and position == k for action, position in self._plan.backward),
            tuple((self.view(target, specs[i]), self.view(partial, specs[i])) for i, target, partial in memory.sums),
            self._sufficient_factors(step, memory),
            self._gradient_sums(k),
            step.node is not None and step.node.shared,
        )

    def _bind_buffers(self, k: int, operator: Operator) -> tuple[Parameter, ...]:
        step, memory, tensors = self._plan.steps[k], self._plan.memory[k], self._plan.tensors
        node = step.node
        own = {role: self._parameters[name] for role, name in node.parameters.items()} if node is not None else {}
        targets = zip(memory.input_grads, step.inputs, strict=True)
        if self._leading and isinstance(operator, FollowsOperator):
            operator.follow(self._leading[k].operator)
        operator.bind(
            Buffers(
                inputs=tuple(self.view(region, tensors[i]) for region, i in zip(memory.inputs, step.inputs, strict=True)),
                output=self.view(memory.output, tensors[step.output]),
                input_grads=tuple(None if region is None else self.view(region, tensors[i]) for region, i in targets),
                output_grad=None if memory.output_grad is None else self.view(memory.output_grad, tensors[step.output]),
                accumulate=memory.accumulate,
                parameters={role: parameter.data for role, parameter in own.items()},
                gradients=self._gradients(k, own),
                shadows={role: parameter.shadow for role, parameter in own.items() if parameter.shadow is not None},
                statistics=self._statistics.by_role(node.statistics) if node is not None else {},
                saved=self._bytes(memory.saved),
                scratch=self._bytes(memory.scratch),
                merger=self._merger(step),
            )
        )
        return tuple(own.values())

    def _gradients(self, k: int, own: Mapping[str, Parameter]) -> dict[str, Array]:
        """Where step k writes its parameters' gradients. Operators of frozen layers may bind them, but nobody asks for them."""
        node = self._plan.steps[k].node
        if not self._plan.training or node is None:
            return {}
        if not node.frozen:
            return {role: self._gradient(k, parameter) for role, parameter in own.items()}
        passes = any(self._plan.needs_grad[tensor] for tensor in self._plan.steps[k].inputs)
        return {role: self._zeros_like(parameter) for role, parameter in own.items()} if passes else {}

    def _shares(self) -> dict[str, list[int]]:
        """Steps by trained parameter, of those that several steps have."""
        users: dict[str, list[int]] = {}
        for k, step in enumerate(self._plan.steps):
            for name in step.node.parameters.values() if step.node is not None and step.node.trains else ():
                users.setdefault(name, []).append(k)
        return {name: steps for name, steps in users.items() if len(steps) > 1}

    def _gradient(self, k: int, parameter: Parameter) -> Array:
        """Where step k writes a parameter's gradient: the last of several in forward's order is the first in backward's."""
        if k == self._shared.get(parameter.name, [k])[-1]:
            return self._home(parameter)
        if parameter.name not in self._partial_gradients:
            self._partial_gradients[parameter.name] = self._zeros_like(parameter)
        return self._partial_gradients[parameter.name]

    def _zeros_like(self, parameter: Parameter) -> Array:
        return self._arithmetic.zeros(parameter.size, str(parameter.data.dtype)).reshape(parameter.spec.shape)

    def _gradient_sums(self, k: int) -> tuple[tuple[Array, Array], ...]:
        names = [name for name, steps in self._shared.items() if k in steps[:-1]] if self._plan.training else []
        return tuple((self._home(self._parameters[name]), self._partial_gradients[name]) for name in names)

    def _merger(self, step: PlannedStep) -> StatisticsMerger:
        group = getattr(step.operator.spec, "merge", None) if step.node is not None else None
        return LocalStatistics() if group is None else self._mergers[group]

    def _sufficient_factors(self, step: PlannedStep, memory: StepMemory) -> tuple[Array, Array] | None:
        frozen = step.node is not None and step.node.frozen
        if frozen or not isinstance(step.operator, SufficientFactors) or memory.output_grad is None:
            return None
        x, y = (self._plan.tensors[tensor] for tensor in (step.inputs[0], step.output))
        return self.view(memory.inputs[0], x), self.view(memory.output_grad, y)

    def _bytes(self, region: Region | None) -> Array | None:
        return None if region is None else self._memory[region.offset : region.end]
