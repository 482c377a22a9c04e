"""Check of finished plans: both passes run symbolically on the memory that the plan assigns to each step.

Every written region of the arena holds the name of the value that was written last. Each read names the value that it needs; the
plan is wrong if the region holds another value or only a part of the needed one. Reads and writes follow from the operators'
declarations and the graph alone. They do not use decisions of the compiler's passes, so the check does not repeat their mistakes.

`SymbolicMemory` is an arena that holds names instead of bytes. `PlanFacts` are the facts about a plan that are fixed before it
runs: the contributions to each gradient, and the names for error messages. `validate` runs the plan.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.nn.compile.plan import Action, ExecutionPlan, Region

#: (step, position of the input) of each reader that has added to a gradient; the loss is (-1, -1)
Contributions = frozenset[tuple[int, int]]

#: name of the content of a region
Value = tuple[Hashable, ...]


class InvalidPlanError(AssertionError):
    """Error for a plan that would compute wrong numbers.

    It shows a defect of hpctrain or of an operator's declarations, not a user's mistake.
    """


def activation(tensor: int) -> Value:
    """Return the name of a tensor's value after its producer has written it."""
    return ("activation", tensor)


def gradient(tensor: int, contributions: Contributions) -> Value:
    """Return the name of a tensor's gradient after the readers `contributions` have added to it."""
    return ("gradient", tensor, contributions)


@dataclass
class _Stretch:
    """A region that one write has filled.

    Attributes:
        region: bytes of the write.
        values: names of the content; several if there are views.
        writer: name of the step and action, for errors.
    """

    region: Region
    values: set[Value]
    writer: str


