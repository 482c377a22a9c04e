"""A model at one batch size, planned once and run many times: operators bound to one arena.

`StepHooks` are callbacks between the operators of a step, for averaging, progress and tracing. `Binder` makes arrays from a
plan's places in the arena and binds the plan's operators to them. `Program` runs the plan's actions. `SideBySide` runs several
programs of one network: each operator runs for all of them before the next operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
    """Callbacks between the operators of a step. `Program` calls them in a fixed order, the same on every rank.

    The base does nothing; subclasses override single callbacks.
    """

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """Wait until these parameters, which the next operator reads, hold this step's values."""

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        """Return whether the hooks compute a linear layer's gradients from its input and its output's gradient.

        If so, `input_ready` is called in forward and `error_ready` in backward. `grad_ready` is not called for these parameters.
        """
        return False

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        """Read the input x (N, in) in forward, if `takes_sufficient_factors` is true for these parameters.

        The call must not wait. The memory of x is reused after it.
        """

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        """Read the output's gradient dy (N, out) in backward, if `takes_sufficient_factors` is true for these parameters.

        The call comes before the input's gradient is computed, and must not wait. The memory of dy is reused after it.
        """

    def grad_ready(self, parameter: Parameter) -> None:
        """Use `parameter.grad`, which is final for this backward pass, without waiting."""

    def data_free(self, parameter: Parameter) -> None:
        """React to the last read of `parameter.data` in this backward pass."""

    def operator_done(self, name: str, phase: str) -> None:
        """React to the end of an operator, without waiting. `phase` is "forward", "parameters" or "input"."""


@dataclass(frozen=True)
class BoundStep:
    """A planned step with its parameters, and the sums that the program computes for it.

    Attributes:
        passes_back: whether backward computes a gradient of its inputs.
        add_partials: (target, partial) pairs to add after `backward_input`, because the operator cannot accumulate.
        sufficient_factors: (x, dy) of a trained linear layer, whose weight gradient x^T dy the hooks may compute; None for all
            other steps.
    """

    name: str
    operator: Operator
    parameters: tuple[Parameter, ...]
    passes_back: bool
    add_partials: tuple[tuple[Array, Array], ...]
    sufficient_factors: tuple[Array, Array] | None


