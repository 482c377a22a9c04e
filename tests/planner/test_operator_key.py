"""Keys of operators: equal where nothing but names differ, and of one family where nothing but extents do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import DropoutSpec, TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, ExecutionPlan
from hpctrain.nn.network import Network
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.operator_key import OperatorKey, operator_key
from hpctrain.planner.stand_ins import StandInGroup

NETWORK = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet())


def _plan(batch: int) -> ExecutionPlan:
    return compile_graph(NETWORK.graph(batch), NETWORK.kernels, training=True)


def _keys(plan: ExecutionPlan) -> list[OperatorKey]:
    return [operator_key(plan.steps[k], action, plan.memory[k]) for action, k in (*plan.forward, *plan.backward)]


def test_equal_blocks_of_a_network_share_keys() -> None:
    keys = _keys(_plan(2))
    assert len(set(keys)) < 0.7 * len(keys)


def test_batches_differ_in_their_extents_alone() -> None:
    for two, five in zip(_keys(_plan(2)), _keys(_plan(5)), strict=True):
        assert two.family == five.family
        assert (two.extents[0], five.extents[0]) == (2, 5)
        assert two.extents[1:] == five.extents[1:]


@pytest.mark.parametrize("use", list(Parallelism))
def test_no_key_names_a_layer_or_an_address(use: Parallelism) -> None:
    plan = ParallelPlan(2, 1, default=use)
    partitioned = partition_graph(NETWORK.graph(4), plan, (2, 2))
    texts = []
    for _ in range(2):  # made anew: objects lie elsewhere
        local = compile_graph(partitioned.local(0, StandInGroup(0, 2)), NETWORK.kernels, training=True)
        texts.append([str(key) for key in _keys(local)])
    assert texts[0] == texts[1]
    names = {node.name for node in NETWORK.graph(1).nodes if "." in node.name}
    assert not any(name in text for name in names for text in texts[0])


def test_what_a_gradient_does_with_its_memory_is_part_of_the_key() -> None:
    plan = _plan(2)
    k = next(k for k, memory in enumerate(plan.memory) if any(memory.accumulate))
    step, memory = plan.steps[k], plan.memory[k]
    writing = replace(memory, accumulate=(False,) * len(memory.accumulate))
    unasked = replace(memory, input_grads=(None,) * len(memory.input_grads))
    families = {operator_key(step, Action.INPUT, one).family for one in (memory, writing, unasked)}
    assert len(families) == 3
    assert operator_key(step, Action.FORWARD, memory) != operator_key(step, Action.INPUT, memory)


def test_masks_of_different_layers_take_the_same_time() -> None:
    kernels, x = NumpyKernelSet(), TensorSpec((2, 8))
    step = next(step for step in _plan(1).steps if step.node is not None)
    keys = set()
    for layer, seed, rate in (("a", 0, 0.5), ("b", 1, 0.5), ("a", 0, 0.25)):
        operator = kernels.make(DropoutSpec(rate, layer, seed), (x,), training=True)
        keys.add(operator_key(replace(step, operator=operator), Action.FORWARD))
    assert len(keys) == 2
