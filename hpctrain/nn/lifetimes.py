"""When each buffer of a plan is in use: from the order of actions to blocks with lifetimes. Pure data.

Time counts actions: those of forward, then the loss, then those of backward. So what one action makes for the next one only (a
copy in another layout on its way to a halo, say) lives no longer than these two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from hpctrain.nn.memory import Block
from hpctrain.nn.order import Action, backward_actions, forward_actions
from hpctrain.nn.plan import ExecutionPlan

#: ("activation" | "gradient", tensor that owns the storage) or ("saved" | "scratch" | "partial", step)
Key = tuple[str, int]

_COMPUTES = (Action.PARAMETERS, Action.INPUT)
_REMAKES = (Action.RECOMPUTE, Action.COPY)


class Timeline:
    """At which times the steps of a plan act.

    Attributes:
        loss, end: the times between both passes, and after all.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        forward, backward = forward_actions(plan), backward_actions(plan)
        self.loss = len(forward)
        self.end = self.loss + 1 + len(backward)
        self._forward: defaultdict[int, list[int]] = defaultdict(list)
        self._backward: defaultdict[int, list[tuple[Action, int]]] = defaultdict(list)
        for time, (_, k) in enumerate(forward):
            self._forward[k].append(time)
        for time, (action, k) in enumerate(backward, self.loss + 1):
            self._backward[k].append((action, time))

    def forward(self, k: int) -> Sequence[int]:
        """From when step k reads its inputs until it has written its output, which is the last of these."""
        return self._forward[k]

    def backward(self, k: int, actions: Sequence[Action]) -> list[int]:
        """When step k does one of these in backward."""
        return [time for action, time in self._backward[k] if action in actions]


class _Uses:
    """Sizes and times of use, by key."""

    def __init__(self) -> None:
        self.sizes: defaultdict[Key, int] = defaultdict(int)
        self.times: defaultdict[Key, list[int]] = defaultdict(list)

    def add(self, kind: str, number: int, size_bytes: int, times: Sequence[int]) -> None:
        self.sizes[kind, number] = max(self.sizes[kind, number], size_bytes)
        self.times[kind, number] += times

    def blocks(self, loss: int, remade: Collection[Key]) -> Iterator[tuple[Key, Block]]:
        """remade: keys that nobody keeps from forward to backward."""
        for key, times in self.times.items():
            if key[0] == "scratch":
                spans = [(time, time) for time in sorted(set(times))]
            elif key in remade:
                passes = ([time for time in times if (time > loss) == late] for late in (False, True))
                spans = [(min(each), max(each)) for each in passes if each]
            else:
                spans = [(min(times), max(times))]
            yield key, Block(self.sizes[key], *spans[0], tuple(spans[1:]))


def lifetimes(plan: ExecutionPlan) -> Mapping[Key, Block]:
    """All blocks of a program. What is made again for backward lives once in each pass; scratch lives only while it is used."""
    line, uses = Timeline(plan), _Uses()
    _add_activations(plan, line, uses)
    _add_gradients(plan, line, uses)
    _add_own(plan, line, uses)
    remade = {("activation", plan.storage[step.output]) for k, step in enumerate(plan.steps) if line.backward(k, _REMAKES)}
    return dict(uses.blocks(line.loss, remade))


def _add_activations(plan: ExecutionPlan, line: Timeline, uses: _Uses) -> None:
    def used(tensor: int, times: Sequence[int]) -> None:
        uses.add("activation", plan.storage[tensor], plan.tensors[tensor].bytes, times)

    used(0, [0])
    used(plan.output, [line.loss])
    for k, step in enumerate(plan.steps):
        computes, remakes = line.backward(k, _COMPUTES), line.backward(k, _REMAKES)
        reads_output = () if not step.operator.needs_output else computes[:1] if step.operator.reads_output_once else computes
        used(step.output, [line.forward(k)[-1], *remakes, *reads_output])
        for i, tensor in enumerate(step.inputs):
            used(tensor, [*line.forward(k), *(computes if step.operator.needs_inputs[i] else ())])
        used(step.inputs[0], remakes)


def _add_gradients(plan: ExecutionPlan, line: Timeline, uses: _Uses) -> None:
    def used(tensor: int, times: Sequence[int]) -> None:
        if plan.needs_grad[tensor]:
            uses.add("gradient", plan.grad_storage[tensor], plan.tensors[tensor].bytes, times)

    if not plan.training:
        return
    uses.add("gradient", plan.grad_storage[plan.output], plan.tensors[plan.output].bytes, [line.loss])  # whoever asks for it
    used(0, [line.end])  # the caller reads it after backward
    for k, step in enumerate(plan.steps):
        for tensor in step.inputs:
            used(tensor, line.backward(k, (Action.INPUT,)))
        used(step.output, line.backward(k, (Action.BEGIN, *_COMPUTES)))


def _add_own(plan: ExecutionPlan, line: Timeline, uses: _Uses) -> None:
    """What a step has to itself: saved from forward to backward, scratch while it runs, gradients to be added to others."""
    writers = first_writers(plan)
    for k, step in enumerate(plan.steps):
        operator = step.operator
        runs = [line.forward(k)[-1], *line.backward(k, (*_COMPUTES, *_REMAKES))]
        if operator.saved_bytes:
            uses.add("saved", k, operator.saved_bytes, runs)
        if operator.scratch_bytes:
            uses.add("scratch", k, operator.scratch_bytes, runs)
        added = [tensor for i, tensor in enumerate(step.inputs) if plan.needs_grad[tensor] and writers[tensor] != (k, i)]
        if added and not operator.can_accumulate:
            uses.add("partial", k, sum(plan.tensors[tensor].bytes for tensor in added), line.backward(k, (Action.INPUT,)))


def first_writers(plan: ExecutionPlan) -> dict[int, tuple[int, int]]:
    """Who writes a tensor's gradient first in backward: (step, input position); (-1, -1) is the loss."""
    writers = {plan.output: (-1, -1)}
    for k in reversed(range(len(plan.steps))):
        for i, tensor in enumerate(plan.steps[k].inputs):
            writers.setdefault(tensor, (k, i))
    return writers
