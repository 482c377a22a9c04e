"""Wrong plans: faults of a compiler of plans, each made on purpose, on a network in which it matters.

A fault changes what one pass hands to the next (who shares memory, when a value is in use), so that all that follows is wrong in
the same way, or it changes the finished plan. Where it can be made in several places, chance chooses one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from unittest.mock import patch

from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import KernelSet
from hpctrain.models import catalogue
from hpctrain.nn.compile import compiler
from hpctrain.nn.compile.memory import Block, Sharing, Timeline, Use
from hpctrain.nn.compile.plan import Action, Actions, ExecutionPlan, Key, Region
from hpctrain.nn.compile.steps import Steps, make_steps
from hpctrain.nn.layers import Conv2d, Flatten, Layer, Linear, ReLU, Residual, Sequential
from hpctrain.nn.network import Lowering
from hpctrain.parallel.moves import SplitGroup
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain_testing.virtual.run import lone_rank
from tests.support import nets

P, I, F, R, B = Action.PARAMETERS, Action.INPUT, Action.FREE, Action.RECOMPUTE, Action.BEGIN  # noqa: E741


def lowered(model: Layer, shape: tuple[int, int, int], samples: int = 3) -> Graph:
    """The model's graph, in float32."""
    return Lowering(model).graph(samples, shape)


def split(model: Layer, shape: tuple[int, int, int]) -> Graph:
    """The graph that the first of two ranks computes of the model on images that are split by rows."""
    plan = ParallelPlan(2, 1, Parallelism.DOMAIN)
    group = SplitGroup(*lone_rank())
    return partition_graph(lowered(model, shape), plan, (2, 1)).local(0, group)


def _flat() -> Layer:
    layers: dict[str, Layer] = {"conv": Conv2d(2, 5, 3, padding=1), "flatten": Flatten(), "relu": ReLU(), "fc": Linear(175, 4)}
    return Sequential(layers)


def _preactivation() -> Layer:
    """A ReLU whose input is read by a sum too."""
    layers = {"relu": ReLU(), "conv": Conv2d(6, 6, 3, padding=1)}
    return Sequential({"conv": Conv2d(3, 6, 1), "block": Residual(layers), "flatten": Flatten(), "fc": Linear(9 * 8 * 6, 5)})


GRAPHS: dict[str, Callable[[], Graph]] = {
    "plain": lambda: lowered(nets.plain(dropout=0.3), (9, 8, 3)),
    "residual": lambda: lowered(nets.residual(), (9, 8, 3)),
    "preactivation": lambda: lowered(_preactivation(), (9, 8, 3)),
    "resnet20": lambda: lowered(catalogue.build("resnet20", {"classes": 5, "shortcut": "projection"}), (33, 33, 3)),
    "split": lambda: split(nets.residual(), (17, 8, 3)),
    "wide": lambda: split(catalogue.build("vgg", {"depth": 11, "batch_norm": True, "width": 0.5, "classes": 5}), (32, 32, 3)),
    # The image is put together again for backward, and the ReLU worked in place on it.
    "flat": lambda: split(_flat(), (7, 5, 2)),
}


def steps_of(network: str, kernels: KernelSet) -> Steps:
    """The first pass, whose result no fault changes."""
    return make_steps(kernels.fuse(GRAPHS[network](), training=True), kernels, training=True, input_gradient=True)


Make = Callable[[Steps, random.Random], ExecutionPlan]


@dataclass(frozen=True)
class Fault:
    """A wrong plan: of which network and kernel set ("numpy" or "onednn"), and how it is made of the right steps."""

    name: str
    network: str
    make: Make
    kernels: str = "numpy"


# Faults of the sharing pass: (kind, tensor, the tensor in whose storage it is put), of which chance takes one.

Merge = tuple[str, int, int]


def _shares(candidates: Callable[[Steps, Mapping[Key, Block]], Iterator[Merge]]) -> Make:
    def make(steps: Steps, chance: random.Random) -> ExecutionPlan:
        right = compiler.plan_steps(steps)
        live = {buffer.owner: buffer.block for buffer in right.buffers}
        kind, tensor, into = chance.choice(list(candidates(steps, live)))
        share = compiler.share

        def wrong(*arguments: object) -> Sharing:
            sharing = share(*arguments)  # type: ignore[arg-type]
            field = {"activation": "activations", "gradient": "gradients"}[kind]
            owners = getattr(sharing, field)
            merged = tuple(owners[into] if owner == owners[tensor] else owner for owner in owners)
            return replace(sharing, **{field: merged})

        with patch.object(compiler, "share", wrong):
            return compiler.plan_steps(steps)

    return make


