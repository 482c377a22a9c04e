"""Gradients that nodes keep back: nothing is lost, a resume repeats every bit, and other nodes go on with the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager, for_holders
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import LR, averaged, make_group, run_steps

OPTIONS: dict[str, Any] = {"density": 0.2, "compress": "always", "least_elements": 4, "bucket_bytes": 100}
PLACES = {"3 of 1": (0, 1, 2), "2 of 2": (0, 1, 0, 1), "3 of 2": (2, 1, 0, 0, 1, 2), "one rank": (0,)}
RESIDUAL, VELOCITY = "sparse_gradient", "sparse_momentum"

States = Mapping[str, Mapping[str, np.ndarray]]


def _averager(comm: ThreadCommunicator, nodes: Sequence[int], momentum: float, **options: Any) -> GradientAverager:
    given = {**OPTIONS, **options}
    return averaged(Sparse, make_group(), Sgd(momentum=momentum), comm, virtual_engine(comm), nodes=nodes, **given)


def _states(averager: GradientAverager) -> dict[str, dict[str, np.ndarray]]:
    parameters = averager.group.parameters
    return {name: averager.full_state(parameter) for name, parameter in parameters.items() if parameter.size}


def _kept(state: Mapping[str, np.ndarray]) -> np.ndarray | float:
    """The sum over the nodes of what is kept back of one parameter."""
    return state[RESIDUAL].sum(axis=0) if RESIDUAL in state else 0.0


def _load(averager: GradientAverager, states: States) -> None:
    """As a snapshot does: each name that is taken, and zeros where it was not stored."""
    for name, state in states.items():
        parameter, given = averager.group.parameters[name], {}
        for key in averager.state_names(parameter):
            if key in averager.by_holder:
                given[key] = for_holders(state.get(key, np.zeros((1, parameter.size))), averager.holders)
            else:
                given[key] = state[key]
        averager.load_state(parameter, given)


def _random_steps(averager: GradientAverager, steps: int) -> np.ndarray:
    """Steps with random gradients of this rank; their sum."""
    group, total = averager.group, np.zeros(averager.group.size)
    random = np.random.default_rng(averager.comm.rank)
    for _ in range(steps):
        averager.begin_step(LR)
        averager.before_forward(tuple(group.parameters.values()))
        group.grad[...] = random.standard_normal(group.size)
        total += group.grad
        for parameter in reversed(group.parameters.values()):
            averager.grad_ready(parameter)
            averager.data_free(parameter)
        averager.end_backward()
    averager.drain()
    return total


@pytest.mark.parametrize("nodes", PLACES.values(), ids=PLACES)
def test_applied_and_kept_back_are_all_gradients(nodes: tuple[int, ...]) -> None:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray, dict[str, dict[str, np.ndarray]]]:
        averager = _averager(comm, nodes, 0.0)
        begin = averager.group.data.copy()
        total = _random_steps(averager, 5)
        return total, (begin - averager.group.data) / LR, _states(averager)

    results = run_virtual(len(nodes), program, seed=1)
    group, given = make_group(), sum(total for total, _, _ in results)
    for _, applied, states in results:
        kept = np.zeros(group.size)
        for name, state in states.items():
            segment = group.segment(name)
            if RESIDUAL in state:
                assert state[RESIDUAL].shape == (len(set(nodes)), segment.size)
                kept[segment.start : segment.stop] = state[RESIDUAL].sum(axis=0)
        assert kept.any() == (len(nodes) > 1)
        np.testing.assert_allclose(applied + kept, given, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("nodes", PLACES.values(), ids=PLACES)
def test_a_resume_repeats_every_bit(nodes: tuple[int, ...], momentum: float) -> None:
    """In the midst of a warm-up; without the optimiser's momentum there is one before the choice."""
    options = {"warmup_steps": 5, "momentum_correction": 0.0 if momentum else 0.7}

    def whole(comm: ThreadCommunicator) -> np.ndarray:
        return run_steps(_averager(comm, nodes, momentum, **options), 6)

    def first(comm: ThreadCommunicator) -> tuple[np.ndarray, States, Mapping[str, int]]:
        averager = _averager(comm, nodes, momentum, **options)
        data = run_steps(averager, 3)
        return data, _states(averager), averager.counters()

    def then(comm: ThreadCommunicator) -> np.ndarray:
        averager = _averager(comm, nodes, momentum, **options)
        averager.group.data[...] = data
        _load(averager, states)
        averager.load_counters(counters)
        return run_steps(averager, 3, first=3)

    expected = run_virtual(len(nodes), whole)[0]
    data, states, counters = run_virtual(len(nodes), first)[-1]
    assert (VELOCITY in states["a.weight"]) == (not momentum)
    for found in run_virtual(len(nodes), then, seed=1):
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("after", [(0, 1), (0, 0, 1, 1), (0,), "dense"], ids=str)
def test_other_nodes_go_on_with_the_sum_and_dense_slices_apply_it(after: tuple[int, ...] | str) -> None:
    """Where all is dense, the first step adds what was kept back: nothing is lost, and nothing is left."""
    dense = after == "dense"
    before, nodes = (2, 1, 0, 0, 1, 2), (0, 1, 2) if dense else after
    options = {"compress": "auto", "density": 1.0} if dense else {}

    def first(comm: ThreadCommunicator) -> tuple[np.ndarray, States]:
        averager = _averager(comm, before, 0.0)
        return run_steps(averager, 4), _states(averager)

    data, states = run_virtual(len(before), first)[1]

    def then(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray, States, States]:
        averager = _averager(comm, nodes, 0.0, **options)  # type: ignore[arg-type]
        averager.group.data[...] = data
        _load(averager, states)
        taken = _states(averager)
        return _random_steps(averager, 1), averager.group.data.copy(), taken, _states(averager)

    results = run_virtual(len(nodes), then)
    group, given = make_group(), sum(total for total, _, _, _ in results)
    for _, found, taken, left in results:
        for name, state in states.items():
            np.testing.assert_allclose(_kept(taken[name]), _kept(state), rtol=0, atol=1e-14)
        balance = given - (data - found) / LR
        for name, state in states.items():
            place = slice(group.segment(name).start, group.segment(name).stop)
            balance[place] += _kept(state) - _kept(left[name])
        np.testing.assert_allclose(balance, 0.0, atol=1e-12)
        if dense or len(nodes) == 1:
            assert not any(np.any(_kept(state)) for state in left.values())


def test_momentum_before_the_choice_goes_on_as_the_sum_of_all_nodes() -> None:
    """On one rank it is the momentum of plain descent."""
    before = (0, 1, 0, 1)

    def first(comm: ThreadCommunicator) -> tuple[States, States]:
        averager = _averager(comm, before, 0.0, momentum_correction=0.5)
        run_steps(averager, 4)
        states = _states(averager)
        other = _averager(comm, (0, 1, 2, 3), 0.0, momentum_correction=0.5)
        _load(other, states)
        return states, _states(other)

    for states, taken in run_virtual(4, first):
        for name, state in states.items():
            np.testing.assert_allclose(taken[name][VELOCITY].sum(axis=0), state[VELOCITY].sum(axis=0), rtol=0, atol=1e-14)

    def alone(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray]:
        corrected = run_steps(_averager(comm, (0,), 0.0, momentum_correction=0.5), 5)
        return corrected, run_steps(_averager(comm, (0,), 0.5), 5)

    ((corrected, plain),) = run_virtual(1, alone)
    np.testing.assert_allclose(corrected, plain, rtol=0, atol=1e-14)
