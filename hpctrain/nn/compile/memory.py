"""Last four passes: live ranges of values, sharing of storage, and the place of every buffer in the arena.

4. Liveness: the times at which each value is in use, from the order of actions. Time counts actions: those of forward, then the
   loss, then those of backward. A value that one action writes for the next action only, such as a copy in another layout on its
   way to a halo exchange, is therefore live for two time slots.
5. Sharing: the values that use the same storage one after another, decided from live ranges alone. An operator that works in
   place may write its output over its first input if no later action reads that input. It may write the gradient of that input
   over the gradient of the output if no later action reads the output's gradient.
6. Packing: the offsets of all storages in one arena, from their sizes and live ranges. Pure arithmetic, without arrays.
7. Binding: the place of every buffer of every step, from the offsets of the storages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hpctrain.backend.operators import ALIGNMENT_BYTES, aligned
from hpctrain.backend.specs import TensorSpec
from hpctrain.nn.compile.plan import Action, Actions, Block, Key, Region, StepMemory
from hpctrain.nn.compile.steps import Steps

# -- liveness ------------------------------------------------------------------------------------------------------------------

_COMPUTES = (Action.PARAMETERS, Action.INPUT)
_REMAKES = (Action.RECOMPUTE, Action.COPY)

#: (step, position of the input) of a reader; the loss is (-1, -1)
Reader = tuple[int, int]
LOSS: Reader = (-1, -1)


class Timeline:
    """The times at which the steps of a program act.

    Attributes:
        loss: time of the loss, between both passes.
        end: time after the last action.
        first_writers: reader that writes the gradient of each tensor first; all other readers add to it.
    """

    def __init__(self, steps: Steps, forward: Actions, backward: Actions) -> None:
        self.loss = len(forward)
        self.end = self.loss + 1 + len(backward)
        self._forward = {k: time for time, (_, k) in enumerate(forward)}
        self._backward: defaultdict[int, list[tuple[Action, int]]] = defaultdict(list)
        for time, (action, k) in enumerate(backward, self.loss + 1):
            self._backward[k].append((action, time))
        self.first_writers: dict[int, Reader] = {steps.output: LOSS}
        for k in (k for action, k in backward if action is Action.INPUT):
            for i, tensor in enumerate(steps.steps[k].inputs):
                self.first_writers.setdefault(tensor, (k, i))

    def forward(self, k: int) -> int:
        """Return the time at which step k runs in forward."""
        return self._forward[k]

    def backward(self, k: int, actions: Sequence[Action]) -> list[int]:
        """Return the times at which step k runs one of these actions in backward."""
        return [time for action, time in self._backward[k] if action in actions]


@dataclass(frozen=True)
class Use:
    """Size of a value, and the times of its writes and reads.

    Adding to a value counts as a read, because the value must still exist.
    """

    size_bytes: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]

    @property
    def last(self) -> int:
        """Time of the last use."""
        return max(self.writes + self.reads)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Intervals in which the value is live, each from a write to the last read before the next write.

        A value that is recomputed in backward needs no memory between the intervals.
        """
        starts = sorted(set(self.writes))
        ends = [*starts[1:], self.last + 1]
        return tuple(
            (start, max(time for time in (start, *self.reads) if time < end)) for start, end in zip(starts, ends, strict=True)
        )


class _Collector:
    """Collection of uses by key, in the order of the first use."""

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self._writes: defaultdict[Key, list[int]] = defaultdict(list)
        self._reads: defaultdict[Key, list[int]] = defaultdict(list)

    def add(self, key: Key, size_bytes: int, *, writes: Sequence[int] = (), reads: Sequence[int] = ()) -> None:
        self._sizes[key] = max(self._sizes.get(key, 0), size_bytes)
        self._writes[key] += writes
        self._reads[key] += reads

    def uses(self) -> dict[Key, Use]:
        # The gradient of a tensor without readers has no writer, but its producer is still bound to a place for it.
        return {
            key: Use(size_bytes, tuple(self._writes[key] or [min(self._reads[key])]), tuple(self._reads[key]))
            for key, size_bytes in self._sizes.items()
            if self._writes[key] or self._reads[key]
        }


def find_uses(steps: Steps, line: Timeline) -> Mapping[Key, Use]:
    """Return the uses of all values of a program. A view's output is its input's value under another name."""
    collector = _Collector()
    _add_activations(steps, line, collector)
    if steps.training:
        _add_gradients(steps, line, collector)
    _add_buffers_of_steps(steps, line, collector)
    return collector.uses()