def _in_place_where_backward_reads(steps: Steps, live: Mapping[Key, Block]) -> Iterator[Merge]:
    for step in steps.steps:
        if step.in_place and step.operator.needs_inputs[0]:
            yield "activation", step.output, step.inputs[0]


def _in_place_with_other_readers(steps: Steps, live: Mapping[Key, Block]) -> Iterator[Merge]:
    for k, step in enumerate(steps.steps):
        if step.in_place and steps.readers(step.inputs[0])[-1] > k:
            yield "activation", step.output, step.inputs[0]


def _gradient_with_other_readers(steps: Steps, live: Mapping[Key, Block]) -> Iterator[Merge]:
    for step in steps.steps:
        if step.in_place and len(steps.readers(step.inputs[0])) > 1:
            yield "gradient", step.inputs[0], step.output


def _gradient_where_input_is_first(steps: Steps, live: Mapping[Key, Block]) -> Iterator[Merge]:
    for step in steps.steps:
        if step.input_first:
            yield "gradient", step.inputs[0], step.output


def _two_that_live_at_once(kind: str) -> Callable[[Steps, Mapping[Key, Block]], Iterator[Merge]]:
    def candidates(steps: Steps, live: Mapping[Key, Block]) -> Iterator[Merge]:
        blocks = [(number, block) for (owner, number), block in live.items() if owner == kind]
        for place, (a, mine) in enumerate(blocks):
            for b, other in blocks[:place]:
                # Those that only touch may be a step's input and output.
                if any(x[0] < y[1] and y[0] < x[1] for x in mine.spans for y in other.spans):
                    yield kind, a, b

    return candidates


# Faults of liveness: a block that lives too short, and by chance one on whose memory others then come to lie.


def _lives(kind: str, shorten: Callable[[Block, Timeline], Block]) -> Make:
    def make(steps: Steps, chance: random.Random) -> ExecutionPlan:
        right = compiler.plan_steps(steps)
        line = Timeline(steps, right.forward, right.backward)
        owners = [
            buffer.owner for buffer in right.buffers if buffer.owner[0] == kind and shorten(buffer.block, line) != buffer.block
        ]
        chance.shuffle(owners)
        lifetimes = compiler.lifetimes
        for owner in owners:

            def wrong(uses: Mapping[Key, Use], sharing: Sharing, owner: Key = owner) -> Mapping[Key, Block]:
                blocks = lifetimes(uses, sharing)
                return {key: shorten(block, line) if key == owner else block for key, block in blocks.items()}

            with patch.object(compiler, "lifetimes", wrong):
                plan = compiler.plan_steps(steps)
            if _collides(right, plan):
                return plan
        raise AssertionError(f"no {kind} of these can be cut short so that it matters")

    return make


def _collides(right: ExecutionPlan, wrong: ExecutionPlan) -> bool:
    """Two buffers overlap in `wrong` that live at one time in truth."""
    places = {buffer.owner: buffer.region for buffer in wrong.buffers}
    live = [(buffer.block, places[buffer.owner]) for buffer in right.buffers]
    return any(a[0].meets(b[0]) and a[1].overlaps(b[1]) for n, a in enumerate(live) for b in live[:n])


def _ends_in_forward(block: Block, line: Timeline) -> Block:
    return (
        replace(block, last=line.loss - 1, again=()) if block.first < line.loss - 1 and block.spans[-1][1] > line.loss else block
    )


def _ends_one_earlier(block: Block, line: Timeline) -> Block:
    return replace(block, last=block.last - 1) if block.last > block.first and not block.again else block


def _begins_one_later(block: Block, line: Timeline) -> Block:
    return replace(block, first=block.first + 1) if block.last > block.first and not block.again else block


def _not_kept_as_if_recomputed(block: Block, line: Timeline) -> Block:
    """Free from the middle of forward to the last use, as if somebody made it again."""
    if block.again or block.first >= line.loss or block.last <= line.loss:
        return block
    return Block(block.size_bytes, block.first, block.first + 1, ((block.last, block.last),))


def _unused_in_backward(block: Block, line: Timeline) -> Block:
    kept = [span for span in block.spans if span[0] < line.loss]
    return Block(block.size_bytes, *kept[0], tuple(kept[1:])) if kept else block


# Faults of the finished plan.


