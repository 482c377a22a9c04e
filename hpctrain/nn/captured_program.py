"""A program whose work is captured span by span, and then launched a span at a time: for kernel sets that can (CUDA graphs).

A launch of a captured span costs the host about as much as that of one kernel, so small batches are no longer bound by launches.
The work is the same in the same order, and so are the bits.

Hooks are called between spans, never inside one: forward waits for parameters before a span, and gradients are announced after
it. So spans end where the messages of a step begin or are waited for, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.backend.operators import Array, CallsHost, CapturedWork, CapturesWork, KernelSet, StepContext
from hpctrain.nn.compile.plan import Action, Actions, ExecutionPlan
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.program import Program, StepHooks

#: by parameter, the slices that hold some of it; parameters that no message carries are left out
Slices = Mapping[str, Sequence[int]]


def forward_spans(needs: Sequence[Iterable[str]], slices: Slices) -> list[range]:
    """Return the spans of forward's actions: a new one begins where an action needs a slice that no action before it needed.

    Actions before the first that needs a slice join its span.

    Args:
        needs: by action, the parameters that it reads.
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
    """Return the spans of backward's actions: a span ends after the action that makes the last gradient of a slice.

    Args:
        announced: by action, the parameters whose gradients are final after it.
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
    """Return the spans between the starts, empty ones left out."""
    ends = [*starts[1:], stop]
    return [range(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


_SILENT = StepHooks()


@dataclass
class _Unit:
    """A span of one pass, captured once. name: the names of its first and last operator."""

    span: range
    name: str
    work: CapturedWork | None = None


class CapturedProgram(Program):
    """Runs action by action the first time (kernels are loaded then, which cannot be captured), and by captured spans later.

    Hooks are called between spans only: before a span for all parameters that it reads, after it for all gradients that it makes.

    Args:
        plan: of a kernel set that is also `CapturesWork`. slices: returns the current slices; called once, when the first span is
            captured. others: as of `Program`.
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
        """Call the hooks for gradients that an action of backward has made, and for parameters that it was the last to read."""
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
        action, k = self.plan.forward[position]
        return () if action is Action.BEGIN else self.steps[k].parameters

    def _final(self, action: Action, k: int) -> tuple[Parameter, ...]:
        """Return the parameters whose gradients are final after an action of backward, in the order of announcing."""
        step = self.steps[k]
        return step.parameters[::-1] if action is Action.PARAMETERS and not step.shared else ()

    def _units(self, actions: Actions, spans: Sequence[range]) -> list[_Unit]:
        names = [self.steps[k].name for _, k in actions]
        return [_Unit(span, f"{names[span.start]} to {names[span.stop - 1]}") for span in spans]
