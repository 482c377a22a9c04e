"""Second pass: which tensors are not kept from forward to backward, but computed again there."""

from __future__ import annotations

from hpctrain.nn.compile.steps import Steps


def recomputed_tensors(steps: Steps) -> frozenset[int]:
    """The outputs that their operators can make again, and the copies in other layouts on both sides of these.

    A copy behind such an output would otherwise be kept in its place, and nothing would be saved. The copy before it is read by
    the recomputation, and is as cheap to make again as to keep.
    """
    if not steps.training:
        return frozenset()
    recomputed: set[int] = set()
    copies: set[int] = set()
    for step in steps.steps:
        if step.node is None:
            copies.add(step.output)
            if step.inputs[0] in recomputed:
                recomputed.add(step.output)
        if step.recomputes_output:
            recomputed.add(step.output)
            recomputed.update(copies.intersection(step.inputs))
    return frozenset(recomputed)


def recompute_path(steps: Steps, recomputed: frozenset[int], tensor: int) -> tuple[int, ...]:
    """Positions of the steps that make `tensor` again from a tensor that is kept, in order; none where it is kept itself."""
    if tensor not in recomputed:
        return ()
    position = steps.producer(tensor)
    assert position is not None, "nobody computes the input"
    return (*recompute_path(steps, recomputed, steps.steps[position].inputs[0]), position)
