"""In what order a program runs its steps, forward and backward: data, made once, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from hpctrain.backend.kernels.base import Array, Operator
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.plan import ExecutionPlan


@dataclass(frozen=True)
class BoundStep:
    """A planned step with its parameters and what is left to do by the program itself.

    add_partials: (target, partial) pairs to add after `backward_input`, where the operator cannot accumulate.
    gradient_sums: (target, partial) pairs to add after `backward_parameters`, where the parameters are also those of other steps.
    shared: an earlier step has the same parameters: it announces their gradients.
    factors: (x, dy) of a linear layer that is trained: its weight's gradient is x^T dy, and may be made elsewhere.
    """

    name: str
    operator: Operator
    parameters: tuple[Parameter, ...]
    passes_back: bool
    add_partials: tuple[tuple[Array, Array], ...]
    factors: tuple[Array, Array] | None
    gradient_sums: tuple[tuple[Array, Array], ...] = ()
    shared: bool = False


class Action(Enum):
    """What a pass does with a step."""

    FORWARD = auto()
    RECOMPUTE = auto()  # make the output again, which was not kept
    COPY = auto()  # the same, of a copy in another layout
    PARAMETERS = auto()
    INPUT = auto()
    BEGIN = auto()  # what goes in is complete (in backward, the output's gradient): what travels may start
    FREE = auto()  # parameters are no longer read


def backward_actions(plan: ExecutionPlan) -> tuple[tuple[Action, int], ...]:
    """The order of backward as data: (action, position of the step). Nothing in evaluation.

    Last step first, parameters before the input; where `input_first` is set the input comes first and its gradient starts to
    travel, so that it does under the parameters' gradients.
    """
    if not plan.training:
        return ()
    actions: list[tuple[Action, int]] = []
    done: set[int] = set()
    present: set[int] = set()
    for k in reversed(range(len(plan.steps))):
        step = plan.steps[k]
        for tensor in _needed(plan, k):
            for position in plan.recompute_path(tensor)[1]:
                made = plan.steps[position].output
                if made not in present:
                    present.add(made)
                    actions.append((Action.COPY if plan.steps[position].node is None else Action.RECOMPUTE, position))
        if not step.input_first:
            actions.append((Action.PARAMETERS, k))
        if k not in done:
            actions.append((Action.INPUT, k))
        if step.input_first:
            actions += _ahead(plan, k, done)
            actions.append((Action.PARAMETERS, k))
        if step.node is None or not step.node.shared:
            actions.append((Action.FREE, k))
    return tuple(action for action in actions if _acts(plan, *action))


def passes_back(plan: ExecutionPlan, k: int) -> bool:
    """Whether step k has a gradient of its input to make: not where nobody asks, and not where it lies in the output's."""
    step = plan.steps[k]
    inside = step.operator.view and plan.grad_storage[step.inputs[0]] == plan.grad_storage[step.output]
    return any(plan.needs_grad[tensor] for tensor in step.inputs) and not inside


def _needed(plan: ExecutionPlan, k: int) -> tuple[int, ...]:
    step = plan.steps[k]
    return tuple(plan.storage[i] for i, needs in zip(step.inputs, step.operator.needs_inputs, strict=False) if needs)


def _ahead(plan: ExecutionPlan, k: int, done: set[int]) -> list[tuple[Action, int]]:
    copies, begins = plan.ahead(k)
    done.update(copies)
    actions = [(Action.INPUT, j) for j in copies]
    return actions if begins is None else [*actions, (Action.BEGIN, begins)]


def forward_actions(plan: ExecutionPlan) -> tuple[tuple[Action, int], ...]:
    """The order of forward as data: steps in order, but those that begin early end just before their first reader."""
    actions: list[tuple[Action, int]] = []
    begun: set[int] = set()
    for k, step in enumerate(plan.steps):
        for j in sorted(position for position in map(plan.producer, step.inputs) if position in begun):
            begun.discard(j)
            actions.append((Action.FORWARD, j))
        if step.operator.begins_early:
            begun.add(k)
            actions.append((Action.BEGIN, k))
        else:
            actions.append((Action.FORWARD, k))
    return tuple(actions)


def _acts(plan: ExecutionPlan, action: Action, k: int) -> bool:
    if action in (Action.PARAMETERS, Action.FREE):
        return plan.steps[k].has_parameters
    return action not in (Action.INPUT, Action.BEGIN) or passes_back(plan, k)
