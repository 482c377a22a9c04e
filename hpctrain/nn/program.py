"""A model at one batch size, planned once and run many times: operators bound to one arena.

`StepHooks` are the events between the operators of a step, for averaging, progress and tracing; the engine knows none of them.
`Binder` makes arrays of a plan's places in the arena and binds its operators to them. `Program` runs the plan's actions.
`SideBySide` takes several programs of one network through a pass: each operator runs for all of them before the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic, Fetch
from hpctrain.backend.operators import (
    Array,
    Buffers,
    DeferredStart,
    FollowsOperator,
    KernelSet,
    LocalStatistics,
    LossHandle,
    LossOperator,
    MixedLabels,
    Operator,
    ParameterCopies,
    PixelInput,
    RecomputedOutput,
    StatisticsMerger,
    StepContext,
    SufficientFactors,
)
from hpctrain.backend.pixels import PixelBatch
from hpctrain.backend.specs import TensorSpec
from hpctrain.nn.compile.plan import Action, ExecutionPlan, PlannedStep, Region, StepMemory
from hpctrain.nn.parameter import Parameter, ProgramStatistics


class StepHooks:
    """Does nothing; a subclass overrides what it wants. Called by `Program` in a fixed order, the same on every rank."""

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """The next operator reads these parameters: they must hold this step's values when this returns."""

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        """True for a linear layer whose gradients are made elsewhere, from its input and its output's gradient.

        It then gets `input_ready` in forward and `error_ready` in backward, and no `grad_ready` for its parameters.
        """
        return False

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        """Forward: x (N, in) of a layer that gives sufficient factors; its memory is reused once this returns. Must not wait."""

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        """Backward, before the input's gradient: dy (N, out) of such a layer; its memory is reused. Must not wait."""

    def grad_ready(self, parameter: Parameter) -> None:
        """`parameter.grad` is final for this backward pass. Must not wait."""

    def data_free(self, parameter: Parameter) -> None:
        """This backward pass no longer reads `parameter.data`."""

    def operator_done(self, name: str, phase: str) -> None:
        """One operator has run; `phase` is "forward", "parameters" or "input". Must not wait."""


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


_NO_HOOKS = StepHooks()
_NO_CONTEXT = StepContext()  # a copy between layouts has no use for one


