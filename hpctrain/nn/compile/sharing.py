"""Fifth pass: which values lie in the same storage, one after the other. Decided from live ranges alone.

An operator that works in place may write its output over its first input when it is the last one that ever reads it; and the
gradient of that input over the gradient of the output when nobody reads that later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.nn.compile.memory import Timeline, Use
from hpctrain.nn.compile.packing import Block
from hpctrain.nn.compile.plan import Action, Key
from hpctrain.nn.compile.steps import Steps


@dataclass(frozen=True)
class Sharing:
    """The tensor that owns the storage of each: itself, the tensor that it is a view of, or one that it overwrites.

    activations, gradients: by tensor.
    """

    activations: tuple[int, ...]
    gradients: tuple[int, ...]

    def owner(self, key: Key) -> Key:
        """The key of the storage in which a value lies."""
        kind, number = key
        owners = {"activation": self.activations, "gradient": self.gradients}.get(kind)
        return key if owners is None else (kind, owners[number])


def share(steps: Steps, line: Timeline, uses: Mapping[Key, Use]) -> Sharing:
    """The storage of all tensors."""
    return Sharing(_share_activations(steps, line, uses), _share_gradients(steps, line, uses))


def _share_activations(steps: Steps, line: Timeline, uses: Mapping[Key, Use]) -> tuple[int, ...]:
    storage = [steps.value(tensor) for tensor in range(len(steps.tensors))]
    last = {number: use.last for (kind, number), use in uses.items() if kind == "activation"}
    for k, step in enumerate(steps.steps):
        source, target = step.inputs[0], step.output
        owner = storage[source]
        if not step.in_place or steps.tensors[source] != steps.tensors[target]:
            continue
        # An operand that is also the second one would be read after it was overwritten. The input is the caller's.
        if step.inputs.count(source) > 1 or owner == 0:
            continue
        # A later reader of the storage would see the output: in forward, in backward, or to make something again.
        if last[owner] > line.forward(k)[-1]:
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
        # With other readers the gradient is a sum, which must not be added to what the output's gradient was.
        if readers[source] > 1 or source == steps.output or steps.tensors[source] != steps.tensors[step.output]:
            continue
        # Where the input's gradient comes first, the output's is read again, for the parameters.
        if uses["gradient", steps.grad_value(step.output)].last > written[-1]:
            continue
        owner = storage[step.output]
        storage = [owner if root == storage[source] else root for root in storage]
    return tuple(storage)


def lifetimes(uses: Mapping[Key, Use], sharing: Sharing) -> Mapping[Key, Block]:
    """One block for each storage: as large as the largest value in it, live while any of them is."""
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
