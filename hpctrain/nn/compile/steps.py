"""First three passes: from a graph to steps, the tensors to recompute, and the order of all actions.

1. Steps: operators in order, with copies between layouts if neighbours use different ones.
2. Recomputation: the tensors that are not kept from forward to backward but recomputed in backward.
3. Order: the order of the steps' actions in forward and backward. It is fixed once, and the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.operators import AnyArrays, DeferredStart, KernelSet, Operator
from hpctrain.backend.rounded import BFLOAT16, rounded
from hpctrain.backend.specs import TensorSpec
from hpctrain.core.errors import BackendError
from hpctrain.nn.compile.plan import Action, Actions, PlannedStep

# -- steps ---------------------------------------------------------------------------------------------------------------------


@runtime_checkable
class SelfMade(Protocol):
    """Spec that makes its own operator, which works on plain memory (a user-defined layer, a halo exchange).

    Specs whose operators are `AnyArrays` set the attribute `any_arrays` to True. Operators of other specs compute bfloat16 in
    float32 between rounded copies.
    """

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator: ...


@dataclass(frozen=True)
class Steps:
    """Steps of a program in forward order. Tensors are numbered as in the graph; copies get the numbers after them.

    The attributes are those of `ExecutionPlan`.
    """

    steps: tuple[PlannedStep, ...]
    tensors: tuple[TensorSpec, ...]
    output: int
    training: bool
    needs_grad: tuple[bool, ...]

    def producer(self, tensor: int) -> int | None:
        """Return the position of the step that writes `tensor`; None for the input."""
        return self._producers.get(tensor)

    def readers(self, tensor: int) -> list[int]:
        """Return the positions of the steps that read `tensor`."""
        return self._readers.get(tensor, [])

    @cached_property
    def _producers(self) -> dict[int, int]:
        return {step.output: k for k, step in enumerate(self.steps)}

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = {}
        for k, step in enumerate(self.steps):
            for tensor in dict.fromkeys(step.inputs):
                readers.setdefault(tensor, []).append(k)
        return readers

    def value(self, tensor: int) -> int:
        """Return the tensor that owns the memory of `tensor`: the start of its chain of views, or `tensor` itself."""
        k = self.producer(tensor)
        return tensor if k is None or not self.steps[k].is_view else self.value(self.steps[k].inputs[0])

    def grad_value(self, tensor: int) -> int:
        """Return the tensor that owns the memory of the gradient of `tensor`.

        It differs from `tensor` if a view is the only reader of `tensor`, because then both gradients are the same numbers.
        """
        readers = self.readers(tensor)
        return self.grad_value(self.steps[readers[0]].output) if readers and self.shares_gradient(readers[0]) else tensor

    def shares_gradient(self, k: int) -> bool:
        """Return whether step k is a view whose input and output have the same gradient.

        The gradients differ if the input has other readers, including the loss. The input's gradient is then a sum, and
        accumulating it in shared memory would change the output's gradient before its last read.
        """
        step = self.steps[k]
        source = step.inputs[0]
        return step.is_view and self.needs_grad[source] and self.readers(source) == [k] and source != self.output

    def passes_back(self, k: int) -> bool:
        """Return whether step k computes an input gradient.

        A step computes one if an input needs a gradient and this gradient does not share memory with the output's gradient.
        """
        return any(self.needs_grad[tensor] for tensor in self.steps[k].inputs) and not self.shares_gradient(k)


def make_steps(graph: Graph, kernels: KernelSet, *, training: bool, input_gradient: bool) -> Steps:
    """Make an operator for each node, and a copy before it for each input that the operator needs in another layout.

    Raises:
        BackendError: the kernel set does not support a node; the message names the layer.
    """
    tensors = list(graph.tensors)
    # Backward computes a tensor's gradient if a layer that it depends on is trained; with input_gradient, that of all tensors.
    needs_grad = [False] * len(graph.tensors)
    if training:
        needs_grad[0] = input_gradient
        for node in graph.nodes:
            needs_grad[node.output] = node.trains or any(needs_grad[i] for i in node.inputs)
    steps: list[PlannedStep] = []
    copies: dict[tuple[int, str], int] = {}

    def in_layout(tensor: int, wanted: TensorSpec) -> int:
        if tensors[tensor].layout == wanted.layout:
            return tensor
        key = (tensor, wanted.layout)
        if key not in copies:  # one copy serves all readers that need this layout
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
    # The loss and the readers of predictions index plain memory only.
    output = in_layout(graph.output, tensors[graph.output].plain())
    return Steps(tuple(steps), tuple(tensors), output, training, tuple(needs_grad))


def _make_operator(
    node: Node, inputs: tuple[TensorSpec, ...], kernels: KernelSet, training: bool, input_gradient: bool
) -> Operator:
    if node.frozen and not input_gradient:
        training = False  # backward skips the layer, so its operator need not save memory for it
    try:
        if isinstance(node.spec, SelfMade):
            return _self_made(node.spec, inputs, kernels, training)
        return kernels.make(node.spec, inputs, training=training, input_gradient=input_gradient)
    except BackendError as error:
        error.args = (f"Layer {node.name}: {error}",)
        raise


def _self_made(spec: SelfMade, inputs: tuple[TensorSpec, ...], kernels: KernelSet, training: bool) -> Operator:
    plain = tuple(x.plain() for x in inputs)
    if kernels.arithmetic.on_host and plain[0].dtype == BFLOAT16.name and not getattr(spec, "any_arrays", False):
        # NumPy code of users does not know bfloat16.
        return rounded(lambda *floats: spec.operator(floats, training=training), plain, training=training)
    operator = spec.operator(plain, training=training)
    if isinstance(operator, AnyArrays):
        operator.use(kernels.arithmetic)
    elif not kernels.arithmetic.on_host:
        raise BackendError(
            f"The layer's code computes with NumPy, but arrays of backend {kernels.name} are not on the host; "
            "use backend numpy or onednn."
        )
    return operator


# -- recomputation -------------------------------------------------------------------------------------------------------------


def recomputed_tensors(steps: Steps) -> frozenset[int]:
    """Return the outputs that their operators can recompute, and the layout copies directly before and after these operators.

    Storing the copy after such an operator would save no memory. The recomputation reads the copy before the operator, which is
    as cheap to repeat as to store.
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
    """Return the steps that recompute `tensor` from a kept tensor, in order; empty if `tensor` itself is kept."""
    if tensor not in recomputed:
        return ()
    position = steps.producer(tensor)
    assert position is not None, "the input is kept, as nothing computes it"
    return (*recompute_path(steps, recomputed, steps.steps[position].inputs[0]), position)