class Program:
    """Runs forward, loss and backward of one plan. Allocates nothing after construction.

    Several programs share one arena, and only one runs at a time: `x`, logits and gradients are valid until another one starts.

    Attributes:
        x: input buffer (N, H, W, C), filled by `set_input` before each forward. logits: (N, classes).
        x_grad: gradient of the input, where it was asked for at set-up.
        activation_bytes: size of the arena that this program uses. memory: as given, which begins with these.
        plan: what it runs.

    Args:
        plan: operators and who shares memory. kernels: whose operators they are. parameters: by full name.
        statistics: of all batch norms.
        memory: uint8, at least the plan's arena. loss: None in a program that only predicts.
        leader: a program of such a plan whose operators run just before this one's; None: there is none.
        home: where the gradient of a trained parameter is to be written; None: into its group.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        *,
        kernels: KernelSet,
        parameters: Mapping[str, Parameter],
        statistics: ProgramStatistics,
        memory: Array,
        loss: LossOperator,
        mergers: Mapping[str, StatisticsMerger],
        leader: Program | None = None,
        home: Callable[[Parameter], Array] | None = None,
    ) -> None:
        self.plan = plan
        self._kernels, self._arithmetic, self._loss = kernels, kernels.arithmetic, loss
        self._statistics = statistics
        self.activation_bytes = plan.arena_bytes
        self.memory = memory
        leading = () if leader is None else leader.steps
        binder = Binder(plan, kernels.arithmetic, parameters, statistics, memory, mergers, leading, home or _in_group)
        self.steps: tuple[BoundStep, ...] = tuple(binder.bind(k, step) for k, step in enumerate(plan.steps))
        self._forward_actions, self._actions = plan.forward, plan.backward
        frozen = any(step.node is not None and step.node.frozen and step.node.statistics for step in plan.steps)
        self._reads_running = frozen or not plan.training
        x, y = plan.tensors[0], plan.tensors[plan.output]
        self.x: Array = binder.view(plan.x, x)
        self.logits: Array = binder.view(plan.logits, y)
        self.d_logits: Array | None = None if plan.logits_grad is None else binder.view(plan.logits_grad, y)
        self.x_grad: Array | None = None if plan.x_grad is None else binder.view(plan.x_grad, x)

    @property
    def batch(self) -> int:
        """N of this program."""
        return int(self.x.shape[0])

    def set_input(self, x: np.ndarray | PixelBatch) -> None:
        """Fill the input buffer from an array on the host, or from pixels that kernels convert.

        `x` may change afterwards.
        """
        if isinstance(x, PixelBatch) and isinstance(self._kernels, PixelInput):
            self._kernels.make_input(self.x, x)
        else:
            self._arithmetic.from_host(self.x, np.asarray(x))

    def forward(self, context: StepContext, hooks: StepHooks = _NO_HOOKS) -> Array:
        """Logits (N, classes) of `x`. Collective where batch norm is synchronised."""
        self.begin(context)
        self.run_forward(range(len(self._forward_actions)), context, hooks)
        return self.logits

    def begin(self, context: StepContext) -> None:
        """The first part of `forward`; `run_forward` of all its actions, in order, is the other."""
        self._kernels.begin(context)
        if self._reads_running:
            self._statistics.refresh()

    def run_forward(self, span: range, context: StepContext, hooks: StepHooks = _NO_HOOKS) -> None:
        """Some neighbouring actions of the plan's forward pass."""
        for action, k in self._forward_actions[span.start : span.stop]:
            self._act_forward(action, k, context, hooks)

    def fetch_statistics(self) -> Fetch:
        """The batch statistics of the latest training forward, on their way to the host. Ask for them before the next one."""
        return self._statistics.fetch_batch()

    def loss(self, labels: Array | MixedLabels, global_count: int) -> LossHandle:
        """A handle of the sums over this batch, best asked for after `backward`.

        Leaves the logits' gradient, divided by the step's global count, for `backward`.

        Args:
            labels: int64 (N,), or two of each sample. global_count: samples of the step over all ranks and micro-batches.
        """
        return self._loss.run(self.logits, labels, global_count, self.d_logits)

    def backward(self, hooks: StepHooks = _NO_HOOKS) -> None:
        """Gradients of all parameters, last layer first, each announced as soon as it is final."""
        self.run_backward(range(len(self._actions)), hooks)

    def run_backward(self, span: range, hooks: StepHooks = _NO_HOOKS) -> None:
        """Some neighbouring actions of the plan's backward pass."""
        for action, k in self._actions[span.start : span.stop]:
            self._act_backward(action, k, hooks)

    def _act_forward(self, action: Action, k: int, context: StepContext, hooks: StepHooks) -> None:
        step = self.steps[k]
        if action is Action.BEGIN:
            assert isinstance(step.operator, DeferredStart)  # or it would have no such action
            step.operator.begin_forward()
            return
        if step.parameters:
            hooks.before_forward(step.parameters)
        if step.sufficient_factors is not None and hooks.takes_sufficient_factors(step.parameters):
            hooks.input_ready(step.parameters, step.sufficient_factors[0])
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
            assert isinstance(step.operator, DeferredStart)
            step.operator.begin_backward()
        elif action is Action.RECOMPUTE:
            assert isinstance(step.operator, RecomputedOutput)
            step.operator.recompute_output()
        else:
            step.operator.forward(_NO_CONTEXT)

    def _parameter_gradients(self, step: BoundStep, hooks: StepHooks) -> None:
        if step.sufficient_factors is not None and hooks.takes_sufficient_factors(step.parameters):
            assert isinstance(step.operator, SufficientFactors)
            step.operator.finish_output_grad()
            hooks.error_ready(step.parameters, step.sufficient_factors[1])
            return
        step.operator.backward_parameters()
        for target, partial in step.gradient_sums:
            self._arithmetic.add(target, partial)
        hooks.operator_done(step.name, "parameters")
        if step.shared:
            return
        for parameter in reversed(step.parameters):
            hooks.grad_ready(parameter)

    def _input_gradient(self, step: BoundStep, hooks: StepHooks) -> None:
        step.operator.backward_input()
        for target, partial in step.add_partials:
            self._arithmetic.add(target, partial)
        hooks.operator_done(step.name, "input")

    def parameters_changed(self) -> None:
        """Parameters were written outside of a training step (a checkpoint, an averager): cached copies are stale."""
        for step in self.steps:
            if isinstance(step.operator, ParameterCopies):
                step.operator.parameters_changed()


