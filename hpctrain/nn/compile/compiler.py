"""Compilation of a graph to an execution plan, pass by pass. Each pass is a pure function of the results of earlier passes.

graph -> steps -> recomputation -> order -> liveness -> sharing -> packing -> binding. The time of each action is therefore fixed
before any pass decides which memory may be overwritten, and no pass changes the decision of another.
"""

from __future__ import annotations

from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import ALIGNMENT_BYTES, KernelSet
from hpctrain.nn.compile.memory import Places, Timeline, find_uses, lifetimes, pack, share
from hpctrain.nn.compile.plan import Buffer, ExecutionPlan, Region
from hpctrain.nn.compile.steps import Steps, backward_actions, forward_actions, make_steps, recomputed_tensors
from hpctrain.nn.compile.validate import validate, validation_is_on


def compile_graph(graph: Graph, kernels: KernelSet, *, training: bool, input_gradient: bool = False) -> ExecutionPlan:
    """Return the execution plan of one program, without allocating arrays.

    Args:
        graph: model at one batch size, before fusion.
        training: whether the plan has a backward pass.
        input_gradient: whether backward also computes the gradient of the images.

    Raises:
        BackendError: the kernel set does not support a layer; the message names the layer.
    """
    steps = make_steps(kernels.fuse(graph, training=training), kernels, training=training, input_gradient=input_gradient)
    plan = plan_steps(steps, kernels.alignment_bytes)
    if validation_is_on():
        validate(plan)
    return plan


def plan_steps(steps: Steps, alignment_bytes: int = ALIGNMENT_BYTES) -> ExecutionPlan:
    """Return the plan of `steps` by all passes after the first one. Buffers in the arena are aligned to `alignment_bytes`."""
    forward, backward = forward_actions(steps), backward_actions(steps, recomputed_tensors(steps))
    line = Timeline(steps, forward, backward)
    uses = find_uses(steps, line)
    sharing = share(steps, line, uses)
    blocks = lifetimes(uses, sharing)
    offsets, arena_bytes = pack(list(blocks.values()), alignment_bytes)
    places = Places(steps, line, sharing, dict(zip(blocks, offsets, strict=True)))
    return ExecutionPlan(
        steps=steps.steps,
        tensors=steps.tensors,
        output=steps.output,
        training=steps.training,
        needs_grad=steps.needs_grad,
        forward=forward,
        backward=backward,
        memory=tuple(places.step(k) for k in range(len(steps.steps))),
        x=places.activation(0),
        logits=places.activation(steps.output),
        logits_grad=places.logits_grad(),
        x_grad=places.gradient(0),
        buffers=tuple(
            Buffer(key, Region(offset, block.size_bytes), block)
            for (key, block), offset in zip(blocks.items(), offsets, strict=True)
        ),
        arena_bytes=arena_bytes,
    )