def _add_activations(steps: Steps, line: Timeline, collector: _Collector) -> None:
    def use(tensor: int, *, writes: Sequence[int] = (), reads: Sequence[int] = ()) -> None:
        collector.add(("activation", steps.value(tensor)), steps.tensors[tensor].bytes, writes=writes, reads=reads)

    use(0, writes=[0])  # the caller fills the input before the first action
    use(steps.output, reads=[line.loss])
    for k, step in enumerate(steps.steps):
        operator, computes, remakes = step.operator, line.backward(k, _COMPUTES), line.backward(k, _REMAKES)
        # Backward reads the output if the operator declares it; some operators read it in their first half only.
        reads_output = () if not operator.needs_output else computes[:1] if step.reads_output_once else computes
        # A view writes nothing. All other steps write in forward, and again when they are recomputed.
        writes = () if step.is_view else (line.forward(k), *remakes)
        use(step.output, writes=writes, reads=reads_output)
        for i, tensor in enumerate(step.inputs):
            use(tensor, reads=[line.forward(k), *(computes if operator.needs_inputs[i] else ())])
        use(step.inputs[0], reads=remakes)  # a step that is recomputed has one input


def _add_gradients(steps: Steps, line: Timeline, collector: _Collector) -> None:
    def use(tensor: int, *, writes: Sequence[int] = (), reads: Sequence[int] = ()) -> None:
        if steps.needs_grad[tensor]:
            collector.add(("gradient", steps.grad_value(tensor)), steps.tensors[tensor].bytes, writes=writes, reads=reads)

    # The loss writes the logits' gradient even if no parameter needs it.
    collector.add(("gradient", steps.grad_value(steps.output)), steps.tensors[steps.output].bytes, writes=[line.loss])
    use(0, reads=[line.end])  # the caller reads it after backward
    for k, step in enumerate(steps.steps):
        times = input_grad_times(steps, line, k)
        for i, tensor in enumerate(step.inputs):
            first = line.first_writers.get(tensor) == (k, i)
            # All writers except the first add, so the sum must survive until then: each of their writes is also a read.
            use(tensor, writes=times[:1] if first else (), reads=times)
        # A step that begins early in backward sends the output's gradient from its memory, so it reads it from BEGIN on.
        use(step.output, reads=line.backward(k, (Action.BEGIN, *_COMPUTES)))


def _add_buffers_of_steps(steps: Steps, line: Timeline, collector: _Collector) -> None:
    """Add each step's separate memory: saved memory, scratch of one action, and partial gradients."""
    for k, step in enumerate(steps.steps):
        operator = step.operator
        runs = [line.forward(k), *line.backward(k, (*_COMPUTES, *_REMAKES))]
        if operator.saved_bytes:
            collector.add(("saved", k), operator.saved_bytes, writes=runs[:1], reads=runs)
        # Scratch has undefined content at the start of each use, so each use is a write and is live for one action.
        if operator.scratch_bytes:
            collector.add(("scratch", k), operator.scratch_bytes, writes=runs)
        added = partial_gradients(steps, line, k)
        if added:
            size_bytes = sum(steps.tensors[step.inputs[i]].bytes for i in added)
            times = input_grad_times(steps, line, k)
            collector.add(("partial", k), size_bytes, writes=times[:1], reads=times)


def input_grad_times(steps: Steps, line: Timeline, k: int) -> list[int]:
    """Return the times at which the operator or the program writes the gradients of step k's inputs.

    An operator with a joint backward writes them in its first half. The program adds partial gradients in the second half.
    """
    times = line.backward(k, (Action.INPUT,))
    return line.backward(k, _COMPUTES) if times and steps.steps[k].joint_backward else times


def adds(steps: Steps, line: Timeline, k: int) -> tuple[bool, ...]:
    """Return, for each input of step k, whether its gradient is added to gradients from other steps."""
    acts = bool(line.backward(k, (Action.INPUT,)))
    inputs = steps.steps[k].inputs
    return tuple(acts and steps.needs_grad[tensor] and line.first_writers[tensor] != (k, i) for i, tensor in enumerate(inputs))


def partial_gradients(steps: Steps, line: Timeline, k: int) -> tuple[int, ...]:
    """Return the inputs of step k whose gradients the program adds, because the operator cannot accumulate."""
    return () if steps.steps[k].accumulates else tuple(i for i, add in enumerate(adds(steps, line, k)) if add)


# -- sharing -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharing:
    """Owner of the storage of each tensor: the tensor itself, the tensor that it is a view of, or one that it overwrites.

    Attributes:
        activations: owner of each tensor's storage.
        gradients: owner of the storage of each tensor's gradient.
    """

    activations: tuple[int, ...]
    gradients: tuple[int, ...]

    def owner(self, key: Key) -> Key:
        """Return the key of the storage that holds a value."""
        kind, number = key
        owners = {"activation": self.activations, "gradient": self.gradients}.get(kind)
        return key if owners is None else (kind, owners[number])


