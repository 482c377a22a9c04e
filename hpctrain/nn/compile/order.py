"""Third pass: in what order the steps act, forward and backward. Data, made once, the same on every rank."""

from __future__ import annotations

from hpctrain.backend.kernels.abilities import DeferredStart
from hpctrain.nn.compile.plan import Action, Actions
from hpctrain.nn.compile.recomputation import recompute_path
from hpctrain.nn.compile.steps import Steps


def forward_actions(steps: Steps) -> Actions:
    """Steps in order, but those that begin early end just before their first reader: until then their messages travel."""
    actions: list[tuple[Action, int]] = []
    begun: set[int] = set()
    for k, step in enumerate(steps.steps):
        for j in sorted(position for position in map(steps.producer, step.inputs) if position in begun):
            begun.discard(j)
            actions.append((Action.FORWARD, j))
        if step.begins_early:
            begun.add(k)
            actions.append((Action.BEGIN, k))
        else:
            actions.append((Action.FORWARD, k))
    return tuple(actions)


def backward_actions(steps: Steps, recomputed: frozenset[int]) -> Actions:
    """Last step first, parameters before the input; nothing in evaluation.

    Parameters come first because their averaging can then start, under the rest of the pass. Where `input_first` is set, the
    input's gradient has to travel to other ranks itself: it comes first, and travels while the parameters' is computed.
    """
    if not steps.training:
        return ()
    actions: list[tuple[Action, int]] = []
    early: set[int] = set()  # copies whose gradient was computed ahead of their turn
    present: set[int] = set()  # tensors that were made again: once is enough, they are kept until their last reader
    for k in reversed(range(len(steps.steps))):
        step = steps.steps[k]
        actions += _recompute(steps, recomputed, k, present)
        if not step.input_first:
            actions.append((Action.PARAMETERS, k))
        if k not in early:
            actions.append((Action.INPUT, k))
        if step.input_first:
            actions += _send_ahead(steps, k, early)
            actions.append((Action.PARAMETERS, k))
        if step.node is None or not step.node.shared:  # shared parameters are read until the first step that has them is done
            actions.append((Action.FREE, k))
    return tuple(action for action in actions if _acts(steps, *action))


def _recompute(steps: Steps, recomputed: frozenset[int], k: int, present: set[int]) -> list[tuple[Action, int]]:
    """Makes again what step k reads in backward and nobody has made again yet; `present` grows by that."""
    step = steps.steps[k]
    actions = []
    for tensor, needed in zip(step.inputs, step.operator.needs_inputs, strict=True):
        # A view is never made again: its memory is, under the name of the tensor that it is a view of.
        for position in recompute_path(steps, recomputed, steps.value(tensor)) if needed else ():
            output = steps.steps[position].output
            if output not in present:
                present.add(output)
                actions.append((Action.COPY if steps.steps[position].node is None else Action.RECOMPUTE, position))
    return actions


def _send_ahead(steps: Steps, k: int, early: set[int]) -> list[tuple[Action, int]]:
    """Return the actions that bring the gradient of step k's input to the step that sends it.

    They are copies between layouts, each the only action between two steps, and then the start of the sender. The copies are
    added to `early`.
    """
    actions: list[tuple[Action, int]] = []
    reader = k
    while (j := steps.producer(steps.steps[reader].inputs[0])) is not None and steps.readers(steps.steps[j].output)[0] == reader:
        if steps.steps[j].node is not None:
            return [*actions, (Action.BEGIN, j)] if isinstance(steps.steps[j].operator, DeferredStart) else actions
        early.add(j)
        actions.append((Action.INPUT, j))
        reader = j
    return actions


def _acts(steps: Steps, action: Action, k: int) -> bool:
    if action in (Action.PARAMETERS, Action.FREE):
        return steps.steps[k].has_parameters
    return action not in (Action.INPUT, Action.BEGIN) or steps.passes_back(k)
