"""Programs whose work is captured in spans and launched one span at a time, for kernel sets that support it (CUDA graphs).

Launching a captured span costs the host about as much as launching one kernel, so small batches are no longer bound by launches.
The same work runs in the same order, so the results are bit-identical.

A span is a range of consecutive actions of one pass. Hooks are called between spans, never inside one. Forward waits for
parameters before a span, and gradients are announced after it. A span therefore ends only where the messages of a step begin or
are waited for. A slice is the content of one message, which holds parameters or parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.backend.operators import Array, CallsHost, CapturedWork, CapturesWork, KernelSet, StepContext
from hpctrain.nn.compile.plan import Action, Actions, ExecutionPlan
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.program import Program, StepHooks

#: slices that hold a part of each parameter, by name; parameters that no message carries are absent
Slices = Mapping[str, Sequence[int]]


def forward_spans(needs: Sequence[Iterable[str]], slices: Slices) -> list[range]:
    """Return the spans of forward's actions; an action begins a new span if it is the first action that needs some slice.

    The first span also contains the leading actions that need no slice.

    Args:
        needs: names of the parameters that each action reads.
        slices: slices that hold each parameter.
    """
    starts = [0]
    needed: set[int] = set()
    for position, names in enumerate(needs):
        more = {k for name in names for k in slices.get(name, ())} - needed
        if more and position > starts[-1] and needed:
            starts.append(position)
        needed |= more
    return _ranges(starts, len(needs))


def backward_spans(announced: Sequence[Iterable[str]], slices: Slices) -> list[range]:
    """Return the spans of backward's actions; a span ends after an action that completes the gradients of a slice.

    Args:
        announced: names of the parameters whose gradients are final after each action.
        slices: slices that hold each parameter.
    """
    missing: dict[int, set[str]] = {}
    for name, held in slices.items():
        for k in held:
            missing.setdefault(k, set()).add(name)
    starts = [0]
    for position, names in enumerate(announced):
        complete = False
        for name in names:
            for k in slices.get(name, ()):
                missing[k].discard(name)
                complete |= not missing[k]
        if complete:
            starts.append(position + 1)
    return _ranges(starts, len(announced))


def _ranges(starts: Sequence[int], stop: int) -> list[range]:
    """Return the spans between the starts, without empty ones."""
    ends = [*starts[1:], stop]
    return [range(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


_SILENT = StepHooks()


@dataclass
class _Unit:
    """A captured span of one pass.

    Attributes:
        span: positions of its actions.
        name: names of its first and last operator.
        work: captured work; None before the first run.
    """

    span: range
    name: str
    work: CapturedWork | None = None


class CapturedProgram(Program):
    """A program that runs its first pass action by action, and later passes as captured spans.

    The first pass loads the kernels, which cannot be captured. No pass is captured if an operator calls the host, or if the hooks
    take sufficient factors. Hooks are called only between spans: before a span for all parameters that it reads, and after it for
    all gradients that it computes.

    Args:
        plan: plan of a kernel set that implements `CapturesWork`.
        slices: function that returns the slices of the messages; called when the spans of each pass are made.
        others: other arguments of `Program`.
    """

    def __init__(self, plan: ExecutionPlan, *, kernels: KernelSet, slices: Callable[[], Slices], **others: Any) -> None:
        super().__init__(plan, kernels=kernels, **others)
        assert isinstance(kernels, CapturesWork)
        self._capture, self._slices = kernels.capture, slices
        self._warm_forward = self._warm_backward = False
        operators = [step.operator for step in self.steps]
        self._calls_host = any(isinstance(operator, CallsHost) and operator.calls_host for operator in operators)
        self._forward_units: list[_Unit] | None = None
        self._backward_units: list[_Unit] | None = None

    def forward(self, context: StepContext, hooks: StepHooks = _SILENT) -> Array:
        if not self._warm_forward or self._cannot_be_captured(hooks):
            self._warm_forward = True
            return super().forward(context, hooks)
        if self._forward_units is None:
            needs = [[parameter.name for parameter in self._read(position)] for position in range(len(self.plan.forward))]
            self._forward_units = self._units(self.plan.forward, forward_spans(needs, self._slices()))
        self.begin(context)
        for unit in self._forward_units:
            for position in unit.span:
                parameters = self._read(position)
                if parameters:
                    hooks.before_forward(parameters)
            if unit.work is None:
                with self._capture() as unit.work:
                    self.run_forward(unit.span, context)
            unit.work.launch()
            hooks.operator_done(unit.name, "forward")
        return self.logits

    def backward(self, hooks: StepHooks = _SILENT) -> None:
        if not self._warm_backward or self._cannot_be_captured(hooks):
            self._warm_backward = True
            super().backward(hooks)
            return
        if self._backward_units is None:
            announced = [[parameter.name for parameter in self._final(action, k)] for action, k in self.plan.backward]
            self._backward_units = self._units(self.plan.backward, backward_spans(announced, self._slices()))
        for unit in self._backward_units:
            if unit.work is None:
                with self._capture() as unit.work:
                    self.run_backward(unit.span)
            unit.work.launch()
            hooks.operator_done(unit.name, "input")
            for position in unit.span:
                self._announce(position, hooks)

    def _announce(self, position: int, hooks: StepHooks) -> None:
        """Announce the gradients that an action of backward has completed, and the parameters that it was the last to read."""
        action, k = self.plan.backward[position]
        if action is Action.FREE:
            for parameter in self.steps[k].parameters:
                hooks.data_free(parameter)
        for parameter in self._final(action, k):
            hooks.grad_ready(parameter)

    def _cannot_be_captured(self, hooks: StepHooks) -> bool:
        """Return whether an operator calls the host, or a hook copies sufficient factors in the middle of a pass."""
        steps = (step for step in self.steps if step.sufficient_factors is not None)
        return self._calls_host or any(hooks.takes_sufficient_factors(step.parameters) for step in steps)

    def _read(self, position: int) -> tuple[Parameter, ...]:
        """Return the parameters that an action of forward reads."""
        _, k = self.plan.forward[position]
        return self.steps[k].parameters

    def _final(self, action: Action, k: int) -> tuple[Parameter, ...]:
        """Return the parameters whose gradients are final after an action of backward, in the order of their announcement."""
        step = self.steps[k]
        return step.parameters[::-1] if action is Action.PARAMETERS else ()

    def _units(self, actions: Actions, spans: Sequence[range]) -> list[_Unit]:
        names = [self.steps[k].name for _, k in actions]
        return [_Unit(span, f"{names[span.start]} to {names[span.stop - 1]}") for span in spans]