def _in_group(parameter: Parameter) -> Array:
    return parameter.grad


def macs(plan: ExecutionPlan) -> int:
    """Multiply-adds of one forward pass, for reports."""
    return sum(
        step.node.spec.flops(*(plan.tensors[i].plain() for i in step.inputs)) // 2 for step in plan.steps if step.node is not None
    )


def parameter_bytes(parameters: Mapping[str, Parameter]) -> int:
    """Bytes of all parameters' data."""
    return sum(math.prod(p.spec.shape) * p.data.itemsize for p in parameters.values())


def alike(plans: Sequence[ExecutionPlan]) -> bool:
    """Programs of these plans can go side by side: the same actions on the same layers, each with gradients of its own.

    Plans of other numbers of samples mostly are; not those without samples, and not where several steps have one parameter,
    whose gradient is not whole until the last of them.
    """
    first = _outline(plans[0])
    return all(_outline(plan) == first for plan in plans[1:]) and not any(
        step.node and step.node.shared for step in plans[0].steps
    )


def _outline(plan: ExecutionPlan) -> tuple[object, ...]:
    return plan.forward, plan.backward, [(step.name, step.has_parameters, type(step.operator)) for step in plan.steps]


class SideBySide:
    """Runs programs that share parameters and nothing else. A sequence of its programs.

    Parameters are so needed once, layer by layer, and gradients are there as early as those of one program over all samples are:
    messages hide under both whole passes. Where plans are too different, programs follow one another.

    Args:
        programs: in the order in which each operator runs, with memory and batch statistics of their own.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = tuple(programs)
        self._plan = programs[0].plan
        self._alike = len(programs) > 1 and alike([program.plan for program in programs])

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def forward(self, contexts: Sequence[StepContext], hooks: StepHooks, turn: Callable[[int], None]) -> None:
        """Logits of all programs. contexts: one each. turn: is told which of them runs next, by its place."""
        if not self._alike:
            for place, (program, context) in enumerate(zip(self._programs, contexts, strict=True)):
                turn(place)
                program.forward(context, hooks)
            return
        for program, context in zip(self._programs, contexts, strict=True):
            program.begin(context)
        for action in range(len(self._plan.forward)):
            for place, (program, context) in enumerate(zip(self._programs, contexts, strict=True)):
                turn(place)
                program.run_forward(range(action, action + 1), context, hooks)

    def backward(self, hooks: StepHooks, turn: Callable[[int], None]) -> None:
        """Gradients of all programs, each announced as soon as it is final. turn: as for `forward`."""
        if not self._alike:
            for place, program in enumerate(self._programs):
                turn(place)
                program.backward(hooks)
            return
        for action in range(len(self._plan.backward)):
            for place, program in enumerate(self._programs):
                turn(place)
                program.run_backward(range(action, action + 1), hooks)

    def parameters_changed(self) -> None:
        """As of a program."""
        for program in self._programs:
            program.parameters_changed()
