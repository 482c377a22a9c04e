"""From a graph to an execution plan: operators in order, reorders where layouts differ, and who shares memory.

Tensors are numbered as in the graph, with those that reorders add behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from hpctrain.backend.kernels.base import KernelSet, Operator
from hpctrain.backend.kernels.graph import Graph, Node
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import BackendError


@runtime_checkable
class SelfMade(Protocol):
    """A spec that brings its own operator (a user's layer, a halo exchange); it works on plain memory."""

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator: ...


@dataclass(frozen=True)
class PlannedStep:
    """One operator at its place. `inputs` and `output` are tensor numbers; `node` is None for a reorder."""

    name: str
    operator: Operator
    inputs: tuple[int, ...]
    output: int
    node: Node | None = None

    @property
    def has_parameters(self) -> bool:
        return self.node is not None and bool(self.node.parameters)

    @property
    def input_first(self) -> bool:
        return self.node is not None and self.node.input_first


@dataclass
class ExecutionPlan:
    """Steps in forward order, and which tensors share storage.

    storage[t]: the tensor whose memory tensor t lies in (itself where it has its own). needs_grad[t]: its gradient is computed.
    grad_storage[t] likewise for gradients. recomputed: tensors that are not kept from forward to backward but made again.
    """

    steps: list[PlannedStep]
    tensors: list[TensorSpec]
    output: int
    training: bool
    needs_grad: list[bool] = field(default_factory=list)
    recomputed: frozenset[int] = frozenset()
    storage: list[int] = field(default_factory=list)
    grad_storage: list[int] = field(default_factory=list)

    def recompute_path(self, tensor: int) -> tuple[int, tuple[int, ...]]:
        """(root, steps): a tensor that is kept, and the positions of the steps that make `tensor` from it again, in order."""
        if tensor not in self.recomputed:
            return tensor, ()
        position = next(k for k, step in enumerate(self.steps) if step.output == tensor)
        root, steps = self.recompute_path(self.steps[position].inputs[0])
        return root, (*steps, position)

    def producer(self, tensor: int) -> int | None:
        """Position of the step that writes `tensor`; None for the input."""
        return next((k for k, step in enumerate(self.steps) if step.output == tensor), None)

    def ends(self, k: int) -> int:
        """The position at which step k has read its inputs: its own, or that of the first reader of what it began early."""
        return self.readers(self.steps[k].output)[0] if self.steps[k].operator.begins_early else k

    def ahead(self, k: int) -> tuple[tuple[int, ...], int | None]:
        """What runs in backward right after the input's gradient of step k, where that comes first: the copies between layouts
        just before it, and what then has its output's gradient complete."""
        copies: list[int] = []
        reader = k
        while (j := self.producer(self.steps[reader].inputs[0])) is not None and self.readers(self.steps[j].output)[0] == reader:
            if self.steps[j].node is not None:
                return tuple(copies), j
            copies.append(j)
            reader = j
        return tuple(copies), None

    def readers(self, tensor: int) -> list[int]:
        """Positions of the steps that read `tensor`."""
        return [k for k, step in enumerate(self.steps) if tensor in step.inputs]


def plan(graph: Graph, kernels: KernelSet, *, training: bool, input_gradient: bool = False) -> ExecutionPlan:
    """Fuse, make operators, insert reorders, decide who shares memory."""
    result = _make_steps(kernels.fuse(graph, training=training), kernels, training, input_gradient)
    _find_recomputed(result)
    _share_activations(result)
    _share_gradients(result)
    return result


def _make_steps(graph: Graph, kernels: KernelSet, training: bool, input_gradient: bool) -> ExecutionPlan:
    tensors = list(graph.tensors)
    needs_grad = _find_gradients(graph, training, input_gradient)
    steps: list[PlannedStep] = []
    copies: dict[tuple[int, str], int] = {}

    def in_layout(tensor: int, wanted: TensorSpec) -> int:
        if tensors[tensor].layout == wanted.layout:
            return tensor
        key = (tensor, wanted.layout)
        if key not in copies:
            tensors.append(wanted)
            needs_grad.append(needs_grad[tensor])
            copies[key] = len(tensors) - 1
            reorder = kernels.reorder(tensors[tensor], wanted)
            steps.append(PlannedStep(f"reorder.{tensor}", reorder, (tensor,), copies[key]))
        return copies[key]

    for node in graph.nodes:
        specs = tuple(tensors[i] for i in node.inputs)
        operator = _make_operator(node, specs, kernels, training, any(needs_grad[i] for i in node.inputs))
        inputs = tuple(in_layout(i, wanted) for i, wanted in zip(node.inputs, operator.inputs, strict=True))
        tensors[node.output] = operator.output
        steps.append(PlannedStep(node.name, operator, inputs, node.output, node))
    output = in_layout(graph.output, tensors[graph.output].plain())
    return ExecutionPlan(steps, tensors, output, training, needs_grad)


def _make_operator(
    node: Node, inputs: tuple[TensorSpec, ...], kernels: KernelSet, training: bool, input_gradient: bool
) -> Operator:
    """
    Raises:
        BackendError: the kernel set refuses; the message is prefixed with the layer's name.
    """
    if isinstance(node.spec, SelfMade):
        return node.spec.operator(tuple(spec.plain() for spec in inputs), training=training)
    try:
        return kernels.make(node.spec, inputs, training=training, input_gradient=input_gradient)
    except BackendError as error:
        error.args = (f"Layer {node.name}: {error}",)
        raise


def _find_gradients(graph: Graph, training: bool, input_gradient: bool) -> list[bool]:
    """By tensor of the graph: backward computes its gradient."""
    needs_grad = [False] * len(graph.tensors)
    if training:
        needs_grad[0] = input_gradient
        for node in graph.nodes:
            needs_grad[node.output] = bool(node.parameters) or any(needs_grad[i] for i in node.inputs)
    return needs_grad


def _find_recomputed(plan: ExecutionPlan) -> None:
    """Outputs that their operators make again, and the copies in other layouts on both sides of these."""
    if not plan.training:
        return
    made: set[int] = set()
    copies: set[int] = set()
    for step in plan.steps:
        if step.node is None:
            copies.add(step.output)
            if step.inputs[0] in made:
                made.add(step.output)
        if step.operator.recomputes_output:
            made.add(step.output)
            made.update(copies.intersection(step.inputs))
    plan.recomputed = frozenset(made)


def _share_activations(plan: ExecutionPlan) -> None:
    """Views share their input's memory; in-place operators too, where nobody needs what they overwrite."""
    plan.storage = list(range(len(plan.tensors)))
    last_read, kept = _uses(plan)
    members: dict[int, list[int]] = {t: [t] for t in range(len(plan.tensors))}
    for k, step in enumerate(plan.steps):
        source = plan.storage[step.inputs[0]]
        fits = step.operator.in_place and plan.tensors[step.inputs[0]] == plan.tensors[step.output]
        free = all(last_read[t] <= k and t not in kept for t in members[source])
        once = step.inputs.count(step.inputs[0]) == 1
        keeps_input = step.operator.needs_inputs[0] and plan.training
        fixed = (
            source in plan.recomputed or step.output in plan.recomputed
        )  # what is made again would be made over what was changed
        if step.operator.view or (fits and source != 0 and free and once and not keeps_input and not fixed):
            plan.storage[step.output] = source
            members[source].append(step.output)


def _uses(plan: ExecutionPlan) -> tuple[list[int], set[int]]:
    """Last forward position that reads each tensor, and the tensors that backward reads."""
    last_read = [-1] * len(plan.tensors)
    kept: set[int] = set()
    for k, step in enumerate(plan.steps):
        for i, tensor in enumerate(step.inputs):
            last_read[tensor] = plan.ends(k)
            if plan.training and step.operator.needs_inputs[i]:
                kept.add(tensor)
        if plan.training and step.operator.needs_output:
            kept.add(step.output)
    kept.update(plan.recompute_path(tensor)[0] for tensor in plan.recomputed)
    last_read[plan.output] = len(plan.steps)
    return last_read, kept


def _share_gradients(plan: ExecutionPlan) -> None:
    """The input's gradient may lie in the output's, where the operator works in place and is the only reader of its input."""
    plan.grad_storage = list(range(len(plan.tensors)))
    readers: dict[int, int] = {}
    for step in plan.steps:
        for tensor in step.inputs:
            readers[tensor] = readers.get(tensor, 0) + 1
    for step in reversed(plan.steps):
        source = step.inputs[0]
        alone = readers[source] == 1 and plan.needs_grad[source]
        same = step.operator.in_place and plan.tensors[source] == plan.tensors[step.output] and not step.input_first
        if alone and (step.operator.view or same):
            plan.grad_storage[source] = plan.grad_storage[step.output]