def share(steps: Steps, line: Timeline, uses: Mapping[Key, Use]) -> Sharing:
    """Return which tensors share storage, decided from the live ranges."""
    return Sharing(_share_activations(steps, line, uses), _share_gradients(steps, line, uses))


def _share_activations(steps: Steps, line: Timeline, uses: Mapping[Key, Use]) -> tuple[int, ...]:
    storage = [steps.value(tensor) for tensor in range(len(steps.tensors))]
    last = {number: use.last for (kind, number), use in uses.items() if kind == "activation"}
    for k, step in enumerate(steps.steps):
        source, target = step.inputs[0], step.output
        owner = storage[source]
        if not step.in_place or steps.tensors[source] != steps.tensors[target]:
            continue
        # If both operands are one tensor, the second would be read after the write. The network's input is the caller's.
        if step.inputs.count(source) > 1 or owner == 0:
            continue
        # A later reader of the storage (in forward, in backward or in a recomputation) would read the output instead.
        if last[owner] > line.forward(k):
            continue
        storage = [owner if root == target else root for root in storage]
        last[owner] = max(last[owner], last[target])
    return tuple(storage)


def _share_gradients(steps: Steps, line: Timeline, uses: Mapping[Key, Use]) -> tuple[int, ...]:
    storage = [steps.grad_value(tensor) for tensor in range(len(steps.tensors))]
    readers = Counter(tensor for step in steps.steps for tensor in step.inputs)
    for k in reversed(range(len(steps.steps))):
        step, source = steps.steps[k], steps.steps[k].inputs[0]
        written = line.backward(k, (Action.INPUT,))
        if not written or not step.in_place or not steps.needs_grad[source]:
            continue
        # With other readers the input's gradient is a sum; its other terms must not be added to the output's gradient.
        if readers[source] > 1 or source == steps.output or steps.tensors[source] != steps.tensors[step.output]:
            continue
        # If the input's gradient is computed first, the parameters' gradient reads the output's gradient afterwards.
        if uses["gradient", steps.grad_value(step.output)].last > written[-1]:
            continue
        owner = storage[step.output]
        storage = [owner if root == storage[source] else root for root in storage]
    return tuple(storage)


def lifetimes(uses: Mapping[Key, Use], sharing: Sharing) -> Mapping[Key, Block]:
    """Return one block per storage, as large as its largest value and live while any of its values is live."""
    members: dict[Key, list[Use]] = {}
    for key, use in uses.items():
        members.setdefault(sharing.owner(key), []).append(use)
    return {owner: _block(values) for owner, values in members.items()}


