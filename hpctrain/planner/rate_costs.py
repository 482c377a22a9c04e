"""Seconds of operators from a machine's rates alone: what is known where nothing was measured."""

from __future__ import annotations

from hpctrain.backend.dtypes import item_bytes
from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.planner.factor_products import FactorProduct
from hpctrain.planner.machine import Machine, OperatorClass
from hpctrain.planner.operator_work import work_of

# Elements of parameters' size that an update with momentum reads (weight, gradient, momentum, and the weight once more for the
# look at finite numbers) and writes (weight, momentum).
_UPDATE_ACCESSES = 6
# Calls of about an operator's own cost in a step beside its operators: loss, sums, message, learning rate, input.
_CALLS_OF_A_STEP = 20


class RateCosts:
    """`ComputeCosts` by flops, bytes and the rates of the machine's operator classes.

    Args:
        machine: its rates are those of one rank while all ranks of a node compute. dtype: of parameters.
    """

    def __init__(self, machine: Machine, dtype: str = "float32") -> None:
        self._rates, self._item_bytes = dict(machine.rates), item_bytes(dtype)

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """call_seconds + max(flops / flops_per_second, bytes / bytes_per_second); 0 where nothing is done."""
        work = work_of(step, action, memory)
        if work.is_nothing:
            return 0.0
        rate = self._rates[work.kind]
        return rate.call_seconds + max(work.flops / rate.flops_per_second, work.bytes / rate.bytes_per_second)

    def product_seconds(self, product: FactorProduct) -> float:
        """As of any other call of its operations and bytes."""
        rate = self._rates[OperatorClass.PRODUCT]
        by_flops, by_bytes = product.flops / rate.flops_per_second, product.bytes(self._item_bytes) / rate.bytes_per_second
        return rate.call_seconds + max(by_flops, by_bytes)

    def update_seconds(self, elements: int) -> float:
        """Seconds of the update with momentum of so many elements, and the look at them."""
        rate = self._rates[OperatorClass.MEMORY]
        return _UPDATE_ACCESSES * elements * self._item_bytes / rate.bytes_per_second

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Seconds of the input's copy and a number of calls. operators: their own calls count in `seconds`."""
        rate = self._rates[OperatorClass.MEMORY]
        return _CALLS_OF_A_STEP * rate.call_seconds + 2 * input_bytes / rate.bytes_per_second

    def measured_share(self) -> float:
        """0: rates are no measurement of an operator."""
        return 0.0
