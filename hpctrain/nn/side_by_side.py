"""Several programs of one network that go through a pass side by side: each operator runs for all of them before the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpctrain.backend.operators import StepContext
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.nn.hooks import StepHooks
from hpctrain.nn.program import Program


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
