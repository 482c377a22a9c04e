"""The key under which an operator's time is kept: all that changes it, and nothing of names, purposes and random seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from hpctrain.backend.specs import TensorSpec
from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.parallel.redistribute import RedistributeOperator, RedistributeSpec
from hpctrain.planner.move_traffic import is_move, transfer_of

# Fields of specs that no time depends on.
_IRRELEVANT = frozenset({"layer", "seed", "first_sample", "origin", "unsplit_shape", "merge", "epsilon", "elements", "padding"})


@dataclass(frozen=True)
class OperatorKey:
    """An operator's work in one phase.

    family: operation, channels, layouts and use of memory: operators of one family differ in their extents alone.
    extents: (N, H, W) of the first input; H and W are 1 where it has no images. details: what else there is to tell them
    apart, padding and the pieces of a move: little of the time depends on it.
    """

    family: str
    extents: tuple[int, int, int]
    details: str = ""


def operator_key(step: PlannedStep, action: Action, memory: StepMemory | None = None) -> OperatorKey:
    """The key of a step's phase. memory: see `ComputeCosts.seconds`."""
    operator = step.operator
    spec = getattr(operator, "spec", None) if step.node is not None else None
    inputs = operator.inputs
    first = inputs[0].shape
    extents = (first[0], first[1], first[2]) if len(first) == 4 else (first[0], 1, 1)
    details = ",".join(_paddings(spec))
    name = type(operator).__name__
    if is_move(operator):
        pieces = transfer_of(operator)
        name += f" {len(pieces.sends)} {len(pieces.receives)}"
        details = f"{[piece.shape for piece in pieces.sends]} {[piece.shape for piece in pieces.receives]}"
        if isinstance(operator, RedistributeOperator):
            assert isinstance(operator.spec, RedistributeSpec)
            name += f" {operator.spec.source.kind} {operator.spec.target.kind} {operator.recomputes_output}"
    else:
        name += f" {_text(spec)}"
    tensors = " ".join(_tensor(x) for x in (*inputs, operator.output))
    return OperatorKey(f"{action.name} {name} {tensors} {_use_of_memory(step, memory)}", extents, details)


def _use_of_memory(step: PlannedStep, memory: StepMemory | None) -> str:
    """Letters: gradients that are asked for (w), added to (a), summed by the program (s); i: the output lies in the input."""
    if memory is None:
        return "w" * len(step.inputs)
    summed = {number for number, _, _ in memory.sums}
    asked = (
        "-" if region is None else "s" if i in summed else "a" if memory.accumulate[i] else "w"
        for i, region in enumerate(memory.input_grads)
    )
    in_place = any(region == memory.output for region in memory.inputs)
    return "".join(asked) + "i" * in_place + "c" * memory.copies_gradient


def _tensor(x: TensorSpec) -> str:
    return f"{x.layout}:{x.dtype}:{len(x.shape)}:{x.shape[-1]}"


def _text(value: Any) -> str:
    """A spec as text; of objects that are no data, the type alone."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = (field.name for field in fields(value) if field.name not in _IRRELEVANT)
        return f"{type(value).__name__}({','.join(f'{name}={_text(getattr(value, name))}' for name in kept)})"
    if isinstance(value, tuple | list):
        return f"({','.join(_text(item) for item in value)})"
    if isinstance(value, Enum) or value is None or isinstance(value, bool | int | float | str):
        return str(value)
    return type(value).__name__


def _paddings(value: Any) -> Iterator[str]:
    """All paddings in a spec."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.name == "padding":
                yield str(getattr(value, field.name))
            else:
                yield from _paddings(getattr(value, field.name))
