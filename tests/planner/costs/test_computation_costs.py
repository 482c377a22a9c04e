"""Costs of computation: work of operators, their keys and stored times, and costs by rates and by measurement."""

from __future__ import annotations

import json
import math
import os
import pwd
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import Conv2dSpec, DropoutSpec, ReluSpec, TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, ExecutionPlan, PlannedStep, StepMemory
from hpctrain.nn.network import Network
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.costs.compute_costs import MeasuredCosts, RateCosts, input_key, others_key, product_key, update_key
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate, slowest_rate
from hpctrain.planner.costs.operator_times import (
    REACH,
    OperatorKey,
    OperatorTimes,
    Setting,
    cache_file,
    interpolated,
    operator_key,
)
from hpctrain.planner.costs.operator_work import FactorProduct, OperatorWork, class_of, work_of
from hpctrain.planner.measure.program_timing import FakeSplitGroup

NETWORK = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet())


def _plan(batch: int) -> ExecutionPlan:
    return compile_graph(NETWORK.graph(batch), NETWORK.kernels, training=True)


def _all(plan: ExecutionPlan) -> list[tuple[PlannedStep, Action, StepMemory]]:
    return [(plan.steps[k], action, plan.memory[k]) for action, k in (*plan.forward, *plan.backward)]


def test_forward_operations_are_those_of_the_program() -> None:
    plan = _plan(3)
    products = (OperatorClass.CONVOLUTION, OperatorClass.PRODUCT)
    works = [work_of(plan.steps[k], action, plan.memory[k]) for action, k in plan.forward]
    nodes = [(step.node, [plan.tensors[i].plain() for i in step.inputs]) for step in plan.steps]
    flops = sum(node.spec.flops(*inputs) for node, inputs in nodes if node is not None)
    assert sum(work.flops for work in works) == pytest.approx(flops, rel=1e-3)
    share = sum(work.flops for work in works if work.kind in products) / sum(work.flops for work in works)
    assert share > 0.9


def test_gradients_of_a_product_take_its_operations_twice_but_once_where_it_reads_images() -> None:
    plan = _plan(2)
    for k, step in enumerate(plan.steps):
        if class_of(step.operator.spec) is OperatorClass.MEMORY:
            continue
        forward, weights, inputs = (
            work_of(step, action, plan.memory[k]).flops for action in (Action.FORWARD, Action.PARAMETERS, Action.INPUT)
        )
        assert weights == forward
        assert inputs == (0 if step.inputs == (0,) else forward)


def test_operations_of_every_action_grow_with_the_samples() -> None:
    once, thrice = _plan(1), _plan(3)
    for one, three in zip((work_of(*each) for each in _all(once)), (work_of(*each) for each in _all(thrice)), strict=True):
        assert three.flops == 3 * one.flops
        assert one.bytes <= three.bytes <= 3 * one.bytes


def test_an_addition_to_a_gradient_reads_it_too() -> None:
    plan = _plan(2)
    adding = [(k, i) for k, memory in enumerate(plan.memory) for i, adds in enumerate(memory.accumulate) if adds]
    assert adding
    for k, _ in adding:
        step = plan.steps[k]
        assert work_of(step, Action.INPUT, plan.memory[k]).bytes > work_of(step, Action.INPUT).bytes


def test_what_does_nothing_has_no_work() -> None:
    plan = _plan(2)
    for k, step in enumerate(plan.steps):
        assert work_of(step, Action.BEGIN, plan.memory[k]).is_nothing
        assert work_of(step, Action.FREE, plan.memory[k]).is_nothing
        assert step.is_view == work_of(step, Action.FORWARD, plan.memory[k]).is_nothing


def test_a_relu_reads_and_writes_once() -> None:
    x = TensorSpec((2, 4, 4, 3))
    operator = NumpyKernelSet().make(ReluSpec(), (x,), training=True)
    plan = _plan(1)
    node = next(step.node for step in plan.steps if isinstance(step.operator.spec, ReluSpec))
    step = type(plan.steps[0])("relu", operator, (0,), 1, node)
    assert work_of(step, Action.FORWARD).bytes == 2 * x.bytes


