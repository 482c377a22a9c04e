"""The order of actions: each step once, parameters before inputs, and what travels begins as soon as it is complete."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.compile.order import backward_actions, forward_actions
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.compile.recomputation import recompute_path, recomputed_tensors
from tests.support.wrong_plans import GRAPHS, steps_of


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


def test_an_edge_ends_just_before_its_reader() -> None:
    steps = steps_of("overlapped", NumpyKernelSet())
    actions = forward_actions(steps)
    early = [k for k, step in enumerate(steps.steps) if step.begins_early]
    assert early
    for k in early:
        reader = actions.index((Action.FORWARD, steps.readers(steps.steps[k].output)[0]))
        assert actions.index((Action.BEGIN, k)) < actions.index((Action.FORWARD, k)) == reader - 1


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
