"""Blocking averaging: the sum of all ranks' gradients, then the plain optimiser's update, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Norms, Optimizer
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import averaged

OPTIMIZERS: list[Callable[[], Optimizer]] = [
    lambda: Sgd(momentum=0.9, weight_decay=1e-2),
    lambda: Sgd(momentum=0.5, nesterov=True, clip_norm=0.3),
    lambda: Lars(momentum=0.9, weight_decay=1e-2, clip_norm=2.0),
]
STEPS = 4


def _group(dtype: str) -> FlatGroup:
    shapes = {"conv.weight": (3, 3, 3, 2), "conv.bias": (3,), "fc.weight": (7, 9), "empty": (0,), "fc.bias": (9,)}
    specs = {
        name: ParameterSpec(shape, lambda chance, shape: chance.standard_normal(shape), decay="weight" in name)
        for name, shape in shapes.items()
    }
    group = FlatGroup(specs, dtype)
    group.data[...] = np.random.default_rng(11).standard_normal(group.size)
    return group


def _gradient(rank: int, step: int, size: int) -> np.ndarray:
    return np.random.default_rng((rank, step)).standard_normal(size)


def _train(averager: GradientAverager, rank: int) -> np.ndarray:
    group = averager.group
    for step in range(STEPS):
        averager.begin_step(lr=0.1 / (step + 1))
        averager.before_forward(list(group.parameters.values()))
        group.grad[...] = _gradient(rank, step, group.size)
        for parameter in reversed(group.parameters.values()):
            averager.grad_ready(parameter)
            averager.data_free(parameter)
        averager.end_backward()
    averager.drain()
    return group.data.copy()


def _expected(make: Callable[[], Optimizer], ranks: int, dtype: str) -> np.ndarray:
    """The optimiser alone, given the sum of all gradients."""
    group, optimizer = _group(dtype), make()
    optimizer.bind(group, group.segments)
    for step in range(STEPS):
        group.grad[...] = sum(_gradient(rank, step, group.size) for rank in range(ranks))
        norms = Norms(group)
        norms.add_partial(group, group.segments)
        optimizer.update(group.segments, 0.1 / (step + 1), norms if optimizer.needs_norms else None)
    return group.data


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("make", OPTIMIZERS, ids=["sgd", "clip", "lars"])
def test_it_is_the_optimiser_on_the_sum_of_gradients(make: Callable[[], Optimizer], ranks: int) -> None:
    def rank_program(comm: Communicator) -> np.ndarray:
        return _train(averaged(Blocking, _group("float64"), make(), comm, virtual_engine(comm)), comm.rank)  # type: ignore[arg-type]

    expected = _expected(make, ranks, "float64")
    for result in run_virtual(ranks, rank_program, seed=ranks):
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-13)


def test_one_process_needs_no_communication() -> None:
    comm = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort)
    result = _train(averaged(Blocking, _group("float32"), Sgd(), comm, engine), 0)
    np.testing.assert_array_equal(result, _expected(Sgd, 1, "float32"))
    assert engine.waited_seconds == 0.0


def test_every_rank_owns_and_keeps_everything() -> None:
    comm = SingleCommunicator()
    group = _group("float32")
    averager = averaged(Blocking, group, Sgd(), comm, ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort))
    assert averager.owned() == group.segments
    _train(averager, 0)
    for parameter in group.parameters.values():
        state = {name: values.copy() for name, values in averager.full_state(parameter).items()}
        assert all(values.shape == (parameter.data.size,) for values in state.values())
        averager.load_state(parameter, {name: values + 1 for name, values in state.items()})
        for name, values in averager.full_state(parameter).items():
            np.testing.assert_array_equal(values, state[name] + 1)


def test_parameters_stand_still_until_backward_has_ended() -> None:
    comm = SingleCommunicator()
    group = _group("float32")
    averager = averaged(Blocking, group, Sgd(), comm, ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort))
    before = group.data.copy()
    averager.begin_step(0.1)
    group.grad[...] = 1.0
    for parameter in group.parameters.values():
        averager.grad_ready(parameter)
        np.testing.assert_array_equal(group.data, before)
    averager.end_backward()
    assert (group.data != before).all()