LINK = Link((LinkSegment(0, 1e-6, 1e-9),))
RATES = {
    OperatorClass.CONVOLUTION: OperatorRate(1e10, 1e10, 1e-5),
    OperatorClass.PRODUCT: OperatorRate(5e9, 1e10, 2e-5),
    OperatorClass.MEMORY: OperatorRate(1e9, 5e9, 3e-6),
}
MACHINE = Machine("test", 1, 2, 1.0, 1 << 30, LINK, LINK, 2, RATES)


def test_a_call_takes_its_overhead_and_the_longer_of_operations_and_bytes() -> None:
    plan, costs = _plan(2), RateCosts(MACHINE)
    kinds = set()
    for step, action, memory in _all(plan):
        work = work_of(step, action, memory)
        kinds.add(work.kind)
        if work.is_nothing:
            assert costs.seconds(step, action, memory) == 0.0
            continue
        rate = RATES[work.kind]
        by_flops, by_bytes = work.flops / rate.flops_per_second, work.bytes / rate.bytes_per_second
        assert costs.seconds(step, action, memory) == pytest.approx(rate.call_seconds + max(by_flops, by_bytes))
    assert kinds == set(RATES)


def test_a_prediction_knows_the_precision() -> None:
    """A step in bfloat16 has its own rates and measured times. Its updates are those of 32-bit parameters."""
    network = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet(), dtype="bfloat16")
    halves, plan, costs = compile_graph(network.graph(2), network.kernels, training=True), _plan(2), RateCosts(MACHINE)
    names = {step.name: step for step in plan.steps}
    for step in halves.steps:
        half, whole = (costs.seconds(one, Action.FORWARD) for one in (step, names[step.name]))
        assert half <= whole
        if step.node is not None and class_of(step.node.spec) is OperatorClass.CONVOLUTION:
            work, rate = work_of(names[step.name], Action.FORWARD), RATES[OperatorClass.CONVOLUTION]
            assert half - rate.call_seconds <= 0.7 * max(work.flops / rate.flops_per_second, work.bytes / rate.bytes_per_second)
        assert operator_key(step, Action.FORWARD) != operator_key(names[step.name], Action.FORWARD)
    assert RateCosts(MACHINE, "bfloat16").update_seconds(1000) == costs.update_seconds(1000)


def test_rates_of_bfloat16_are_for_operators_of_bfloat16() -> None:
    """Find a plan in bfloat16 with costs of float32, or updates of float32 parameters with costs of bfloat16."""
    halves = {kind.of_dtype("bfloat16"): replace(rate, call_seconds=1.0) for kind, rate in RATES.items()}
    costs, plain = RateCosts(replace(MACHINE, rates={**RATES, **halves}), "bfloat16"), RateCosts(MACHINE)
    network = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet(), dtype="bfloat16")
    for plan, least in ((compile_graph(network.graph(2), network.kernels, training=True), 1.0), (_plan(2), 0.0)):
        seconds = [costs.seconds(*each) for each in _all(plan)]
        assert all(one == 0 or least < one < least + 1 for one in seconds)
    assert costs.update_seconds(1000) == plain.update_seconds(1000)
    assert costs.step_seconds(1000, 9) == plain.step_seconds(1000, 9)