def _plan(change: Callable[[ExecutionPlan, random.Random], ExecutionPlan]) -> Make:
    return lambda steps, chance: change(compiler.plan_steps(steps), chance)


def _positions(actions: Actions, wanted: Callable[[Action, int], bool]) -> list[int]:
    return [time for time, (action, k) in enumerate(actions) if wanted(action, k)]


def _moved(actions: Actions, source: int, target: int) -> Actions:
    order = list(actions)
    order.insert(target, order.pop(source))
    return tuple(order)


def _drops(*kinds: Action) -> Make:
    def change(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
        time = chance.choice(_positions(plan.backward, lambda action, k: action in kinds))
        return replace(plan, backward=plan.backward[:time] + plan.backward[time + 1 :])

    return _plan(change)


def _recomputed_over_what_was_changed(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
    """An operator has worked in place on what could be made again, and that is made again for the reader of its output."""
    k = chance.choice([k for k, step in enumerate(plan.steps) if step.recomputes_output])
    assert plan.memory[k].output == plan.memory[k + 2].output, "the operator after the view works in place"
    return replace(plan, backward=((R, k), *plan.backward))


def _recomputations(plan: ExecutionPlan) -> list[int]:
    """Times in backward at which something is made again whose memory others have used since forward."""

    def was_used(k: int) -> bool:
        block = next(buffer.block for buffer in plan.buffers if buffer.owner == ("activation", plan.steps[k].output))
        idle = Block(block.size_bytes, block.last + 1, block.again[0][0] - 1)
        return any(b.block.meets(idle) and b.region.overlaps(plan.memory[k].output) for b in plan.buffers)

    return _positions(plan.backward, lambda action, k: action in (R, Action.COPY) and was_used(k))


def _not_repeated(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
    time = chance.choice(_recomputations(plan))
    return replace(plan, backward=plan.backward[:time] + plan.backward[time + 1 :])


def _repeated_late(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
    """Something is made again right after the action that needs it."""
    time = chance.choice(_recomputations(plan))
    reader = next(t for t in range(time, len(plan.backward)) if plan.backward[t][0] in (P, I))
    return replace(plan, backward=_moved(plan.backward, time, reader))


def _input_before_parameters(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
    """Where the gradient of the input may lie in that of the output, which the parameters' gradients read."""
    times = _positions(plan.backward, lambda action, k: action is I and (P, k) in plan.backward and plan.steps[k].in_place)
    time = chance.choice([t for t in times if plan.backward[t - 1] == (P, plan.backward[t][1])])
    return replace(plan, backward=_moved(plan.backward, time, time - 1))


def _freed_early(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
    frees = _positions(plan.backward, lambda action, k: action is F and (I, k) in plan.backward)
    time = chance.choice(frees)
    return replace(plan, backward=_moved(plan.backward, time, plan.backward.index((I, plan.backward[time][1]))))


def _backward_swapped(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
    """A step's gradients before those of the step after it."""
    times = _positions(plan.backward, lambda action, k: action is I)
    place = chance.randrange(1, len(times))
    return replace(plan, backward=_moved(plan.backward, times[place], times[place - 1]))


def _forward_swapped(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
    time = chance.randrange(1, len(plan.forward))
    return replace(plan, forward=_moved(plan.forward, time, time - 1))


def _sent_too_soon(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
    """A gradient begins to travel before the step that computes it."""
    time = chance.choice(_positions(plan.backward, lambda action, k: action is B))
    return replace(plan, backward=_moved(plan.backward, time, time - 1))


def _memory(change: Callable[[ExecutionPlan, random.Random], tuple[int, dict[str, object]]]) -> Make:
    """`change` returns the step, and the fields of its memory that become others."""

    def changed(plan: ExecutionPlan, chance: random.Random) -> ExecutionPlan:
        k, fields = change(plan, chance)
        memory = list(plan.memory)
        memory[k] = replace(memory[k], **fields)  # type: ignore[arg-type]
        return replace(plan, memory=tuple(memory))

    return _plan(changed)


def _adds(plan: ExecutionPlan, chance: random.Random, *, adding: bool) -> tuple[int, dict[str, object]]:
    """Turn one `accumulate` around that is as `adding` says."""
    places = [
        (k, i)
        for k, memory in enumerate(plan.memory)
        for i, region in enumerate(memory.input_grads)
        if region is not None and memory.accumulate[i] is adding and not memory.sums and not plan.steps[k].is_view
    ]
    k, i = chance.choice(places)
    flags = plan.memory[k].accumulate
    return k, {"accumulate": (*flags[:i], not flags[i], *flags[i + 1 :])}


def _shifted(region: Region) -> Region:
    return Region(region.offset + 64, region.size_bytes)


def _output_elsewhere(plan: ExecutionPlan, chance: random.Random) -> tuple[int, dict[str, object]]:
    """One step writes its output 64 bytes after the place where others read it."""
    k = chance.choice([k for k, memory in enumerate(plan.memory) if memory.output.end + 64 <= plan.arena_bytes])
    return k, {"output": _shifted(plan.memory[k].output)}


def _scratch_on_operand(plan: ExecutionPlan, chance: random.Random) -> tuple[int, dict[str, object]]:
    """An operator's scratch begins where its own output or saved memory does."""
    steps = [k for k, memory in enumerate(plan.memory) if memory.scratch is not None]
    k = chance.choice(
        [k for k in steps if plan.memory[k].output.offset + plan.steps[k].operator.scratch_bytes <= plan.arena_bytes]
    )
    return k, {"scratch": Region(plan.memory[k].output.offset, plan.steps[k].operator.scratch_bytes)}


def _partial_is_target(plan: ExecutionPlan, chance: random.Random) -> tuple[int, dict[str, object]]:
    """An operator that cannot add writes straight over what was to be added to."""
    k = chance.choice([k for k, memory in enumerate(plan.memory) if memory.sums])
    sums = {i: target for i, target, _ in plan.memory[k].sums}
    return k, {"input_grads": tuple(sums.get(i, region) for i, region in enumerate(plan.memory[k].input_grads)), "sums": ()}


FAULTS = (
    Fault(
        "a flattened image in place, which is put together again for backward", "flat", _plan(_recomputed_over_what_was_changed)
    ),
    Fault("kept, but taken for made again", "split", _lives("activation", _not_kept_as_if_recomputed)),
    Fault("in place where backward reads the input", "residual", _shares(_in_place_where_backward_reads)),
    Fault("in place where another step reads the input", "preactivation", _shares(_in_place_with_other_readers)),
    Fault("two activations in one place", "residual", _shares(_two_that_live_at_once("activation"))),
    Fault("a gradient in place where another step adds to it", "preactivation", _shares(_gradient_with_other_readers)),
    Fault("a gradient in place where the input comes first", "split", _shares(_gradient_where_input_is_first)),
    Fault("two gradients in one place", "residual", _shares(_two_that_live_at_once("gradient"))),
    Fault("an activation that is not kept for backward", "plain", _lives("activation", _ends_in_forward)),
    Fault("an activation free one action early", "residual", _lives("activation", _ends_one_earlier)),
    Fault("a gradient free one action early", "residual", _lives("gradient", _ends_one_earlier)),
    Fault("a gradient in use one action late", "resnet20", _lives("gradient", _begins_one_later), "onednn"),
    Fault("saved memory that is not kept", "plain", _lives("saved", _ends_in_forward)),
    Fault("scratch that is not reserved in backward", "residual", _lives("scratch", _unused_in_backward)),
    Fault("a halo that is not put together again", "split", _plan(_not_repeated)),
    Fault("a copy that is not made again", "wide", _plan(_not_repeated), "onednn"),
    Fault("put together again too late", "split", _plan(_repeated_late)),
    Fault("gradients of parameters left out", "residual", _drops(P)),
    Fault("a gradient of an input left out", "resnet20", _drops(I)),
    Fault("batch norm's input before its parameters", "residual", _plan(_input_before_parameters)),
    Fault("parameters freed before they are read for the last time", "plain", _plan(_freed_early)),
    Fault("gradients in the wrong order", "resnet20", _plan(_backward_swapped)),
    Fault("forward in the wrong order", "residual", _plan(_forward_swapped)),
    Fault("a gradient that travels too soon", "split", _plan(_sent_too_soon)),
    Fault("a gradient overwritten that had to be added to", "residual", _memory(lambda p, c: _adds(p, c, adding=True))),
    Fault("a gradient added to nothing", "residual", _memory(lambda p, c: _adds(p, c, adding=False))),
    Fault("an output 64 bytes away from its place", "resnet20", _memory(_output_elsewhere)),
    Fault("scratch on the step's own output", "residual", _memory(_scratch_on_operand)),
    Fault("a partial gradient written over the others", "residual", _memory(_partial_is_target), "onednn"),
)
