"""Count the work of an operator's phase: floating-point operations, and bytes of memory read and written.

There are three kinds of work: kernels (`work_of`), moves between layouts, which pack, copy and unpack (`move_traffic`), and
products of exchanged inputs and errors (`FactorProduct`). With such a product, the owners of a linear layer's weight compute its
gradient over all samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.operators import Operator, SufficientFactors
from hpctrain.backend.specs import BatchNormSpec, Conv2dSpec, LinearSpec, Spec, WithRelu, item_bytes
from hpctrain.core.intervals import size_of
from hpctrain.nn.compile.plan import Action, ExecutionPlan, PlannedStep, StepMemory
from hpctrain.parallel.moves import RedistributeOperator, RedistributeSpec, ReduceScatterOperator, ReduceScatterSpec, Transfer
from hpctrain.planner.costs.machine import OperatorClass, OperatorRate


@dataclass(frozen=True)
class MoveTraffic:
    """Bytes that a move reads and writes on one rank.

    Attributes:
        packing: bytes before the messages are posted.
        copying: bytes while the messages are in flight.
        unpacking: bytes after the messages have arrived.
    """

    packing: int
    copying: int
    unpacking: int

    @property
    def total(self) -> int:
        return self.packing + self.copying + self.unpacking


def is_move(operator: Operator) -> bool:
    """Return whether the operator exchanges messages within its split group."""
    return isinstance(getattr(operator, "spec", None), RedistributeSpec | ReduceScatterSpec)


def transfer_of(operator: Operator) -> Transfer:
    """Return this rank's messages and local copy in a move."""
    assert isinstance(operator, RedistributeOperator | ReduceScatterOperator)
    return operator.share


def move_traffic(operator: Operator, action: Action, *, accumulate: bool = False) -> MoveTraffic:
    """Return the traffic of a move in phase FORWARD, INPUT or RECOMPUTE; zero in all other phases.

    If `accumulate` is set, the input gradient is added to an existing one.
    """
    item_bytes, share = operator.inputs[0].item_bytes, transfer_of(operator)
    owned, wanted = operator.inputs[0].size, operator.output.size
    if isinstance(operator.spec, ReduceScatterSpec):  # the adjoint of a move from the owners to all ranks
        owned, wanted = wanted, owned
        action = {Action.FORWARD: Action.INPUT, Action.INPUT: Action.FORWARD}.get(action, action)
    if action is Action.FORWARD:
        keeps = isinstance(operator, RedistributeOperator) and operator.recomputes_output
        elements = _forward(share, wanted, keeps=keeps)
    elif action is Action.INPUT:
        zeroed = owned if share.spare and not accumulate else 0  # of the local source, to which received gradients are added
        elements = 2 * share.receive_size, (2 + accumulate) * _local_size(share) + zeroed, 3 * share.send_size
    elif action is Action.RECOMPUTE:
        _, copying, unpacking = _forward(share, wanted, keeps=False)
        elements = 0, copying, unpacking
    else:
        elements = 0, 0, 0
    return MoveTraffic(*(count * item_bytes for count in elements))


def _forward(share: Transfer, wanted: int, *, keeps: bool) -> tuple[int, int, int]:
    """Return the elements read and written for packing, copying and unpacking.

    Args:
        wanted: size of the local target.
        keeps: whether received elements are copied a second time.
    """
    zeroed = wanted if share.gaps else 0
    return 2 * share.send_size, 2 * _local_size(share) + zeroed, (2 + 2 * keeps) * share.receive_size


def _local_size(share: Transfer) -> int:
    return 0 if share.local is None else size_of(share.local[0])


# _SLICE_ELEMENTS: weights of a rank's part of a slice of usual size
_WARM_UP, _MOST_ELEMENTS, _SLICE_ELEMENTS = 2, 1 << 24, 1 << 19


@dataclass(frozen=True)
class FactorProduct:
    """Product x^T dy of the inputs x (samples, inputs) and the errors dy (samples, outputs) of a linear layer."""

    samples: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        return 2 * self.samples * self.inputs * self.outputs

    def bytes(self, item_bytes: int) -> int:
        """Return the bytes read and written."""
        read = self.samples * (self.inputs + self.outputs)
        return (read + self.inputs * self.outputs) * item_bytes