def _block(values: list[Use]) -> Block:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(span for use in values for span in use.spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return Block(max(use.size_bytes for use in values), *merged[0], tuple(merged[1:]))


# -- packing -------------------------------------------------------------------------------------------------------------------


def pack(blocks: Sequence[Block], alignment_bytes: int = ALIGNMENT_BYTES) -> tuple[list[int], int]:
    """Return the byte offsets of the blocks and the size of the arena. Blocks that are live at the same time never overlap.

    Each block is placed in the smallest gap that holds it (Pisarchyk and Lee 2020, "greedy by size for offset calculation"). Of
    three orders of the blocks (by size, by size times lifetime, by lifetime), the one with the smallest arena is used. Offsets
    are multiples of `alignment_bytes`. The result is deterministic, so it is the same on every rank.
    """
    orders: tuple[Callable[[Block], tuple[int, ...]], ...] = (
        lambda block: (-block.size_bytes,),
        lambda block: (-block.size_bytes * block.slots,),
        lambda block: (-block.slots, -block.size_bytes),
    )
    bound = lower_bound(blocks, alignment_bytes)
    sizes = [aligned(block.size_bytes, alignment_bytes) for block in blocks]
    meets = meetings(blocks)
    best: tuple[list[int], int] | None = None
    for order in orders:
        packed = _pack(sorted(range(len(blocks)), key=lambda i: (*order(blocks[i]), i)), sizes, meets)
        if best is None or packed[1] < best[1]:
            best = packed
        if best[1] == bound:  # no other order can have a smaller arena
            break
    assert best is not None
    return best


def meetings(blocks: Sequence[Block]) -> np.ndarray:
    """Return the matrix of pairs of blocks that are live at the same time, bool (blocks, blocks)."""
    if not blocks:
        return np.zeros((0, 0), bool)
    spans = np.array([span for block in blocks for span in block.spans])
    first, last = spans[:, 0], spans[:, 1]
    both = (first[:, None] <= last) & (first <= last[:, None])
    counts = [len(block.spans) for block in blocks]
    starts = np.cumsum([0, *counts[:-1]])
    meets: np.ndarray = both[np.ix_(starts, starts)]
    for k in np.flatnonzero(np.array(counts) > 1):  # few blocks live in several intervals
        row = np.logical_or.reduceat(both[starts[k] : starts[k] + counts[k]].any(axis=0), starts)
        meets[k] |= row
        meets[:, k] |= row
    return meets


def _pack(order: Sequence[int], sizes: Sequence[int], meets: np.ndarray) -> tuple[list[int], int]:
    """Return the offsets and the arena's size for one order of the blocks.

    Args:
        order: indices of the blocks in the order of placement.
        sizes: aligned size of each block.
        meets: result of `meetings`.
    """
    offsets, ends = np.zeros((2, len(sizes)), np.int64)
    placed = np.zeros(len(sizes), np.intp)  # placed blocks, sorted by offset, then by order of placement
    arena = 0
    for count, index in enumerate(order):
        among = placed[:count]
        neighbours = among[meets[index][among]]
        offset = _best_gap(offsets[neighbours], ends[neighbours], sizes[index])
        place = int(np.searchsorted(offsets[among], offset, "right"))
        placed[place + 1 : count + 1] = placed[place:count].copy()
        placed[place] = index
        offsets[index], ends[index] = offset, offset + sizes[index]
        arena = max(arena, offset + sizes[index])
    return offsets.tolist(), arena


def _best_gap(offsets: np.ndarray, ends: np.ndarray, size: int) -> int:
    """Return the offset of the smallest gap of at least `size` bytes.

    Of several gaps of equal size, the first one is used. If no gap is large enough, the offset is the end of all blocks.

    Args:
        offsets, ends: first byte and end of each placed block, int64 (n,), sorted by offset. The blocks may overlap.
    """
    if not len(ends):
        return 0
    reach = np.maximum.accumulate(ends)
    gaps = offsets.copy()
    gaps[1:] -= reach[:-1]
    fitting = np.flatnonzero(gaps >= size)
    if not len(fitting):
        return int(reach[-1])
    best = int(fitting[np.argmin(gaps[fitting])])
    return int(reach[best - 1]) if best else 0


def lower_bound(blocks: Sequence[Block], alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return a lower bound on the arena of any packing: the maximum number of bytes that are live in one time slot."""
    changes: defaultdict[int, int] = defaultdict(int)
    for block in blocks:
        for first, last in block.spans:
            changes[first] += aligned(block.size_bytes, alignment_bytes)
            changes[last + 1] -= aligned(block.size_bytes, alignment_bytes)
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)


# -- binding -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Places of tensors, of their gradients, and of the separate memory of steps in the arena."""

    steps: Steps
    line: Timeline
    sharing: Sharing
    offsets: Mapping[Key, int]

    def activation(self, tensor: int) -> Region:
        """Return the place of a tensor."""
        return Region(self.offsets["activation", self.sharing.activations[tensor]], self._spec(tensor).bytes)

    def gradient(self, tensor: int) -> Region | None:
        """Return the place of a tensor's gradient; None if backward does not compute it."""
        if not self.steps.needs_grad[tensor]:
            return None
        return Region(self.offsets["gradient", self.sharing.gradients[tensor]], self._spec(tensor).bytes)

    def logits_grad(self) -> Region | None:
        """Return the place that the loss writes in training, whether or not a step reads it; None in evaluation."""
        output = self.steps.output
        if not self.steps.training:
            return None
        return Region(self.offsets["gradient", self.sharing.gradients[output]], self._spec(output).bytes)

    def step(self, k: int) -> StepMemory:
        """Return the places of all buffers of step k."""
        step = self.steps.steps[k]
        operator, targets = step.operator, [self.gradient(tensor) for tensor in step.inputs]
        apart = partial_gradients(self.steps, self.line, k)
        partials, offset = dict[int, Region](), self.offsets.get(("partial", k), 0)
        for i in apart:  # partial gradients are adjacent
            partials[i] = Region(offset, self._spec(step.inputs[i]).bytes)
            offset = partials[i].end
        return StepMemory(
            inputs=tuple(self.activation(tensor) for tensor in step.inputs),
            output=self.activation(step.output),
            input_grads=tuple(partials.get(i, target) for i, target in enumerate(targets)),
            output_grad=self.gradient(step.output),
            accumulate=tuple(add and i not in apart for i, add in enumerate(adds(self.steps, self.line, k))),
            sums=tuple((i, target, partials[i]) for i, target in enumerate(targets) if target is not None and i in apart),
            saved=self._alone("saved", k, operator.saved_bytes),
            scratch=self._alone("scratch", k, operator.scratch_bytes),
            copies_gradient=step.is_view and self.steps.passes_back(k),
        )

    def _alone(self, kind: str, k: int, size_bytes: int) -> Region | None:
        return Region(self.offsets[kind, k], size_bytes) if size_bytes else None

    def _spec(self, tensor: int) -> TensorSpec:
        return self.steps.tensors[tensor]
