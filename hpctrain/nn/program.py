"""A model at one batch size, planned once and run many times: operators bound to one arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from hpctrain.backend.arithmetic import Fetch
from hpctrain.backend.kernels.abilities import DeferredStart, ParameterCopies, RecomputedOutput, SufficientFactors
from hpctrain.backend.operators import Array, KernelSet, LossHandle, LossOperator, PixelInput, StatisticsMerger, StepContext
from hpctrain.backend.kernels.labels import MixedLabels
from hpctrain.backend.pixel_batch import PixelBatch
from hpctrain.nn.binder import Binder, BoundStep
from hpctrain.nn.compile.plan import Action, ExecutionPlan
from hpctrain.nn.hooks import StepHooks
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.statistics import ProgramStatistics

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