def test_copies_of_weights_and_fewer_operations_of_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would find a phase with the copies or the operations of another phase."""
    plan = _plan(2)
    k, step = next((k, step) for k, step in enumerate(plan.steps) if isinstance(step.operator.spec, Conv2dSpec) and k)
    actions = (Action.FORWARD, Action.PARAMETERS, Action.INPUT)
    before = [work_of(step, action, plan.memory[k]) for action in actions]
    assert isinstance(step.operator.spec, Conv2dSpec)
    weight_bytes = 4 * math.prod(step.operator.spec.weight_shape)
    assert [(work.weight_bytes, work.transposed_bytes) for work in before] == [(weight_bytes, 0)] * 3
    monkeypatch.setattr(step.operator, "copied_bytes", (1000, 200, 30))
    monkeypatch.setattr(step.operator, "winograd_shares", (0.5, None, 0.125))
    after = [work_of(step, action, plan.memory[k]) for action in actions]
    assert [(work.weight_bytes, work.transposed_bytes) for work in after] == [(1000, 0), (200, 0), (0, 30)]
    assert [work.winograd_flops / work.flops for work in after] == [0.5, 0.0, 0.125]
    assert [work.flops for work in after] == [work.flops for work in before]
    of_weights = [work.weight_bytes + work.transposed_bytes for work in after]
    assert [work.bytes - one for work, one in zip(after, of_weights, strict=True)] == [one.bytes - weight_bytes for one in before]


def test_weights_and_winograd_take_their_own_time_if_their_rates_are_known() -> None:
    """Would find bytes of weights that count twice or not at all, and Winograd's rate applied to other kernels."""
    work, plain = OperatorWork(OperatorClass.CONVOLUTION, 10**7, 5 * 10**6, 2 * 10**6, 10**6), OperatorRate(1e10, 1e9, 1e-3)
    assert work.seconds(plain) == pytest.approx(1e-3 + 5e-3)
    assert work.seconds(replace(plain, weight_bytes_per_second=1e8)) == pytest.approx(1e-3 + 2e-2 + 3e-3)
    both = replace(plain, weight_bytes_per_second=1e8, transposed_bytes_per_second=1e7, winograd_flops_per_second=1e9)
    assert work.seconds(both) == pytest.approx(1e-3 + 2e-2 + 1e-1 + 2e-3)
    assert replace(work, winograd_flops=5 * 10**6).seconds(both) == pytest.approx(1e-3 + 2e-2 + 1e-1 + 5e-3)
    assert replace(work, winograd_flops=5 * 10**6).seconds(plain) == work.seconds(plain)
    assert work.seconds(slowest_rate([both], 4)) == pytest.approx(work.seconds(both) / 4)


def test_updates_are_bound_by_bytes_and_cost_nothing_where_there_is_nothing() -> None:
    costs = RateCosts(MACHINE)
    assert costs.update_seconds(0) == 0.0
    assert costs.update_seconds(2000) == pytest.approx(2 * costs.update_seconds(1000))
    assert RateCosts(MACHINE, "float64").update_seconds(1000) == pytest.approx(2 * costs.update_seconds(1000))
    assert costs.step_seconds(1 << 20, 0) > costs.step_seconds(0, 0) > 0.0


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_all_rates_of_a_machine_scale_with_its_compute(factor: float) -> None:
    plan, usual, scaled = _plan(2), RateCosts(MACHINE), RateCosts(MACHINE.scaled(compute=factor))
    for step, action, memory in _all(plan):
        assert factor * scaled.seconds(step, action, memory) == pytest.approx(usual.seconds(step, action, memory))
    assert factor * scaled.update_seconds(1000) == pytest.approx(usual.update_seconds(1000))
    assert factor * scaled.step_seconds(1000, 7) == pytest.approx(usual.step_seconds(1000, 7))
    assert scaled.measured_share() == 0.0


def _keys(plan: ExecutionPlan) -> list[OperatorKey]:
    return [operator_key(*each) for each in _all(plan)]


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
    for _ in range(2):  # made again: objects lie elsewhere
        local = compile_graph(partitioned.local(0, FakeSplitGroup(0, 2)), NETWORK.kernels, training=True)
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


SETTING = Setting("processor", "numpy 2", 1, 2)


def _key(n: int, h: int = 4, w: int = 4, family: str = "conv", details: str = "") -> OperatorKey:
    return OperatorKey(family, (n, h, w), details)


