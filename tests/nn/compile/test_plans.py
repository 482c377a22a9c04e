"""Each pass of the compiler by itself; the validator passes right plans and finds faults that are made on purpose."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.operators import KernelSet
from hpctrain.nn.compile import compiler
from hpctrain.nn.compile.compiler import compile_graph, plan_steps
from hpctrain.nn.compile.memory import Sharing, Use, lifetimes
from hpctrain.nn.compile.plan import Action, ExecutionPlan, Region
from hpctrain.nn.compile.steps import backward_actions, forward_actions, make_steps, recompute_path, recomputed_tensors
from hpctrain.nn.compile.validate import (
    ENVIRONMENT_VARIABLE,
    LOSS,
    InvalidPlanError,
    PlanFacts,
    SymbolicMemory,
    activation,
    gradient,
    validate,
)
from hpctrain_testing.run import clean_environment
from tests.support.sampling import amount
from tests.support.wrong_plans import FAULTS, GRAPHS, Fault, steps_of


def _without_operators(plan: ExecutionPlan) -> dict[str, object]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return values | {"steps": [(step.name, step.inputs, step.output) for step in plan.steps]}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("network", GRAPHS)
def test_the_same_graph_has_the_same_plan(network: str, training: bool) -> None:
    first, second = (compile_graph(GRAPHS[network](), NumpyKernelSet(), training=training) for _ in range(2))
    assert _without_operators(first) == _without_operators(second)


def test_a_plan_cannot_be_changed() -> None:
    plan = compile_graph(GRAPHS["plain"](), NumpyKernelSet(), training=True)
    assert not any(isinstance(value, list | dict | set) for value in vars(plan).values())
    for part in (plan, plan.steps[0], plan.memory[0], plan.x, plan.buffers[0]):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, None)


def test_every_step_gets_the_layouts_that_it_wants() -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    steps = steps_of("wide", OnednnKernelSet())
    copies = [step for step in steps.steps if step.node is None]
    assert copies
    for step in steps.steps:
        assert tuple(steps.tensors[tensor].layout for tensor in step.inputs) == tuple(x.layout for x in step.operator.inputs)
    assert len({(step.inputs, steps.tensors[step.output].layout) for step in copies}) == len(copies)  # none is made twice
    assert steps.tensors[steps.output].layout == "NHWC"


def test_evaluation_has_no_gradients() -> None:
    for training in (True, False):
        steps = make_steps(GRAPHS["plain"](), NumpyKernelSet(), training=training, input_gradient=False)
        assert any(steps.needs_grad) is training
        assert not steps.needs_grad[0]


@pytest.mark.parametrize("network", GRAPHS)
def test_every_step_runs_once_and_after_what_it_reads(network: str) -> None:
    steps = steps_of(network, NumpyKernelSet())
    done: set[int] = {0}
    for action, k in forward_actions(steps):
        assert set(steps.steps[k].inputs) <= done
        if action is Action.FORWARD:
            assert steps.steps[k].output not in done
            done.add(steps.steps[k].output)
    assert len(done) == len(steps.steps) + 1


@pytest.mark.parametrize("network", GRAPHS)
def test_every_gradient_is_computed_once_and_the_input_first_only_where_it_travels(network: str) -> None:
    steps = steps_of(network, NumpyKernelSet())
    actions = backward_actions(steps, recomputed_tensors(steps))
    assert len(set(actions)) == len(actions)
    for k, step in enumerate(steps.steps):
        assert ((Action.PARAMETERS, k) in actions) is step.has_parameters
        assert ((Action.INPUT, k) in actions) is steps.passes_back(k)
        if step.has_parameters and steps.passes_back(k):
            assert (actions.index((Action.INPUT, k)) < actions.index((Action.PARAMETERS, k))) is step.input_first


def test_a_halos_gradient_travels_while_the_parameters_are_computed() -> None:
    steps = steps_of("split", NumpyKernelSet())
    actions = backward_actions(steps, recomputed_tensors(steps))
    first = [k for k, step in enumerate(steps.steps) if step.input_first]
    assert first
    for k in first:
        place = actions.index((Action.INPUT, k))
        assert actions[place + 1 : place + 3] == ((Action.BEGIN, k - 1), (Action.PARAMETERS, k))


def test_nothing_is_made_again_before_somebody_needs_it() -> None:
    steps = steps_of("split", NumpyKernelSet())
    recomputed = recomputed_tensors(steps)
    actions = backward_actions(steps, recomputed)
    again = [place for place, (action, _) in enumerate(actions) if action is Action.RECOMPUTE]
    assert again
    for place in again:
        output = steps.steps[actions[place][1]].output
        assert output in steps.steps[actions[place + 1][1]].inputs
        assert recompute_path(steps, recomputed, output) == (actions[place][1],)


def test_only_what_an_operator_can_make_again_is() -> None:
    steps = steps_of("split", NumpyKernelSet())
    able = {step.output for step in steps.steps if step.recomputes_output}
    assert able
    assert recomputed_tensors(steps) == able
    assert not recomputed_tensors(steps_of("residual", NumpyKernelSet()))
    assert not recomputed_tensors(replace(steps, training=False))


def test_a_path_begins_at_what_is_kept_and_ends_at_what_is_wanted() -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    steps = steps_of("wide", OnednnKernelSet())
    recomputed = recomputed_tensors(steps)
    paths = [(tensor, recompute_path(steps, recomputed, tensor)) for tensor in recomputed]
    assert max(len(path) for _, path in paths) > 1  # a copy in another layout after a halo
    for tensor, path in paths:
        assert steps.steps[path[-1]].output == tensor
        assert steps.steps[path[0]].inputs[0] not in recomputed
        for before, after in itertools.pairwise(path):
            assert steps.steps[after].inputs[0] == steps.steps[before].output
    assert recompute_path(steps, recomputed, 0) == ()


def _shared_plan(network: str) -> ExecutionPlan:
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


def test_a_relu_works_in_place_after_a_convolution_and_not_where_a_sum_reads_its_input() -> None:
    assert _in_place(_shared_plan("plain"))["relu1"] == (True, True)
    assert _in_place(_shared_plan("preactivation"))["block.relu"] == (False, False)


def test_a_batch_norm_keeps_its_input_but_hands_the_gradient_on_in_place() -> None:
    assert _in_place(_shared_plan("residual"))["layer1.bn1"] == (False, True)


def test_operators_that_cannot_work_in_place_never_do() -> None:
    for network in ("plain", "residual", "split"):
        plan = _shared_plan(network)
        shares = _in_place(plan)
        able = {step.name for step in plan.steps if step.in_place}
        assert {name for name, both in shares.items() if any(both)} <= able


def _facts(network: str) -> PlanFacts:
    return PlanFacts(compile_graph(GRAPHS[network](), NumpyKernelSet(), training=True))


def test_a_gradient_is_complete_when_all_readers_have_added_to_it() -> None:
    facts = _facts("preactivation")
    steps = {step.name: k for k, step in enumerate(facts.plan.steps)}
    tensor = facts.plan.steps[steps["conv"]].output
    assert facts.complete_gradient(tensor) == gradient(tensor, frozenset({(steps["block.relu"], 0), (steps["block.add"], 1)}))
    assert facts.complete_gradient(facts.plan.output) == gradient(facts.plan.output, frozenset({LOSS}))


def test_after_a_view_the_gradient_is_that_of_its_output() -> None:
    facts = _facts("plain")
    k, flatten = next((k, step) for k, step in enumerate(facts.plan.steps) if step.name == "flatten")
    assert facts.grad_owner(flatten.inputs[0]) == flatten.output
    assert not facts.passes_back(k)
    assert facts.views_of(flatten.inputs[0]) == [flatten.output]


def test_a_place_of_the_wrong_size_or_outside_of_the_arena_is_refused() -> None:
    plan = _facts("plain").plan
    for region in (Region(0, plan.memory[0].output.size_bytes - 4), Region(plan.arena_bytes, plan.memory[0].output.size_bytes)):
        memory = (replace(plan.memory[0], output=region), *plan.memory[1:])
        with pytest.raises(InvalidPlanError, match=r"The place of the output of conv1 \(tensor 1\) as conv1 has it"):
            PlanFacts(replace(plan, memory=memory)).check_places(0)


REGIONS = st.builds(Region, st.integers(0, 12), st.integers(1, 8))


@given(st.lists(REGIONS, max_size=12))
def test_symbolic_memory_holds_what_an_array_of_bytes_holds(writes: list[Region]) -> None:
    memory, cells = SymbolicMemory(), [-1] * 20
    for number, region in enumerate(writes):
        memory.write(region, activation(number), f"step {number}")
        cells[region.offset : region.end] = [number] * region.size_bytes
    for number, region in enumerate(writes):
        if cells[region.offset : region.end] == [number] * region.size_bytes:
            memory.read(region, activation(number), "reader", "value")
        else:
            with pytest.raises(InvalidPlanError, match=r"reader reads value .* has overwritten it\.$"):
                memory.read(region, activation(number), "reader", "value")


def test_a_value_that_was_overwritten_and_written_again_elsewhere_is_not_called_overwritten() -> None:
    memory, region = SymbolicMemory(), Region(0, 8)
    memory.write(region, activation(1), "step 1")
    memory.write(region, activation(2), "step 2")
    memory.write(Region(8, 8), activation(1), "step 3")
    with pytest.raises(InvalidPlanError, match="it is not complete there: step 2 wrote last"):
        memory.read(region, activation(1), "reader", "value")


@given(REGIONS, REGIONS)
def test_a_part_is_not_the_whole(written: Region, read: Region) -> None:
    memory = SymbolicMemory()
    memory.write(written, activation(1), "step 1")
    if written == read:
        memory.read(read, activation(1), "reader", "value")
    else:
        with pytest.raises(InvalidPlanError):
            memory.read(read, activation(1), "reader", "value")


def test_a_name_goes_with_the_memory() -> None:
    memory, region = SymbolicMemory(), Region(0, 8)
    memory.write(region, activation(1), "step 1")
    memory.add_name(region, activation(2))
    memory.read(region, activation(1), "reader", "value")
    memory.read(region, activation(2), "reader", "value")
    memory.write(Region(4, 2), activation(3), "step 3")
    with pytest.raises(InvalidPlanError, match="step 3 has overwritten it"):
        memory.read(region, activation(2), "reader", "value")


def test_contributions_are_those_of_the_gradient_that_is_there() -> None:
    memory, region, both = SymbolicMemory(), Region(0, 8), frozenset({(1, 0), (2, 0)})
    assert memory.contributions(region, 5) is None
    memory.write(region, gradient(5, both), "step 1")
    assert memory.contributions(region, 5) == both
    assert memory.contributions(region, 6) is None
    assert memory.contributions(Region(0, 4), 5) is None


def test_empty_regions_hold_anything_and_overwrite_nothing() -> None:
    memory = SymbolicMemory()
    memory.write(Region(0, 8), activation(1), "step 1")
    memory.write(Region(4, 0), activation(2), "step 2")
    memory.read(Region(0, 8), activation(1), "reader", "value")
    memory.read(Region(99, 0), activation(7), "reader", "value")


PLAN_REGIONS = st.builds(Region, st.integers(0, 12), st.integers(0, 6))


@given(PLAN_REGIONS, PLAN_REGIONS)
def test_regions_overlap_where_they_share_a_byte(a: Region, b: Region) -> None:
    assert a.overlaps(b) is bool(set(range(a.offset, a.end)) & set(range(b.offset, b.end)))


KERNELS: dict[str, Callable[[], KernelSet]] = {"numpy": NumpyKernelSet, "onednn": OnednnKernelSet}

SEEDS = range(amount(2, 5))

#: Of all wrong plans, the share that must be found.
WANTED = 0.95


def _kernels(name: str) -> KernelSet:
    if name == "onednn" and available() is not None:
        pytest.skip(str(available()))
    return KERNELS[name]()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("network", GRAPHS)
def test_right_plans_pass(network: str, name: str, training: bool) -> None:
    validate(compiler.compile_graph(GRAPHS[network](), _kernels(name), training=training, input_gradient=training))


def _is_found(fault: Fault, kernels: KernelSet, seed: int) -> bool:
    plan = fault.make(steps_of(fault.network, kernels), random.Random(seed))
    try:
        validate(plan)
    except InvalidPlanError as error:
        sentence = str(error)
        assert sentence.endswith("."), sentence
        assert any(step.name in sentence for step in plan.steps), sentence
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_plan_is_found(fault: Fault) -> None:
    kernels = _kernels(fault.kernels)
    missed = [seed for seed in SEEDS if not _is_found(fault, kernels, seed)]
    assert len(missed) <= (1 - WANTED) * len(SEEDS), f"not found with seeds {missed}"


def test_every_test_validates_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ[ENVIRONMENT_VARIABLE] == "1"
    assert clean_environment()[ENVIRONMENT_VARIABLE] == "1"  # also in the jobs that tests start
    right = compiler.plan_steps(steps_of("plain", NumpyKernelSet()))
    monkeypatch.setattr(compiler, "plan_steps", lambda *_: replace(right, backward=right.backward[1:]))
    with pytest.raises(InvalidPlanError, match="fc2"):
        compiler.compile_graph(GRAPHS["plain"](), NumpyKernelSet(), training=True)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "0")
    compiler.compile_graph(GRAPHS["plain"](), NumpyKernelSet(), training=True)


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