# -- order ---------------------------------------------------------------------------------------------------------------------


def forward_actions(steps: Steps) -> Actions:
    """Return the actions of forward, in the order of the steps."""
    return tuple((Action.FORWARD, k) for k in range(len(steps.steps)))


def backward_actions(steps: Steps, recomputed: frozenset[int]) -> Actions:
    """Return the actions of backward: last step first, parameters before the input; none in evaluation.

    Parameters come first because their averaging can then start and overlap with the rest of the pass. If `input_first` is set,
    the input's gradient itself is sent to other ranks. It then comes first, and is sent while the parameters' gradient is
    computed.
    """
    if not steps.training:
        return ()
    actions: list[tuple[Action, int]] = []
    early: set[int] = set()  # layout copies whose gradient was computed before their turn
    present: set[int] = set()  # recomputed tensors; each is recomputed once, because it is kept until its last reader
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
        actions.append((Action.FREE, k))
    return tuple(action for action in actions if _acts(steps, *action))


def _recompute(steps: Steps, recomputed: frozenset[int], k: int, present: set[int]) -> list[tuple[Action, int]]:
    """Return the actions that recompute the tensors that step k reads in backward, and add these tensors to `present`.

    Tensors in `present` have been recomputed already.
    """
    step = steps.steps[k]
    actions = []
    for tensor, needed in zip(step.inputs, step.operator.needs_inputs, strict=True):
        # A view has no memory of its own to recompute; the tensor that it is a view of is recomputed instead.
        for position in recompute_path(steps, recomputed, steps.value(tensor)) if needed else ():
            output = steps.steps[position].output
            if output not in present:
                present.add(output)
                actions.append((Action.COPY if steps.steps[position].node is None else Action.RECOMPUTE, position))
    return actions


def _send_ahead(steps: Steps, k: int, early: set[int]) -> list[tuple[Action, int]]:
    """Return the actions that compute the gradient of step k's input and start sending it.

    If layout copies lie between step k and the sender of its input, their backward runs first, and then BEGIN of the sender. The
    copies are added to `early`. The search ends at a tensor that also has an earlier reader, because that reader's gradient is
    still missing.
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
    """Return whether this action of step k does any work."""
    if action in (Action.PARAMETERS, Action.FREE):
        return steps.steps[k].has_parameters
    return action not in (Action.INPUT, Action.BEGIN) or steps.passes_back(k)