def test_measured_times_come_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "times.json"
    times = OperatorTimes(SETTING, path)
    times.put(_key(2), 0.5)
    times.put(_key(2, details="padded"), 0.25)
    times.save()
    again = OperatorTimes(SETTING, path)
    assert (len(again), again.seconds(_key(2)), again.seconds(_key(2, details="padded"))) == (2, 0.5, 0.25)
    assert again.measured(_key(2))
    assert again.measured(_key(2, details="other"))
    assert again.seconds(_key(2, details="other")) in (0.5, 0.25)
    assert not again.measured(_key(3))  # has a time, which is that of another size


@pytest.mark.parametrize(
    "change",
    [{"processor": "q"}, {"kernels": "numpy 3"}, {"threads": 2}, {"concurrency": 1}],
    ids=lambda change: next(iter(change)),
)
def test_times_hold_in_their_setting_alone_and_settings_share_a_file(tmp_path: Path, change: dict[str, Any]) -> None:
    path, other = tmp_path / "times.json", replace(SETTING, **change)
    for setting, seconds in ((SETTING, 1.0), (other, 2.0)):
        assert len(OperatorTimes(setting, path)) == 0
        times = OperatorTimes(setting, path)
        times.put(_key(1), seconds)
        times.save()
    assert [OperatorTimes(setting, path).seconds(_key(1)) for setting in (SETTING, other)] == [1.0, 2.0]


def test_saving_keeps_what_others_have_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    first, second = OperatorTimes(SETTING, path), OperatorTimes(SETTING, path)
    first.put(_key(1), 1.0)
    second.put(_key(2), 2.0)
    first.save()
    second.save()
    assert len(OperatorTimes(SETTING, path)) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "times": {}}', '{"format": 1, "times": []}'])