class SymbolicMemory:
    """Arena of names: the regions that were written and not overwritten since, even in part.

    Regions never overlap. Empty regions hold any value.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stretches: dict[int, _Stretch] = {}
        self._overwritten: dict[Value, str] = {}

    def write(self, region: Region, value: Value, writer: str) -> None:
        """Write `value` to `region`. The content of all overlapping regions is lost."""
        if not region.size_bytes:
            return
        for start in self._overlapped(region):
            lost = self._stretches.pop(start)
            self._starts.remove(start)
            self._overwritten |= dict.fromkeys(lost.values, writer)
        self._starts.insert(bisect_left(self._starts, region.offset), region.offset)
        self._stretches[region.offset] = _Stretch(region, {value}, writer)
        self._overwritten.pop(value, None)

    def add_name(self, region: Region, value: Value) -> None:
        """Add `value` to the names of the content of `region`."""
        if region.size_bytes:
            self._stretches[region.offset].values.add(value)

    def read(self, region: Region, value: Value, reader: str, name: str) -> None:
        """Raise an InvalidPlanError, with the names of the reader and of the value, unless `region` holds exactly `value`."""
        stretch = self._stretches.get(region.offset)
        if not region.size_bytes or (stretch is not None and stretch.region == region and value in stretch.values):
            return
        place = f"{reader} reads {name} at bytes [{region.offset}, {region.end})"
        if value in self._overwritten:
            raise InvalidPlanError(f"{place}, but {self._overwritten[value]} has overwritten it.")
        writers = [self._stretches[start].writer for start in self._overlapped(region)]
        if writers:
            raise InvalidPlanError(f"{place}, but it is not complete there: {', then '.join(writers)} wrote last.")
        raise InvalidPlanError(f"{place}, but nothing has written it there.")

    def contributions(self, region: Region, tensor: int) -> Contributions | None:
        """Return the readers that have added to the gradient of `tensor` in `region`; None if the region holds another value."""
        stretch = self._stretches.get(region.offset)
        for value in stretch.values if stretch is not None and stretch.region == region else ():
            if value[:2] == ("gradient", tensor) and isinstance(value[2], frozenset):
                return value[2]
        return None

    def _overlapped(self, region: Region) -> list[int]:
        """Return the starts of the written regions that share a byte with `region`."""
        first = bisect_right(self._starts, region.offset) - 1
        if first < 0 or self._stretches[self._starts[first]].region.end <= region.offset:
            first += 1
        return self._starts[first : bisect_left(self._starts, region.end)]


LOSS = (-1, -1)
_PHASES = {
    Action.FORWARD: "forward",
    Action.RECOMPUTE: "the recomputation of its output",
    Action.COPY: "the recomputation of its output",
    Action.PARAMETERS: "the gradients of its parameters",
    Action.INPUT: "the gradient of its input",
    Action.BEGIN: "the early start of its backward",
    Action.FREE: "the release of its parameters",
}


class PlanFacts:
    """Facts about one plan that are fixed before it runs.

    Attributes:
        silent_views: position of the view that reads each tensor and has no action in backward, if there is one.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self._names = {0: "the images"} | {step.output: f"the output of {step.name}" for step in plan.steps}
        acting = {k for action, k in plan.backward if action is Action.INPUT}
        # No action copies the gradient of such a view, so its input's and its output's gradient must share memory.
        self.silent_views = {
            step.inputs[0]: k
            for k, step in enumerate(plan.steps)
            if plan.training and step.is_view and plan.needs_grad[step.inputs[0]] and k not in acting
        }
        self._contributions = _contributions(plan)

    def views_of(self, tensor: int) -> list[int]:
        """Return all views of `tensor`. Recomputing the tensor recomputes them as well."""
        direct = [step.output for step in self.plan.steps if step.is_view and step.inputs[0] == tensor]
        return direct + [view for other in direct for view in self.views_of(other)]

    def grad_owner(self, tensor: int) -> int:
        """Return the tensor that owns the gradient of `tensor`: the end of its chain of silent views."""
        while tensor in self.silent_views and self._contributions[tensor] == {(self.silent_views[tensor], 0)}:
            tensor = self.plan.steps[self.silent_views[tensor]].output
        return tensor

    def complete_gradient(self, tensor: int) -> Value:
        """Return the name of the gradient after all readers have added to it."""
        owner = self.grad_owner(tensor)
        return gradient(owner, self._contributions.get(owner, frozenset()))

    def passes_back(self, k: int) -> bool:
        """Return whether step k must have an action for its inputs' gradients."""
        inputs = self.plan.steps[k].inputs
        return any(self.plan.needs_grad[tensor] for tensor in inputs) and self.silent_views.get(inputs[0]) != k

    def name(self, tensor: int) -> str:
        """Return the name of a tensor for an error message."""
        return f"{self._names[tensor]} (tensor {tensor})"

    def actor(self, action: Action, k: int) -> str:
        """Return the name of a step and action for an error message."""
        return f"{self.plan.steps[k].name} ({_PHASES[action]})"

    def error(self, action: Action, k: int, fault: str) -> InvalidPlanError:
        """Return an error that names the step, the action and `fault`."""
        return InvalidPlanError(f"{self.actor(action, k)} {fault}; the step computes {self.name(self.plan.steps[k].output)}.")

    def check_region(self, region: Region, tensor: int, role: str) -> None:
        """Raise an InvalidPlanError unless the region, the tensor's place as `role`, has its size and lies in the arena."""
        size_bytes = self.plan.tensors[tensor].bytes
        if region.size_bytes != size_bytes or region.offset < 0 or region.end > self.plan.arena_bytes:
            raise InvalidPlanError(
                f"The place of {self.name(tensor)} as {role}, bytes [{region.offset}, {region.end}) of an arena of "
                f"{self.plan.arena_bytes}, is not {size_bytes} bytes inside it."
            )

    def check_places(self, k: int) -> None:
        """Raise an InvalidPlanError unless each place of step k fits its content."""
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
                raise InvalidPlanError(f"{step.name} needs {size_bytes} bytes of saved or scratch memory, but has {granted}.")


def _contributions(plan: ExecutionPlan) -> dict[int, Contributions]:
    """Return, for each tensor, all readers that add to its gradient."""
    collected: dict[int, set[tuple[int, int]]] = {plan.output: {LOSS}}
    for k, step in enumerate(plan.steps):
        for i, tensor in enumerate(step.inputs):
            collected.setdefault(tensor, set()).add((k, i))
    return {tensor: frozenset(contributors) for tensor, contributors in collected.items()}


ENVIRONMENT_VARIABLE = "HPCTRAIN_VALIDATE_PLANS"

_Regions = Iterable[Region | None]


def validation_is_on() -> bool:
    """Return whether every new plan is checked, which HPCTRAIN_VALIDATE_PLANS=1 in the environment requests."""
    return os.environ.get(ENVIRONMENT_VARIABLE) == "1"


