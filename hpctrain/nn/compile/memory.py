"""Fourth pass: when each value is in use, from the order of actions. Pure data.

Time counts actions: those of forward, then the loss, then those of backward. So what one action makes for the next one only (a
copy in another layout on its way to a halo, say) lives no longer than these two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.nn.compile.plan import Action, Actions, Key
from hpctrain.nn.compile.steps import Steps

_COMPUTES = (Action.PARAMETERS, Action.INPUT)
_REMAKES = (Action.RECOMPUTE, Action.COPY)

#: (step, position of the input); the loss is (-1, -1).
Reader = tuple[int, int]
LOSS: Reader = (-1, -1)


class Timeline:
    """At which times the steps of a program act.

    Attributes:
        loss, end: the times between both passes, and after all.
        first_writers: who writes a tensor's gradient first; all others add to it.
    """

    def __init__(self, steps: Steps, forward: Actions, backward: Actions) -> None:
        self.loss = len(forward)
        self.end = self.loss + 1 + len(backward)
        self._forward: defaultdict[int, list[int]] = defaultdict(list)
        self._backward: defaultdict[int, list[tuple[Action, int]]] = defaultdict(list)
        for time, (_, k) in enumerate(forward):
            self._forward[k].append(time)
        for time, (action, k) in enumerate(backward, self.loss + 1):
            self._backward[k].append((action, time))
        self.first_writers: dict[int, Reader] = {steps.output: LOSS}
        for k in (k for action, k in backward if action is Action.INPUT):
            for i, tensor in enumerate(steps.steps[k].inputs):
                self.first_writers.setdefault(tensor, (k, i))

    def forward(self, k: int) -> Sequence[int]:
        """From when step k reads its inputs until it has written its output, which is the last of these."""
        return self._forward[k]

    def backward(self, k: int, actions: Sequence[Action]) -> list[int]:
        """When step k does one of these in backward."""
        return [time for action, time in self._backward[k] if action in actions]


@dataclass(frozen=True)
class Use:
    """How large a value is, and when it is written and read. What adds to it reads it: what was there must still be there."""

    size_bytes: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]

    @property
    def last(self) -> int:
        """When it is used for the last time."""
        return max(self.writes + self.reads)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """From each write to the last read before the next one: what is made again in backward is free in between."""
        starts = sorted(set(self.writes))
        ends = [*starts[1:], self.last + 1]
        return tuple(
            (start, max(time for time in (start, *self.reads) if time < end)) for start, end in zip(starts, ends, strict=True)
        )


class _Collector:
    """Uses by key, in the order in which they are first named."""

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self._writes: defaultdict[Key, list[int]] = defaultdict(list)
        self._reads: defaultdict[Key, list[int]] = defaultdict(list)

    def add(self, key: Key, size_bytes: int, *, writes: Sequence[int] = (), reads: Sequence[int] = ()) -> None:
        self._sizes[key] = max(self._sizes.get(key, 0), size_bytes)
        self._writes[key] += writes
        self._reads[key] += reads

    def uses(self) -> dict[Key, Use]:
        return {key: self._use(key) for key in self._sizes if self._writes[key] or self._reads[key]}

    def _use(self, key: Key) -> Use:
        # The gradient of what nobody reads has no writer, but a place.
        return Use(self._sizes[key], tuple(self._writes[key] or [min(self._reads[key])]), tuple(self._reads[key]))


def find_uses(steps: Steps, line: Timeline) -> Mapping[Key, Use]:
    """All values of a program. A view's output is its input's value under another name."""
    collector = _Collector()
    _add_activations(steps, line, collector)
    if steps.training:
        _add_gradients(steps, line, collector)
    _add_buffers_of_steps(steps, line, collector)
    return collector.uses()


def _add_activations(steps: Steps, line: Timeline, collector: _Collector) -> None:
    def use(tensor: int, *, writes: Sequence[int] = (), reads: Sequence[int] = ()) -> None:
        collector.add(("activation", steps.value(tensor)), steps.tensors[tensor].bytes, writes=writes, reads=reads)

    use(0, writes=[0])
    use(steps.output, reads=[line.loss])
    for k, step in enumerate(steps.steps):
        operator, computes, remakes = step.operator, line.backward(k, _COMPUTES), line.backward(k, _REMAKES)
        reads_output = () if not operator.needs_output else computes[:1] if step.reads_output_once else computes
        writes = () if step.is_view else (line.forward(k)[-1], *remakes)
        use(step.output, writes=writes, reads=reads_output)
        for i, tensor in enumerate(step.inputs):
            use(tensor, reads=[*line.forward(k), *(computes if operator.needs_inputs[i] else ())])
        use(step.inputs[0], reads=remakes)


def _add_gradients(steps: Steps, line: Timeline, collector: _Collector) -> None:
    def use(tensor: int, *, writes: Sequence[int] = (), reads: Sequence[int] = ()) -> None:
        if steps.needs_grad[tensor]:
            collector.add(("gradient", steps.grad_value(tensor)), steps.tensors[tensor].bytes, writes=writes, reads=reads)

    # The loss writes it in any case, also where no parameter does.
    collector.add(("gradient", steps.grad_value(steps.output)), steps.tensors[steps.output].bytes, writes=[line.loss])
    use(0, reads=[line.end])  # the caller reads it after backward
    for k, step in enumerate(steps.steps):
        times = input_grad_times(steps, line, k)
        for i, tensor in enumerate(step.inputs):
            first = line.first_writers.get(tensor) == (k, i)
            use(tensor, writes=times[:1] if first else (), reads=times)
        use(step.output, reads=line.backward(k, (Action.BEGIN, *_COMPUTES)))


def _add_buffers_of_steps(steps: Steps, line: Timeline, collector: _Collector) -> None:
    """Memory of a single step: saved from forward to backward, scratch while it runs, gradients to be added to others."""
    for k, step in enumerate(steps.steps):
        operator = step.operator
        runs = [line.forward(k)[-1], *line.backward(k, (*_COMPUTES, *_REMAKES))]
        if operator.saved_bytes:
            collector.add(("saved", k), operator.saved_bytes, writes=runs[:1], reads=runs)
        if operator.scratch_bytes:  # each use begins with nothing
            collector.add(("scratch", k), operator.scratch_bytes, writes=runs)
        added = partial_gradients(steps, line, k)
        if added:
            size_bytes = sum(steps.tensors[step.inputs[i]].bytes for i in added)
            times = input_grad_times(steps, line, k)
            collector.add(("partial", k), size_bytes, writes=times[:1], reads=times)


def input_grad_times(steps: Steps, line: Timeline, k: int) -> list[int]:
    """When the gradients of step k's inputs are written, by the operator or by the program that adds them."""
    times = line.backward(k, (Action.INPUT,))
    return line.backward(k, _COMPUTES) if times and steps.steps[k].joint_backward else times


def adds(steps: Steps, line: Timeline, k: int) -> tuple[bool, ...]:
    """By input of step k: its gradient is added to what other steps wrote."""
    acts = bool(line.backward(k, (Action.INPUT,)))
    inputs = steps.steps[k].inputs
    return tuple(acts and steps.needs_grad[tensor] and line.first_writers[tensor] != (k, i) for i, tensor in enumerate(inputs))


def partial_gradients(steps: Steps, line: Timeline, k: int) -> tuple[int, ...]:
    """Inputs of step k whose gradient the program adds, because the operator cannot."""
    return () if steps.steps[k].accumulates else tuple(i for i, add in enumerate(adds(steps, line, k)) if add)