def test_a_file_of_others_is_left_out_with_a_note(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "times.json"
    path.write_text(content)
    times = OperatorTimes(SETTING, path)
    assert len(times) == 0
    times.put(_key(1), 1.0)
    times.save()
    assert OperatorTimes(SETTING, path).seconds(_key(1)) == 1.0


def test_an_unreadable_file_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(OperatorTimes(SETTING, tmp_path)) == 0
    assert caplog.text.count(str(tmp_path)) == 1


def test_damaged_entries_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    damaged = [["conv", [2, 4], "", 1.0], ["conv", [3, 4, 4], "", -1.0], 7, ["conv", [4, 4, 4], "", "x"]]
    entries = [["conv", [1, 4, 4], "", 1.0], *damaged]
    path.write_text(json.dumps({"format": 1, "times": {str(SETTING): entries}}))
    times = OperatorTimes(SETTING, path)
    assert len(times) == 1
    assert times.seconds(_key(1)) == 1.0


@pytest.mark.parametrize("dim", range(3))
def test_between_two_sizes_of_one_dim_it_is_interpolated(dim: int) -> None:
    times = OperatorTimes(SETTING)
    for size in (4, 8):
        extents = [4, 4, 4]
        extents[dim] = size
        times.put(_key(*extents), 1.0 + size)
    wanted = [4, 4, 4]
    wanted[dim] = 6
    assert times.seconds(_key(*wanted)) == pytest.approx(7.0)
    wanted[(dim + 1) % 3] = 5
    assert times.seconds(_key(*wanted)) is None
    assert times.seconds(_key(6, family="other")) is None


def test_outside_the_points_the_rate_holds_up_to_its_reach() -> None:
    assert interpolated([(8, 2.0)], 16) == pytest.approx(4.0)
    assert interpolated([(8, 2.0)], 4) == pytest.approx(1.0)
    assert interpolated([(8, 2.0)], int(8 * REACH) + 1) is None
    assert interpolated([(8, 2.0)], 3) is None
    assert interpolated([], 3) is None
    assert interpolated([(8, 2.0)], 0) is None


def test_beyond_two_points_a_call_keeps_its_own_cost() -> None:
    points = [(4, 1.4), (8, 1.8)]  # 1 s a call and 0.1 s a sample
    assert interpolated(points, 16) == pytest.approx(2.6)
    assert interpolated(points, 2) == pytest.approx(1.2)
    assert interpolated([(4, 2.0), (8, 1.0)], 16) == pytest.approx(1.0)  # noise: no less than the last


def test_the_file_lies_in_the_cache_directory_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_file({"XDG_CACHE_HOME": str(tmp_path)}).parent == tmp_path / "hpctrain"
    assert cache_file({}).is_relative_to(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache")
    assert cache_file({"XDG_CACHE_HOME": "not/absolute"}) == cache_file({})
    monkeypatch.setattr("hpctrain.core.files.pwd.getpwuid", lambda uid: {}[uid])
    assert cache_file({}) is None


EQUAL_RATES = {kind: OperatorRate(1e10, 1e10, 1e-5) for kind in OperatorClass}
BY_RATE = RateCosts(Machine("test", 1, 2, 1.0, 1 << 30, LINK, LINK, 2, EQUAL_RATES))


def _measured(*batches: int) -> OperatorTimes:
    """All operators at these batches: 2 s a call and 1 s a sample."""
    times = OperatorTimes(Setting("processor", "numpy"))
    for batch in batches:
        for key in _keys(_plan(batch)):
            times.put(key, 2.0 + batch)
    return times


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_measured_and_interpolated_times_are_used(batch: int) -> None:
    costs, plan = MeasuredCosts(_measured(2, 8), BY_RATE), _plan(batch)
    for step, action, memory in _all(plan):
        expected = 0.0 if action in (Action.FREE, Action.BEGIN) else 2.0 + batch
        assert costs.seconds(step, action, memory) == pytest.approx(expected)
    assert costs.measured_share() == 1.0


def test_far_from_measured_sizes_rates_hold_and_the_share_says_so() -> None:
    costs, plan = MeasuredCosts(_measured(1), BY_RATE), _plan(8)
    for step, action, memory in _all(plan):
        assert costs.seconds(step, action, memory) == BY_RATE.seconds(step, action, memory)
    assert costs.measured_share() == 0.0
    plan = _plan(1)
    costs.seconds(plan.steps[0], Action.FORWARD, plan.memory[0])
    assert 0.0 < costs.measured_share() < 1.0


def test_the_rest_of_a_step_scales_from_the_nearest_measurement() -> None:
    times = OperatorTimes(Setting("processor", "numpy"))
    costs = MeasuredCosts(times, BY_RATE)
    assert costs.update_seconds(1000) == BY_RATE.update_seconds(1000)
    assert costs.step_seconds(1000, 5) == BY_RATE.step_seconds(1000, 5)
    times.put(update_key(1000), 1.0)
    times.put(input_key(100), 0.5)
    times.put(others_key(10), 3.0)
    assert costs.update_seconds(1000) == 1.0
    assert costs.update_seconds(10) == pytest.approx(0.01)
    assert costs.update_seconds(0) == 0.0
    assert costs.step_seconds(100, 10) == pytest.approx(3.5)
    assert costs.step_seconds(0, 12) == pytest.approx(3.6)


def test_products_of_other_depths_follow_from_measured_ones() -> None:
    times = OperatorTimes(Setting("processor", "numpy"))
    costs = MeasuredCosts(times, BY_RATE)
    few, some, many = (FactorProduct(samples, 50, 20) for samples in (4, 6, 8))
    assert costs.product_seconds(few) == BY_RATE.product_seconds(few) < BY_RATE.product_seconds(FactorProduct(4000, 50, 20))
    times.put(product_key(few), 1.0)
    times.put(product_key(many), 2.0)
    assert [costs.product_seconds(product) for product in (few, some, many)] == [1.0, 1.5, 2.0]