class _ViewCopy(Operator):
    """A view that copies its gradient, because its input has several readers and the two gradients cannot share memory."""

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
    """Binding of a plan's operators to arrays at the plan's places in the arena, in forward order.

    Args:
        leading: steps of the leading program (see `Program`); empty if there is none.
        plan, arithmetic, parameters, statistics, memory, mergers: see `Program`.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        arithmetic: Arithmetic,
        parameters: Mapping[str, Parameter],
        statistics: ProgramStatistics,
        memory: Array,
        mergers: Mapping[str, StatisticsMerger],
        leading: Sequence[BoundStep],
        gradient_buffer: Callable[[Parameter], Array],
    ) -> None:
        self._arithmetic, self._leading, self._gradient_buffer = arithmetic, leading, gradient_buffer
        self._plan, self._parameters, self._statistics, self._mergers = plan, parameters, statistics, mergers
        self._memory = memory

    def view(self, region: Region, spec: TensorSpec) -> Any:
        """Return the array of a tensor in its shape, or flat if only its kernel set can index its layout."""
        flat = self._memory[region.offset : region.end].view(spec.dtype)
        return flat.reshape(spec.shape) if spec.layout == "NHWC" else flat

    def bind(self, k: int, step: PlannedStep) -> BoundStep:
        """Bind the operator of step k to its buffers."""
        memory, tensors, node = self._plan.memory[k], self._plan.tensors, step.node
        operator = _ViewCopy(step.operator, self._arithmetic) if memory.copies_gradient else step.operator
        parameters = {} if node is None else {role: self._parameters[name] for role, name in node.parameters.items()}
        if self._leading and isinstance(operator, FollowsOperator):
            # It runs directly after the same layer of the leading program, and may reuse that layer's prepared weights.
            operator.follow(self._leading[k].operator)
        targets = zip(memory.input_grads, step.inputs, strict=True)
        group = None if node is None else getattr(step.operator.spec, "merge", None)  # ranks that merge a batch norm's statistics
        operator.bind(
            Buffers(
                inputs=tuple(self.view(region, tensors[i]) for region, i in zip(memory.inputs, step.inputs, strict=True)),
                output=self.view(memory.output, tensors[step.output]),
                input_grads=tuple(None if region is None else self.view(region, tensors[i]) for region, i in targets),
                output_grad=None if memory.output_grad is None else self.view(memory.output_grad, tensors[step.output]),
                accumulate=memory.accumulate,
                parameters={role: parameter.data for role, parameter in parameters.items()},
                gradients=self._gradients(k, parameters),
                shadows={role: parameter.shadow for role, parameter in parameters.items() if parameter.shadow is not None},
                statistics=self._statistics.by_role(node.statistics) if node is not None else {},
                saved=self._bytes(memory.saved),
                scratch=self._bytes(memory.scratch),
                merger=LocalStatistics() if group is None else self._mergers[group],
            )
        )
        return BoundStep(
            name=step.name,
            operator=operator,
            # Parameters of frozen layers never change, so no hook waits for them or averages them.
            parameters=() if node is not None and node.frozen else tuple(parameters.values()),
            passes_back=(Action.INPUT, k) in self._plan.backward,
            add_partials=tuple(
                (self.view(target, tensors[step.inputs[i]]), self.view(partial, tensors[step.inputs[i]]))
                for i, target, partial in memory.sums
            ),
            sufficient_factors=self._sufficient_factors(step, memory),
        )

    def _gradients(self, k: int, parameters: Mapping[str, Parameter]) -> dict[str, Array]:
        """Return the arrays that step k writes its parameters' gradients to, by role.

        The operator of a frozen layer may still compute its parameters' gradients on the way to the input's gradient, as batch
        norm does. It receives memory for them that no code reads.
        """
        step = self._plan.steps[k]
        if not self._plan.training or step.node is None:
            return {}
        if not step.node.frozen:
            return {role: self._gradient_buffer(parameter) for role, parameter in parameters.items()}
        passes_back = any(self._plan.needs_grad[tensor] for tensor in step.inputs)
        zeros = self._arithmetic.zeros
        unused = parameters.items() if passes_back else ()
        return {role: zeros(each.size, str(each.data.dtype)).reshape(each.spec.shape) for role, each in unused}

    def _sufficient_factors(self, step: PlannedStep, memory: StepMemory) -> tuple[Array, Array] | None:
        """Return (x, dy) of a trained linear layer; None for all other layers, and in evaluation."""
        frozen = step.node is not None and step.node.frozen
        if frozen or not isinstance(step.operator, SufficientFactors) or memory.output_grad is None:
            return None
        x, y = (self._plan.tensors[tensor] for tensor in (step.inputs[0], step.output))
        return self.view(memory.inputs[0], x), self.view(memory.output_grad, y)

    def _bytes(self, region: Region | None) -> Array | None:
        return None if region is None else self._memory[region.offset : region.end]


_NO_HOOKS = StepHooks()
_NO_CONTEXT = StepContext()  # a layout copy reads no context


class Program:
    """Forward, loss and backward of one plan, bound to memory. It allocates nothing after construction.

    Several programs share one arena, and only one runs at a time. `x`, logits and gradients are valid until another program
    starts.

    Args:
        plan: operators and their places in memory.
        memory: uint8 array of at least the size of the plan's arena.
        mergers: mergers of batch statistics by group of ranks.
        leader: program that runs each operator just before this program does; their plans are alike (see `alike`). None: there
            is none.
        gradient_buffer: function that returns the array for the gradient of a trained parameter; None: the array in its group.

    Attributes:
        steps: operators of the plan, bound to memory.
        x: input buffer (N, H, W, C), filled by `set_input` before each forward.
        logits: output (N, classes).
        d_logits: gradient of the logits; None in evaluation.
        x_grad: gradient of the input; None unless the plan has it.
        activation_bytes: size of the plan's arena in bytes.
        memory: array that begins with this arena.
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
        gradient_buffer: Callable[[Parameter], Array] | None = None,
    ) -> None:
        self.plan = plan
        self._kernels, self._arithmetic, self._loss = kernels, kernels.arithmetic, loss
        self._statistics = statistics
        self.activation_bytes = plan.arena_bytes
        self.memory = memory
        leading = () if leader is None else leader.steps
        buffer_of = gradient_buffer or attrgetter("grad")
        binder = Binder(plan, kernels.arithmetic, parameters, statistics, memory, mergers, leading, buffer_of)
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
        """Number of samples N of a pass."""
        return int(self.x.shape[0])

    def set_input(self, x: np.ndarray | PixelBatch) -> None:
        """Fill the input buffer from an array on the host, or from pixels that kernels convert. `x` may change afterwards."""
        if isinstance(x, PixelBatch) and isinstance(self._kernels, PixelInput):
            self._kernels.make_input(self.x, x)
        else:
            self._arithmetic.from_host(self.x, np.asarray(x))

    def forward(self, context: StepContext, hooks: StepHooks = _NO_HOOKS) -> Array:
        """Compute and return the logits (N, classes) of `x`. Collective if batch norm is synchronised."""
        self.begin(context)
        self.run_forward(range(len(self._forward_actions)), context, hooks)
        return self.logits

    def begin(self, context: StepContext) -> None:
        """Begin a forward pass. The caller then passes all actions to `run_forward`, in order."""
        self._kernels.begin(context)
        if self._reads_running:
            self._statistics.refresh()

    def run_forward(self, span: range, context: StepContext, hooks: StepHooks = _NO_HOOKS) -> None:
        """Run the actions at the positions `span` of the plan's forward pass."""
        for _, k in self._forward_actions[span.start : span.stop]:
            self._act_forward(k, context, hooks)

    def fetch_statistics(self) -> Fetch:
        """Start copying the batch statistics of the latest training forward to the host. Call it before the next forward."""
        return self._statistics.fetch_batch()

    def loss(self, labels: Array | MixedLabels, global_count: int, class_scale: float | None = None) -> LossHandle:
        """Compute the loss, and write the gradient of the logits, divided by `global_count`, for `backward`.

        Args:
            labels: int64 (N,), or two labels per sample with their weight.
            global_count: number of samples of the step over all ranks and micro-batches.
            class_scale: factor on the weights of classes, as for `LossOperator.run`; None: they are not applied.

        Returns:
            Handle of the sums over this batch. Reading it after `backward` avoids a wait.
        """
        return self._loss.run(self.logits, labels, global_count, self.d_logits, class_scale)

    def backward(self, hooks: StepHooks = _NO_HOOKS) -> None:
        """Compute the gradients of all parameters, last layer first, and announce each as soon as it is final."""
        self.run_backward(range(len(self._actions)), hooks)

    def run_backward(self, span: range, hooks: StepHooks = _NO_HOOKS) -> None:
        """Run the actions at the positions `span` of the plan's backward pass."""
        for action, k in self._actions[span.start : span.stop]:
            self._act_backward(action, k, hooks)

    def _act_forward(self, k: int, context: StepContext, hooks: StepHooks) -> None:
        step = self.steps[k]
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
            assert isinstance(step.operator, DeferredStart)  # no other operator has this action
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
        hooks.operator_done(step.name, "parameters")
        for parameter in reversed(step.parameters):
            hooks.grad_ready(parameter)

    def _input_gradient(self, step: BoundStep, hooks: StepHooks) -> None:
        step.operator.backward_input()
        for target, partial in step.add_partials:
            self._arithmetic.add(target, partial)
        hooks.operator_done(step.name, "input")

    def parameters_changed(self) -> None:
        """Discard the operators' copies of parameters. Call it after a write outside of a training step."""
        for step in self.steps:
            if isinstance(step.operator, ParameterCopies):
                step.operator.parameters_changed()


def alike(plans: Sequence[ExecutionPlan]) -> bool:
    """Return whether programs of these plans can run side by side: the same actions on the same layers.

    Plans that differ only in the number of samples are usually alike, but a plan without samples may have other operators.
    """
    first = _outline(plans[0])
    return all(_outline(plan) == first for plan in plans[1:])


def _outline(plan: ExecutionPlan) -> tuple[object, ...]:
    return plan.forward, plan.backward, [(step.name, step.has_parameters, type(step.operator)) for step in plan.steps]


class SideBySide:
    """Several programs that run together and share only parameters. Iteration yields the programs.

    Each operator runs for all programs before the next operator. Parameters are therefore needed once, layer by layer, and
    gradients are complete as early as with one program over all samples, so messages overlap with both whole passes. If the plans
    are not alike, the programs run one after another.

    Args:
        programs: programs with separate memory and batch statistics, in the order in which each operator runs.
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
        """Compute the logits of all programs.

        Args:
            contexts: one context per program.
            turn: callback, called with the index of the program whose operators run next.
        """
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
        """Compute the gradients of all programs, and announce each as soon as it is final."""
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
        """Call `Program.parameters_changed` of each program."""
        for program in self._programs:
            program.parameters_changed()
