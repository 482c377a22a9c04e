"""Build the tasks of one rank's step, in the order of its program and of the training step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from hpctrain.averaging.collective_schedule import EventKind, LocalEventKey
from hpctrain.backend.operators import SufficientFactors
from hpctrain.backend.specs import BatchNormSpec
from hpctrain.nn.compile.plan import Action, ExecutionPlan, PlannedStep
from hpctrain.parallel.moves import ReduceScatterSpec
from hpctrain.planner.costs.compute_costs import ComputeCosts
from hpctrain.planner.costs.operator_work import is_move, move_traffic, product_of, transfer_of
from hpctrain.planner.simulation.tasks import (
    BeginExchange,
    Compute,
    EndBackward,
    EndExchange,
    Exchange,
    Happens,
    Merge,
    NeedsParameters,
    StepMessage,
    Task,
)
from hpctrain.trace.tracer import HOOKS, Category

_CATEGORIES = {
    Action.FORWARD: Category.FORWARD,
    Action.PARAMETERS: Category.PARAMETERS,
    Action.INPUT: Category.INPUT,
}
# Batch norm measures, merges and normalises: about as many passes over memory before the merge as after it.
_BEFORE_MERGE = 0.5
# An addition reads two arrays and writes one; an update and the check of its result read four and write two.
_SUM_OF_UPDATE = 0.5
_COPY_OF_UPDATE = 1 / 3
_MOMENT_BYTES = 8


@dataclass(frozen=True)
class StepFacts:
    """Inputs of a rank's tasks in addition to its execution plans.

    Attributes:
        groups: key of the strategy that averages each parameter (`group_keys`).
        sizes: number of elements that the rank holds, by parameter.
        exchanging: name of the layer's weight, by parameter of a layer that exchanges inputs and errors.
        merging: number of ranks that merge batch statistics, by name of the group.
        accumulated: parameters whose gradients are added to those of earlier steps.
    """

    groups: Mapping[str, str]
    sizes: Mapping[str, int]
    exchanging: Mapping[str, str]
    merging: Mapping[str, int]
    message_bytes: int  # of the step's message
    accumulated: Collection[str] = ()


def rank_tasks(
    plans: Sequence[ExecutionPlan], facts: StepFacts, costs: ComputeCosts, additions: Sequence[int], together: int = 1
) -> tuple[Task, ...]:
    """Return all tasks of a step.

    Args:
        plans: execution plan of each micro-batch or shard, in order.
        additions: number of additions per element of gradients after each plan.
        together: number of consecutive shards whose operators run side by side in one pass.
    """
    sum_seconds = _SUM_OF_UPDATE * costs.update_seconds(sum(facts.sizes.values()))
    numbers = count()
    tasks: list[Task] = []
    passes = [tuple(pair) for pair in _passes(list(zip(plans, additions, strict=True)), together)]
    for position, of_pass in enumerate(passes):
        of_plans, last, adds = [plan for plan, _ in of_pass], position == len(passes) - 1, sum(many for _, many in of_pass)
        tasks += _PassTasks(of_plans, facts, costs, numbers, announces=last, additions=adds if last else 0).tasks()
        if adds and not last:
            tasks.append(Compute(HOOKS, Category.AVERAGING, adds * sum_seconds, polls=False))
    return (*tasks, EndBackward(), StepMessage(facts.message_bytes))


def _passes(parts: Sequence[tuple[ExecutionPlan, int]], together: int) -> Iterator[Sequence[tuple[ExecutionPlan, int]]]:
    """Yield the parts of each pass, at most `together`. Parts whose plans differ run one after another, as in a run."""
    for first in range(0, len(parts), together):
        of_pass = parts[first : first + together]
        actions = of_pass[0][0].forward, of_pass[0][0].backward
        if all((plan.forward, plan.backward) == actions for plan, _ in of_pass):
            yield of_pass
        else:
            yield from ([part] for part in of_pass)


def product_seconds(plan: ExecutionPlan, facts: StepFacts, costs: ComputeCosts, batch: int) -> dict[str, float]:
    """Return the seconds per element of each weight gradient that is computed from exchanged inputs and errors of a batch."""
    seconds = {}
    for step in plan.steps:
        names = [] if step.node is None else [name for name in step.node.parameters.values() if name in facts.exchanging]
        product = product_of(step, batch)
        if names and product is not None:
            weight = facts.exchanging[names[0]]
            seconds[weight] = costs.product_seconds(product) / max(1, facts.sizes[weight])
    return seconds


class _PassTasks:
    """Tasks of one micro-batch, or of several shards whose operators run side by side.

    Args:
        plans: plans with equal actions. The methods append tasks; their argument k is the index of a step in the plans.
        numbers: iterator over the numbers of exchanges, shared by all passes of the step.
        announces: whether gradients are final after this pass.
        additions: number of additions of each gradient before it is announced.
    """

    def __init__(
        self,
        plans: Sequence[ExecutionPlan],
        facts: StepFacts,
        costs: ComputeCosts,
        numbers: Iterator[int],
        *,
        announces: bool,
        additions: int,
    ) -> None:
        self._plans, self._plan, self._facts, self._costs = plans, plans[0], facts, costs
        self._numbers, self._announces, self._additions = numbers, announces, additions
        self._begun: dict[int, int] = {}  # numbers of exchanges in flight, by step
        self._held_seconds = 0.0  # seconds of work that traces count with the next operator
        self._tasks: list[Task] = []

    def tasks(self) -> list[Task]:
        """Return all tasks, beginning with the copy of the input."""
        input_bytes, operators = sum(plan.tensors[0].bytes for plan in self._plans), len(self._plan.steps)
        rest = self._costs.step_seconds(0, operators)
        copy = self._costs.step_seconds(input_bytes, operators) - rest
        self._tasks.append(Compute("input copy", Category.WORK, copy, polls=False))
        for _, k in self._plan.forward:
            self._forward(k)
        self._tasks.append(Compute("loss", Category.WORK, rest, polls=False))
        for action, k in self._plan.backward:
            self._backward(action, k)
        return self._tasks

    def _forward(self, k: int) -> None:
        step = self._plan.steps[k]
        names = self._parameters(step)
        if names:
            self._tasks.append(NeedsParameters(self._facts.groups[names[0]], names))
        if self._exchanges_factors(k):
            self._pack(k, EventKind.INPUTS, self._plan.tensors[step.inputs[0]].size)
        merge = self._merge(step, "batch statistics", 1)
        if is_move(step.operator):
            self._end_move(k, Action.FORWARD)
        elif merge is not None:
            seconds = self._seconds(k, Action.FORWARD)
            self._compute(step, Action.FORWARD, _BEFORE_MERGE * seconds, polls=False)
            self._tasks.append(merge)
            self._compute(step, Action.FORWARD, (1 - _BEFORE_MERGE) * seconds)
        else:
            self._compute(step, Action.FORWARD, self._seconds(k, Action.FORWARD))

    def _backward(self, action: Action, k: int) -> None:
        step = self._plan.steps[k]
        match action:
            case Action.PARAMETERS:
                self._parameter_gradients(k)
            case Action.INPUT:
                self._input_gradient(k)
            case Action.FREE:
                self._tasks += self._announced(EventKind.LAST_READ, self._parameters(step)) if self._announces else ()
            case Action.BEGIN:
                self._begin_move(k, Action.INPUT)
            case _:  # other actions end no operator
                self._held_seconds += self._seconds(k, action)

    def _parameter_gradients(self, k: int) -> None:
        step = self._plan.steps[k]
        names = self._parameters(step)
        if self._exchanges_factors(k):
            self._pack(k, EventKind.GRADIENT, self._plan.tensors[step.output].size)
            return
        self._compute(step, Action.PARAMETERS, self._seconds(k, Action.PARAMETERS))
        if not self._announces:
            return
        for name in reversed(names):
            size = self._facts.sizes[name]
            additions = self._additions + (name in self._facts.accumulated)
            if additions and size:
                seconds = additions * _SUM_OF_UPDATE * self._costs.update_seconds(size)
                self._tasks.append(Compute(HOOKS, Category.AVERAGING, seconds, polls=False))
            self._tasks += self._announced(EventKind.GRADIENT, (name,))

    def _input_gradient(self, k: int) -> None:
        step = self._plan.steps[k]
        if is_move(step.operator):
            self._end_move(k, Action.INPUT)
            return
        merge = self._merge(step, "sums of batch norm's backward", 0)
        if merge is not None:
            self._tasks.append(merge)
        self._compute(step, Action.INPUT, self._seconds(k, Action.INPUT))

    def _announced(self, kind: EventKind, names: Sequence[str]) -> list[Task]:
        """Return an event of `kind` for each of those parameters that this rank holds at least in part."""
        return [Happens(self._facts.groups[name], LocalEventKey(kind, name)) for name in names if self._facts.sizes[name]]

    # -- moves within the split group ------------------------------------------------------------------------------------------

    def _begin_move(self, k: int, action: Action) -> None:
        """Append the tasks that pack the messages of move k and post its exchange."""
        packing, _, _ = self._move_seconds(k, action)
        step = self._plan.steps[k]
        self._compute(step, action, packing, polls=False)
        number = self._begun[k] = next(self._numbers)
        self._tasks.append(BeginExchange(number, self._exchange(step, action)))

    def _end_move(self, k: int, action: Action) -> None:
        """Append local copies of move k, the wait for its exchange, and unpacking; first begin an exchange that has not begun."""
        step = self._plan.steps[k]
        if k not in self._begun:
            self._begin_move(k, action)
        _, copying, unpacking = self._move_seconds(k, action)
        self._compute(step, action, copying, polls=False)
        self._tasks.append(EndExchange(self._begun.pop(k)))
        self._compute(step, action, unpacking)

    def _move_seconds(self, k: int, action: Action) -> tuple[float, float, float]:
        memory = self._plan.memory[k]
        traffic = move_traffic(self._plan.steps[k].operator, action, accumulate=any(memory.accumulate))
        byte_seconds = self._costs.seconds(self._plan.steps[k], action, memory) / max(1, traffic.total)
        return traffic.packing * byte_seconds, traffic.copying * byte_seconds, traffic.unpacking * byte_seconds

    def _exchange(self, step: PlannedStep, action: Action) -> Exchange:
        spec, share = step.operator.spec, transfer_of(step.operator)
        item_bytes = step.operator.inputs[0].item_bytes
        sent, received = share.send_size * item_bytes, share.receive_size * item_bytes
        peers = len({piece.peer for piece in (*share.sends, *share.receives)})
        # The forward pass of a sum is the adjoint of a move from the owners to all ranks.
        if (action is Action.FORWARD) != isinstance(spec, ReduceScatterSpec):
            return Exchange(step.name, sent, received, peers)
        return Exchange(f"gradient of {step.name}", received, sent, peers)

    # -- pieces ----------------------------------------------------------------------------------------------------------------

    def _merge(self, step: PlannedStep, purpose: str, counts: int) -> Merge | None:
        """Return the merge of two values per channel and `counts` more of a synchronised batch norm; None without other ranks."""
        spec = None if step.node is None else step.operator.spec
        if not isinstance(spec, BatchNormSpec) or not spec.synchronised or self._facts.merging[spec.merge] == 1:
            return None
        return Merge(purpose, spec.merge, _MOMENT_BYTES * (2 * spec.channels + counts))

    def _exchanges_factors(self, k: int) -> bool:
        step = self._plan.steps[k]
        factors = isinstance(step.operator, SufficientFactors) and self._plan.memory[k].output_grad is not None
        return factors and any(name in self._facts.exchanging for name in self._parameters(step))

    def _pack(self, k: int, kind: EventKind, elements: int) -> None:
        """Append the task that copies `elements` inputs or errors to the send buffer, and the event of its completion."""
        weight = self._facts.exchanging[self._parameters(self._plan.steps[k])[0]]
        seconds = _COPY_OF_UPDATE * self._costs.update_seconds(elements)
        self._tasks.append(Compute(HOOKS, Category.AVERAGING, seconds, polls=False))
        self._tasks.append(Happens(self._facts.groups[weight], LocalEventKey(kind, weight)))

    def _parameters(self, step: PlannedStep) -> tuple[str, ...]:
        return () if step.node is None or step.node.frozen else tuple(step.node.parameters.values())

    def _seconds(self, k: int, action: Action) -> float:
        return sum(self._costs.seconds(plan.steps[k], action, plan.memory[k]) for plan in self._plans)

    def _compute(self, step: PlannedStep, action: Action, seconds: float, *, polls: bool = True) -> None:
        held, self._held_seconds = self._held_seconds, 0.0
        self._tasks.append(Compute(step.name, _CATEGORIES[action], held + seconds, polls))