def product_of(step: PlannedStep, samples: int) -> FactorProduct | None:
    """Return the product that computes the weight gradient of a linear layer over `samples` samples; None for other steps."""
    spec = step.operator.spec if step.node is not None else None
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    if not isinstance(step.operator, SufficientFactors) or not isinstance(inner, LinearSpec):
        return None
    return FactorProduct(samples, inner.features_in, inner.features_out)


def products_of(plan: ExecutionPlan, samples: int) -> list[FactorProduct]:
    """Return the products of all linear layers of a plan."""
    products = (product_of(step, samples) for step in plan.steps)
    return [product for product in products if product is not None]


def time_product(
    product: FactorProduct,
    dtype: str,
    steps: int,
    clock: Callable[[], float],
    before: Callable[[], None] = lambda: None,
    arithmetic: Arithmetic | None = None,
) -> float:
    """Return the median of the times, by `clock`, of `steps` products of random matrices of `dtype`, after two warm-up products.

    Rows are multiplied in slices, as in a step. The time of a large product follows from that of some of its rows.

    Args:
        before: callback before each product, see `TimedProgram.measure`.
        arithmetic: host arithmetic that multiplies; None, or a device's: NumPy.
    """
    random, rows = np.random.default_rng(0), min(product.inputs, max(1, _MOST_ELEMENTS // product.outputs))
    inputs, errors = (
        random.standard_normal((product.samples, width), np.float32).astype(dtype) for width in (rows, product.outputs)
    )
    gradient = np.zeros((rows, product.outputs), dtype)
    multiply = (arithmetic if isinstance(arithmetic, HostArithmetic) else HostArithmetic()).multiply
    slice_rows = max(1, _SLICE_ELEMENTS // product.outputs)
    seconds = []
    for _ in range(_WARM_UP + steps):
        before()
        begin = clock()
        for low in range(0, rows, slice_rows):
            multiply(inputs[:, low : low + slice_rows].T, errors, gradient[low : low + slice_rows])
        seconds.append(clock() - begin)
    return float(np.median(seconds[_WARM_UP:])) * product.inputs / rows


_FORWARD = (Action.FORWARD, Action.RECOMPUTE, Action.COPY)
_PHASES = (*_FORWARD, Action.PARAMETERS, Action.INPUT)


@dataclass(frozen=True)
class OperatorWork:
    """Work of one call.

    Attributes:
        flops: number of floating-point operations; a multiply-add counts as two.
        bytes: bytes read and written, including those of the following attributes.
        weight_bytes: bytes of weights, or of their gradients, that a convolution or linear layer reads or writes. If the kernel
            uses a copy in another format, these are the bytes that copying reads and writes.
        transposed_bytes: bytes that copying reads and writes for the kernel of an input's gradient, which transposes weights.
        winograd_flops: number of operations if the kernel computes by Winograd, otherwise 0; `flops` is that of a direct kernel.
    """

    kind: OperatorClass  # class whose rate applies
    flops: int
    bytes: int
    weight_bytes: int = 0
    transposed_bytes: int = 0
    winograd_flops: int = 0

    @property
    def is_nothing(self) -> bool:
        """Whether the call does no work."""
        return not self.flops and not self.bytes

    def seconds(self, rate: OperatorRate) -> float:
        """Return the seconds of the call on a rank with this rate."""
        n_bytes, seconds = self.bytes, rate.call_seconds
        for amount, speed in (
            (self.weight_bytes, rate.weight_bytes_per_second),
            (self.transposed_bytes, rate.transposed_bytes_per_second),
        ):
            if speed is not None:
                n_bytes -= amount
                seconds += amount / speed
        flops_seconds = self.flops / rate.flops_per_second
        if self.winograd_flops and rate.winograd_flops_per_second is not None:
            flops_seconds = self.winograd_flops / rate.winograd_flops_per_second
        return seconds + max(flops_seconds, n_bytes / rate.bytes_per_second)


def class_of(spec: Spec | None) -> OperatorClass:
    """Return the class of an operation; a copy between layouts (None) belongs to the memory-bound class."""
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    if isinstance(inner, Conv2dSpec):
        return OperatorClass.CONVOLUTION
    return OperatorClass.PRODUCT if isinstance(inner, LinearSpec) else OperatorClass.MEMORY


def work_of(step: PlannedStep, action: Action, memory: StepMemory | None = None) -> OperatorWork:
    """Return the work of an operator's phase.

    For products, the gradients of the parameters and of each input need about as many operations as the forward pass.

    Args:
        memory: use of memory, see `ComputeCosts.seconds`.
    """
    operator = step.operator
    spec = operator.spec if step.node is not None else None
    kind = class_of(spec).of_dtype(operator.inputs[0].dtype)
    if action not in _PHASES:
        return OperatorWork(kind, 0, 0)
    if is_move(operator):
        return OperatorWork(kind, 0, move_traffic(operator, action, accumulate=memory is not None and memory.accumulate[0]).total)
    if step.is_view:
        copied = action is Action.INPUT and memory is not None and memory.copies_gradient
        return OperatorWork(kind, 0, 2 * operator.output.bytes if copied else 0)
    if action is Action.INPUT and ((step.joint_backward and step.has_parameters) or not any(_requested(step, memory))):
        return OperatorWork(kind, 0, 0)  # a joint backward counts with the gradients of the parameters
    flops = 0 if spec is None else spec.flops(*(x.plain() for x in operator.inputs))
    if action in _FORWARD:
        phase, n_bytes = 0, sum(x.bytes for x in operator.inputs) + operator.output.bytes + _scale_bytes(step, spec)
        if isinstance(spec, BatchNormSpec):  # read for the moments, and again to normalise; the sum is added in place
            n_bytes += operator.inputs[0].bytes + (2 * operator.output.bytes if spec.add else 0)
    elif action is Action.PARAMETERS:
        phase, n_bytes = 1, operator.inputs[0].bytes + operator.output.bytes + _scale_bytes(step, spec)
        if step.joint_backward:  # computes both sums, then the input's gradient
            n_bytes += _input_bytes(step, spec, memory)
    else:
        phase, n_bytes = 2, _input_bytes(step, spec, memory)
    share, copied_bytes = operator.winograd_shares[phase], operator.copied_bytes[phase]
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    of_weights = copied_bytes
    if not copied_bytes and isinstance(inner, Conv2dSpec | LinearSpec):  # at 4 bytes per element or more
        # The size is that of the spec, because steps contain only the parameters' names.
        of_weights = math.prod(inner.weight_shape) * max(item_bytes("float32"), operator.inputs[0].item_bytes)
    transposed_bytes = copied_bytes if action is Action.INPUT else 0
    winograd_flops = 0 if share is None else round(flops * share)
    weight_bytes = of_weights - transposed_bytes
    return OperatorWork(kind, flops, n_bytes + of_weights, weight_bytes, transposed_bytes, winograd_flops)


def _input_bytes(step: PlannedStep, spec: Spec | None, memory: StepMemory | None) -> int:
    """Return the bytes read and written by the phase that computes input gradients.

    The phase reads the output's gradient and the values that backward needs. It writes each requested gradient, and also reads a
    gradient to which it adds.
    """
    operator = step.operator
    n_bytes = operator.output.bytes + _scale_bytes(step, spec)
    if class_of(spec) is OperatorClass.MEMORY:
        n_bytes += sum(x.bytes for x, needed in zip(operator.inputs, operator.needs_inputs, strict=False) if needed)
        n_bytes += operator.output.bytes if operator.needs_output else 0
    for i, (x, requested) in enumerate(zip(operator.inputs, _requested(step, memory), strict=True)):
        added = memory is not None and memory.accumulate[i]
        apart = memory is not None and any(number == i for number, _, _ in memory.sums)
        n_bytes += x.bytes * requested * (1 + added + 3 * apart)
    return n_bytes


def _requested(step: PlannedStep, memory: StepMemory | None) -> tuple[bool, ...]:
    """Return whether the gradient of each input is requested."""
    if memory is None:
        return (True,) * len(step.inputs)
    return tuple(region is not None for region in memory.input_grads)


def _scale_bytes(step: PlannedStep, spec: Spec | None) -> int:
    """Return the bytes of the scale and shift of a batch norm, at 4 bytes per element or more; 0 for other operators."""
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    size = 2 * inner.channels if isinstance(inner, BatchNormSpec) else 0
    return size * max(item_bytes("float32"), step.operator.inputs[0].item_bytes)
