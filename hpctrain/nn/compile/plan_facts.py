"""A validator's knowledge of a plan before it runs it: who contributes to which gradient, and what to call things.

All of it follows from steps, actions and the operators' declarations; nothing from what the compiler's passes found out.
"""

from __future__ import annotations

from hpctrain.nn.compile.plan import Action, ExecutionPlan, PlannedStep, Region
from hpctrain.nn.compile.symbolic_memory import Contributions, InvalidPlanError, Value, gradient

LOSS = (-1, -1)
_PHASES = {
    Action.FORWARD: "forward",
    Action.RECOMPUTE: "the recomputation of its output",
    Action.COPY: "the recomputation of its output",
    Action.PARAMETERS: "the gradients of its parameters",
    Action.INPUT: "the gradient of its input",
    Action.BEGIN: "its early start",
    Action.FREE: "the release of its parameters",
}


class PlanFacts:
    """The facts of one plan.

    Attributes:
        plan: the plan. users: by parameter, the positions of the steps that have it.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self._names = {0: "the images"} | {step.output: f"the output of {step.name}" for step in plan.steps}
        acting = {k for action, k in plan.backward if action is Action.INPUT}
        # Views without an action in backward: their input's gradient must be that of their output, in the same memory.
        self.silent_views = {
            step.inputs[0]: k
            for k, step in enumerate(plan.steps)
            if plan.training and step.is_view and plan.needs_grad[step.inputs[0]] and k not in acting
        }
        self._contributions = _contributions(plan)
        self.users: dict[str, list[int]] = {}
        for k, step in enumerate(plan.steps):
            for name in parameter_names(step):
                self.users.setdefault(name, []).append(k)

    def views_of(self, tensor: int) -> list[int]:
        """The tensors that are `tensor` under another shape: they come back with it."""
        direct = [step.output for step in self.plan.steps if step.is_view and step.inputs[0] == tensor]
        return direct + [view for other in direct for view in self.views_of(other)]

    def grad_owner(self, tensor: int) -> int:
        """The tensor whose gradient is that of `tensor` too: the one behind silent views."""
        while tensor in self.silent_views and self._contributions[tensor] == {(self.silent_views[tensor], 0)}:
            tensor = self.plan.steps[self.silent_views[tensor]].output
        return tensor

    def complete_gradient(self, tensor: int) -> Value:
        """The gradient to which all have added."""
        owner = self.grad_owner(tensor)
        return gradient(owner, self._contributions.get(owner, frozenset()))

    def passes_back(self, k: int) -> bool:
        """Step k must have an action for its inputs' gradients."""
        inputs = self.plan.steps[k].inputs
        return any(self.plan.needs_grad[tensor] for tensor in inputs) and self.silent_views.get(inputs[0]) != k

    def name(self, tensor: int) -> str:
        """A tensor in an error's sentence."""
        return f"{self._names[tensor]} (tensor {tensor})"

    def actor(self, action: Action, k: int) -> str:
        """Step and action in an error's sentence."""
        return f"{self.plan.steps[k].name} ({_PHASES[action]})"

    def error(self, action: Action, k: int, fault: str) -> InvalidPlanError:
        """`fault` follows the step and the action in the sentence."""
        return InvalidPlanError(f"{self.actor(action, k)} {fault}; the step makes {self.name(self.plan.steps[k].output)}.")

    def check_region(self, region: Region, tensor: int, role: str) -> None:
        """Raise unless the region fits its tensor and lies in the arena.

        Raises:
            InvalidPlanError: the region is not as large as the tensor, or not inside the arena.
        """
        size_bytes = self.plan.tensors[tensor].bytes
        if region.size_bytes != size_bytes or region.offset < 0 or region.end > self.plan.arena_bytes:
            raise InvalidPlanError(
                f"The place of {self.name(tensor)} as {role}, bytes [{region.offset}, {region.end}) of an arena of "
                f"{self.plan.arena_bytes}, is not {size_bytes} bytes inside it."
            )

    def check_places(self, k: int) -> None:
        """Raise unless each place of step k fits its content.

        Raises:
            InvalidPlanError: a place of step k does not fit what belongs there.
        """
        step, memory = self.plan.steps[k], self.plan.memory[k]
        places: list[tuple[Region | None, int]] = [(memory.output, step.output), (memory.output_grad, step.output)]
        places += zip(memory.inputs, step.inputs, strict=True)
        places += zip(memory.input_grads, step.inputs, strict=True)
        places += [(target, step.inputs[i]) for i, target, _ in memory.sums]
        for region, tensor in places:
            if region is not None:
                self.check_region(region, tensor, f"{step.name} has it")
        for size_bytes, region in ((step.operator.saved_bytes, memory.saved), (step.operator.scratch_bytes, memory.scratch)):
            granted = 0 if region is None or region.end > self.plan.arena_bytes else region.size_bytes
            if granted < size_bytes:
                raise InvalidPlanError(f"{step.name} asks for {size_bytes} bytes of its own and has {granted} in the arena.")


def parameter_names(step: PlannedStep) -> frozenset[str]:
    """Full names of a step's parameters."""
    return frozenset(step.node.parameters.values()) if step.node is not None else frozenset()


def announces(step: PlannedStep) -> bool:
    """The step has parameters, and no earlier one has them too: it hands out their gradients."""
    return step.has_parameters and step.node is not None and not step.node.shared


def _contributions(plan: ExecutionPlan) -> dict[int, Contributions]:
    """By tensor: all that add to its gradient."""
    collected: dict[int, set[tuple[int, int]]] = {plan.output: {LOSS}}
    for k, step in enumerate(plan.steps):
        for i, tensor in enumerate(step.inputs):
            collected.setdefault(tensor, set()).add((k, i))
    return {tensor: frozenset(contributors) for tensor, contributors in collected.items()}