def validate(plan: ExecutionPlan) -> None:
    """Run a plan symbolically: forward, the loss, backward.

    Raises:
        InvalidPlanError: a read does not find the value that it needs, or an action is missing, repeated or too early. The
            message names the step and the value.
    """
    facts, memory = PlanFacts(plan), SymbolicMemory()
    _Forward(facts, memory).run()
    _run_loss(facts, memory)
    if plan.training:
        _Backward(facts, memory).run()
    elif plan.backward:
        raise InvalidPlanError(f"A plan for evaluation has {len(plan.backward)} actions of a backward pass; it must have none.")


def _run_loss(facts: PlanFacts, memory: SymbolicMemory) -> None:
    """Read the logits, and write their gradient in training."""
    plan = facts.plan
    facts.check_region(plan.logits, plan.output, "logits")
    memory.read(plan.logits, activation(plan.output), "The loss", facts.name(plan.output))
    if not plan.training:
        return
    if plan.logits_grad is None or plan.logits_grad.overlaps(plan.logits):
        raise InvalidPlanError(f"The gradient of the logits, {facts.name(plan.output)}, has no separate place in training.")
    facts.check_region(plan.logits_grad, plan.output, "the logits' gradient")
    memory.write(plan.logits_grad, gradient(facts.grad_owner(plan.output), frozenset({LOSS})), "the loss")


class _Pass:
    """Base of both passes. `done` counts the runs of each action in this pass."""

    def __init__(self, facts: PlanFacts, memory: SymbolicMemory) -> None:
        self.facts, self.plan, self.memory = facts, facts.plan, memory
        self.done: Counter[tuple[Action, int]] = Counter()

    def run_actions(
        self, actions: Sequence[tuple[Action, int]], methods: Mapping[Action, Callable[[Action, int], None]], name: str
    ) -> None:
        """Run each action by its method, and count the run."""
        for action, k in actions:
            if action not in methods:
                raise self.facts.error(action, k, f"cannot happen in {name}")
            methods[action](action, k)
            self.done[action, k] += 1

    def read_inputs(self, action: Action, k: int, needed: Sequence[bool]) -> list[Region]:
        """Read the inputs that are marked in `needed`, and return their regions."""
        step, regions = self.plan.steps[k], self.plan.memory[k].inputs
        wanted = [i for i, needs in enumerate(needed) if needs]
        for i in wanted:
            tensor = step.inputs[i]
            self.memory.read(regions[i], activation(tensor), self.facts.actor(action, k), self.facts.name(tensor))
        return [regions[i] for i in wanted]

    def scribble(self, k: int) -> None:
        """Overwrite the scratch memory of step k, whose content is undefined after the operator has run."""
        region = self.plan.memory[k].scratch
        if region is not None:
            self.memory.write(region, ("scratch", k), f"the scratch of {self.plan.steps[k].name}")

    def check_apart(self, action: Action, k: int, written: _Regions, others: _Regions = ()) -> None:
        """Raise an InvalidPlanError if two regions of `written` overlap, or one of them overlaps one of `others`."""
        busy = [region for region in others if region is not None]
        for region in written:
            for other in busy if region is not None else ():
                if region is not None and region.overlaps(other):
                    places = f"bytes [{region.offset}, {region.end}) and [{other.offset}, {other.end})"
                    raise self.facts.error(action, k, f"works on {places}, which overlap")
            if region is not None:
                busy.append(region)

    def check_in_place(self, action: Action, k: int, written: Region, read: Region, *, allowed: bool) -> None:
        """Raise an InvalidPlanError if the step overwrites its input and may not (`allowed`), or overwrites only a part of it."""
        in_place = allowed and self.plan.steps[k].in_place and written == read
        if written.overlaps(read) and not in_place:
            raise self.facts.error(
                action, k, f"writes bytes [{written.offset}, {written.end}) over its input, but it cannot work in place"
            )


class _Forward(_Pass):
    """Forward pass: the input holds the images, and every step runs once."""

    def run(self) -> None:
        self.facts.check_region(self.plan.x, 0, "the images")
        self.memory.write(self.plan.x, activation(0), "the caller (images)")
        self.run_actions(self.plan.forward, {Action.FORWARD: self._compute}, "forward")
        for k in range(len(self.plan.steps)):
            if self.done[Action.FORWARD, k] != 1:
                raise self.facts.error(Action.FORWARD, k, f"happens {self.done[Action.FORWARD, k]} times instead of once")

    def _compute(self, action: Action, k: int) -> None:
        """Read all inputs and write the output. The step's saved and scratch memory must not overlap them."""
        step, memory = self.plan.steps[k], self.plan.memory[k]
        self.facts.check_places(k)
        self.read_inputs(action, k, [True] * len(step.inputs))
        if step.is_view:
            if memory.output != memory.inputs[0]:
                raise self.facts.error(action, k, "is that of a view, but its output and its input lie at different places")
            self.memory.add_name(memory.output, activation(step.output))
            return
        self.check_in_place(action, k, memory.output, memory.inputs[0], allowed=step.inputs.count(step.inputs[0]) == 1)
        self.check_apart(action, k, [memory.output], memory.inputs[1:])
        self.check_apart(action, k, [memory.saved, memory.scratch], [*memory.inputs, memory.output])
        self.scribble(k)
        if memory.saved is not None:
            self.memory.write(memory.saved, ("saved", k), self.facts.actor(action, k))
        self.memory.write(memory.output, activation(step.output), self.facts.actor(action, k))


