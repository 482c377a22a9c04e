"""Execution plans, the result of `nn.compile`. A plan is immutable and equal on every rank that compiles the same graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from hpctrain.backend.graph import Node
from hpctrain.backend.operators import (
    Accumulating,
    InPlace,
    InputView,
    JointBackward,
    Operator,
    OutputReadOnce,
    RecomputedOutput,
)
from hpctrain.backend.specs import TensorSpec


class Action(Enum):
    """An action of a step in one of the passes."""

    FORWARD = auto()
    RECOMPUTE = auto()  # compute the output again, because it was not kept
    COPY = auto()  # copy a tensor to another layout again
    PARAMETERS = auto()  # gradients of the parameters
    INPUT = auto()  # gradients of the inputs
    BEGIN = auto()  # start sending the output's gradient, which is complete
    FREE = auto()  # the parameters were read for the last time


#: actions in chronological order, each with the position of its step
Actions = tuple[tuple[Action, int], ...]

#: ("activation" | "gradient", tensor that owns the storage) or ("saved" | "scratch" | "partial", step)
Key = tuple[str, int]


@dataclass(frozen=True)
class PlannedStep:
    """One operator with its tensors. Its backward has two halves: PARAMETERS, then INPUT; or the reverse if `input_first`.

    Attributes:
        inputs, output: numbers of the tensors.
        node: node of the graph; None for a copy between layouts.
    """

    name: str
    operator: Operator
    inputs: tuple[int, ...]
    output: int
    node: Node | None = None

    @property
    def has_parameters(self) -> bool:
        """Whether the step has trained parameters."""
        return self.node is not None and self.node.trains

    @property
    def in_place(self) -> bool:
        """Whether the output may overwrite the first input if no later action reads that input."""
        return isinstance(self.operator, InPlace) and not self.is_view

    @property
    def is_view(self) -> bool:
        """Whether the output is the first input in another shape."""
        return isinstance(self.operator, InputView)

    @property
    def accumulates(self) -> bool:
        """Whether the operator can add to its inputs' gradients."""
        return isinstance(self.operator, Accumulating)

    @property
    def reads_output_once(self) -> bool:
        """Whether only the first half of backward reads the output."""
        return isinstance(self.operator, OutputReadOnce)

    @property
    def joint_backward(self) -> bool:
        """Whether the first half of backward also writes the inputs' gradients."""
        return isinstance(self.operator, JointBackward)

    @property
    def recomputes_output(self) -> bool:
        """Whether the output is recomputed in backward instead of kept."""
        return isinstance(self.operator, RecomputedOutput) and self.operator.recomputes_output

    @property
    def input_first(self) -> bool:
        """Whether backward computes the input's gradient before the parameters' gradients."""
        return self.node is not None and self.node.input_first


@dataclass(frozen=True)
class Region:
    """Bytes [offset, offset + size_bytes) of the arena."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes

    def overlaps(self, other: Region) -> bool:
        """Return whether the two regions share a byte."""
        return self.offset < other.end and other.offset < self.end and bool(self.size_bytes and other.size_bytes)


@dataclass(frozen=True)
class StepMemory:
    """Places of the buffers of one step.

    Attributes:
        inputs, output, output_grad, saved, scratch: see `Buffers`; None if there is none.
        input_grads: places that `backward_input` writes; None if no action reads that gradient.
        accumulate: flag of each input, whether `backward_input` adds to the gradient instead of writing it.
        sums: (input, target, partial) of each partial gradient that the program adds to the target after `backward_input`,
            because the operator cannot accumulate; `input_grads` then contains the partial.
        copies_gradient: whether the step is a view that copies its gradient, because the input has other readers.
    """

    inputs: tuple[Region, ...]
    output: Region
    input_grads: tuple[Region | None, ...]
    output_grad: Region | None
    accumulate: tuple[bool, ...]
    sums: tuple[tuple[int, Region, Region], ...] = ()
    saved: Region | None = None
    scratch: Region | None = None
    copies_gradient: bool = False


@dataclass(frozen=True)
class Block:
    """Storage that is live in all time slots from `first` to `last`, both included, and in each interval of `again`.

    The intervals are disjoint. `size_bytes` is the size of the storage.
    """

    size_bytes: int
    first: int
    last: int
    again: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Intervals of time slots in which the block is live."""
        return ((self.first, self.last), *self.again)

    @property
    def slots(self) -> int:
        """Number of time slots in which the block is live."""
        return sum(last - first + 1 for first, last in self.spans)

    def meets(self, other: Block) -> bool:
        """Return whether both blocks are live in the same time slot."""
        return any(a[0] <= b[1] and b[0] <= a[1] for a in self.spans for b in other.spans)


@dataclass(frozen=True)
class Buffer:
    """A region of the arena with its owner (for reports and tests) and its live intervals."""

    owner: Key
    region: Region
    block: Block


@dataclass(frozen=True)
class ExecutionPlan:
    """Steps in forward order, the actions of both passes, and the places of all buffers.

    Attributes:
        steps: steps in forward order.
        tensors: tensors by number; 0 is the input.
        output: number of the output tensor, the logits.
        training: whether the plan has a backward pass.
        needs_grad: flag of each tensor, whether backward computes its gradient.
        forward, backward: actions of both passes. The loss is computed in between. Backward is empty in evaluation.
        memory: places of each step's buffers.
        x, logits: places of the input and the output.
        logits_grad, x_grad: places of their gradients; None if there is none.
        buffers: all regions of the arena.
    """

    steps: tuple[PlannedStep, ...]
    tensors: tuple[TensorSpec, ...]
    output: int
    training: bool
    needs_grad: tuple[bool, ...]
    forward: Actions
    backward: Actions
    memory: tuple[StepMemory, ...]
    x: Region
    logits: Region
    logits_grad: Region | None
    x_grad: Region | None
    buffers: tuple[Buffer, ...]
    arena_bytes: int
