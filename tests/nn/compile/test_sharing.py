"""Sharing, from live ranges: in place where nobody reads later what is overwritten, and nowhere else."""

from __future__ import annotations

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.compile.compiler import plan_steps
from hpctrain.nn.compile.liveness import Use
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.nn.compile.sharing import Sharing, lifetimes
from tests.support.wrong_plans import steps_of


def _plan(network: str) -> ExecutionPlan:
    return plan_steps(steps_of(network, NumpyKernelSet()))


def _in_place(plan: ExecutionPlan) -> dict[str, tuple[bool, bool]]:
    """By step that is no view: its output lies in its first input, that input's gradient in its output's."""
    return {
        step.name: (
            memory.output == memory.inputs[0],
            memory.output_grad is not None and memory.output_grad == memory.input_grads[0],
        )
        for step, memory in zip(plan.steps, plan.memory, strict=True)
        if not step.is_view and memory.output.size_bytes
    }


def test_a_relu_works_in_place_behind_a_convolution_and_not_where_a_sum_reads_its_input() -> None:
    assert _in_place(_plan("plain"))["relu1"] == (True, True)
    assert _in_place(_plan("preactivation"))["block.relu"] == (False, False)


def test_a_batch_norm_keeps_its_input_but_hands_the_gradient_on_in_place() -> None:
    assert _in_place(_plan("residual"))["layer1.bn1"] == (False, True)


def test_operators_that_cannot_work_in_place_never_do() -> None:
    for network in ("plain", "residual", "split", "overlapped"):
        plan = _plan(network)
        shares = _in_place(plan)
        able = {step.name for step in plan.steps if step.in_place}
        assert {name for name, both in shares.items() if any(both)} <= able


def test_nobody_writes_over_the_callers_images() -> None:
    for network in ("plain", "residual", "split"):
        plan = _plan(network)
        assert all(memory.output != plan.x for memory in plan.memory)


def test_a_storage_is_as_large_as_its_largest_value_and_lives_as_long_as_any() -> None:
    uses = {
        ("activation", 0): Use(10, (0,), (1, 3)),
        ("activation", 1): Use(10, (3,), (4,)),
        ("activation", 2): Use(30, (8,), (9,)),
        ("scratch", 0): Use(5, (2, 7), ()),
    }
    blocks = lifetimes(uses, Sharing((0, 0, 0), ()))
    assert blocks["activation", 0].spans == ((0, 4), (8, 9))
    assert blocks["activation", 0].size_bytes == 30
    assert blocks["scratch", 0].spans == ((2, 2), (7, 7))