class _Backward(_Pass):
    """Backward pass: every gradient is the sum of all its terms."""

    def run(self) -> None:
        for k in self.facts.silent_views.values():
            if self.plan.memory[k].input_grads[0] != self.plan.memory[k].output_grad:
                raise self.facts.error(Action.INPUT, k, "is missing, but input and output gradient lie at different places")
        methods = {
            Action.PARAMETERS: self._parameters,
            Action.INPUT: self._input,
            Action.RECOMPUTE: self._recompute,
            Action.COPY: self._recompute,
            Action.BEGIN: self._begin,
            Action.FREE: self._free,
        }
        self.run_actions(self.plan.backward, methods, "backward")
        self._check_all_done()
        if self.plan.needs_grad[0]:
            if self.plan.x_grad is None:
                raise InvalidPlanError("The gradient of the images is needed, but the plan has no place for it.")
            gradient_of_images = self.facts.complete_gradient(0)
            self.memory.read(self.plan.x_grad, gradient_of_images, "The caller after backward", "the gradient of the images")

    def _recompute(self, action: Action, k: int) -> None:
        """Read the inputs and the saved memory, and write the output again."""
        step, memory = self.plan.steps[k], self.plan.memory[k]
        if step.node is not None if action is Action.COPY else not step.recomputes_output:
            raise self.facts.error(action, k, "is planned, but its operator cannot recompute its output")
        read = self.read_inputs(action, k, [True] * len(step.inputs)) + self._read_saved(action, k)
        self.check_apart(action, k, [memory.output, memory.scratch], read)
        self.scribble(k)
        self.memory.write(memory.output, activation(step.output), self.facts.actor(action, k))
        for view in self.facts.views_of(step.output):
            self.memory.add_name(memory.output, activation(view))

    def _begin(self, action: Action, k: int) -> None:
        self._read_output_grad(action, k)

    def _parameters(self, action: Action, k: int) -> None:
        step = self.plan.steps[k]
        if not step.has_parameters:
            raise self.facts.error(action, k, "are planned, but it has no parameters")
        if step.input_first and self.facts.passes_back(k) and not self.done[Action.INPUT, k]:
            raise self.facts.error(action, k, "come before the gradient of its input, which must be sent first")
        self._compute(action, k, writes=step.joint_backward)

    def _input(self, action: Action, k: int) -> None:
        step, computed = self.plan.steps[k], self.done[Action.PARAMETERS, k] > 0
        # The input's half may use results of the parameters' half (as in batch norm), unless its node sets `input_first`.
        if step.has_parameters and not step.input_first and not computed:
            raise self.facts.error(action, k, "comes before the gradients of its parameters")
        if not (step.joint_backward and computed):
            self._compute(action, k, writes=True)
        for i, target, partial in self.plan.memory[k].sums:
            value = _partial(k, i)
            self.memory.read(
                partial, value, self.facts.actor(action, k), f"its part of the gradient of {self.facts.name(step.inputs[i])}"
            )
            self._add(action, k, i, target)

    def _compute(self, action: Action, k: int, *, writes: bool) -> None:
        """Run one half of a step's backward. The first half may change the output's gradient, for example by a ReLU's mask."""
        step, memory, actor = self.plan.steps[k], self.plan.memory[k], self.facts.actor(action, k)
        read = self.read_inputs(action, k, step.operator.needs_inputs) + self._read_saved(action, k)
        if step.operator.needs_output and not (self._begun(k) and step.reads_output_once):
            self.memory.read(memory.output, activation(step.output), actor, self.facts.name(step.output))
            read.append(memory.output)
        dy = self._read_output_grad(action, k)
        self.check_apart(action, k, [dy, memory.scratch], read)
        self.scribble(k)
        self.memory.write(dy, _in_use(k), actor)
        if not writes:
            return
        first, *others = memory.input_grads
        if first is not None:
            self.check_in_place(action, k, first, dy, allowed=not memory.accumulate[0])
        self.check_apart(action, k, others, [dy])
        # A tensor that is read twice has one gradient, to which both readers add, so its place counts once.
        places = {*zip(step.inputs, memory.input_grads, strict=True), *((step.inputs[i], target) for i, target, _ in memory.sums)}
        self.check_apart(action, k, [region for _, region in sorted(places, key=str)], [*read, memory.scratch])
        for i, target in enumerate(memory.input_grads):
            self._write_input_grad(action, k, i, target)

    def _write_input_grad(self, action: Action, k: int, i: int, target: Region | None) -> None:
        step, memory = self.plan.steps[k], self.plan.memory[k]
        tensor = step.inputs[i]
        if (target is None) is self.plan.needs_grad[tensor]:
            verb = "has no place" if target is None else "has a place, but nothing reads it,"
            raise self.facts.error(action, k, f"{verb} where {self.facts.name(tensor)} is read")
        if target is None:
            return
        if any(i == apart for apart, _, _ in memory.sums):
            self.memory.write(target, _partial(k, i), self.facts.actor(action, k))
        elif not memory.accumulate[i]:
            value = gradient(self.facts.grad_owner(tensor), frozenset({(k, i)}))
            self.memory.write(target, value, self.facts.actor(action, k))
        elif step.accumulates:
            self._add(action, k, i, target)
        else:
            raise self.facts.error(action, k, "is added to other gradients, but its operator cannot accumulate")

    def _add(self, action: Action, k: int, i: int, target: Region) -> None:
        """Add a term to a gradient. The gradient must exist and must not contain this term."""
        tensor = self.plan.steps[k].inputs[i]
        owner = self.facts.grad_owner(tensor)
        contributions = self.memory.contributions(target, owner)
        if target.size_bytes and (contributions is None or (k, i) in contributions):
            fault = "which has not been written" if contributions is None else "which already contains this term"
            raise self.facts.error(action, k, f"adds a term to the gradient of {self.facts.name(tensor)}, {fault}")
        self.memory.write(target, gradient(owner, (contributions or frozenset()) | {(k, i)}), self.facts.actor(action, k))

    def _free(self, action: Action, k: int) -> None:
        """Check that no later action reads the parameters of step k."""
        if not self.done[Action.PARAMETERS, k] or (self.facts.passes_back(k) and not self.done[Action.INPUT, k]):
            raise self.facts.error(action, k, f"comes before {self.plan.steps[k].name} has read them for the last time")

    def _begun(self, k: int) -> bool:
        return bool(self.done[Action.PARAMETERS, k] or self.done[Action.INPUT, k])

    def _read_saved(self, action: Action, k: int) -> list[Region]:
        region = self.plan.memory[k].saved
        if region is None:
            return []
        self.memory.read(region, ("saved", k), self.facts.actor(action, k), "what it saved in forward")
        return [region]

    def _read_output_grad(self, action: Action, k: int) -> Region:
        """Read the complete gradient, or the one that the step's first half has changed, and return its region."""
        tensor, region = self.plan.steps[k].output, self.plan.memory[k].output_grad
        if region is None:
            raise self.facts.error(action, k, f"needs the gradient of {self.facts.name(tensor)}, which has no place")
        value = _in_use(k) if self._begun(k) else self.facts.complete_gradient(tensor)
        self.memory.read(region, value, self.facts.actor(action, k), f"the whole gradient of {self.facts.name(tensor)}")
        return region

    def _check_all_done(self) -> None:
        for k, step in enumerate(self.plan.steps):
            expected = {
                Action.PARAMETERS: step.has_parameters,
                Action.INPUT: self.facts.passes_back(k),
                Action.FREE: step.has_parameters,
            }
            for action, wanted in expected.items():
                if self.done[action, k] != wanted:
                    raise self.facts.error(
                        action, k, f"must happen {int(wanted)} times in backward, not {self.done[action, k]} times"
                    )


def _in_use(k: int) -> Value:
    """Return the name of the gradient of step k's output after the step has begun to use it."""
    return ("gradient in use", k)


def _partial(k: int, i: int) -> Value:
    """Return the name of the term that step k adds to the gradient of its i-th input."""
    return ("partial", k, i)
