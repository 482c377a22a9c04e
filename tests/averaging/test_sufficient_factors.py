"""The exchange gives each rank its rows of the gradient that one process computes, for any split of the samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.slices import sufficient_factor_slices
from hpctrain.averaging.sufficient_factors import SufficientFactorExchange, exchanging_layers, linear_layers, moves_less
from hpctrain.comm.base import Handle
from hpctrain.nn.parameter import FlatGroup, GroupLayout, ParameterSpec
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import make_group

INPUTS, OUTPUTS = 11, 3


def _spec(*shape: int, sufficient_factors: bool = True) -> ParameterSpec:
    return ParameterSpec(shape, lambda random, shape: np.zeros(shape), sufficient_factors=sufficient_factors)


@pytest.mark.parametrize("counts", [(2, 2), (3, 0, 1), (0, 0, 4, 5), (9, 9, 9)])  # the last one: more than the nominal batch
@pytest.mark.parametrize("sends", [True, False])
def test_rows_of_the_gradient_are_those_of_one_process(counts: tuple[int, ...], sends: bool) -> None:
    random = np.random.default_rng(3)
    x, dy = random.standard_normal((sum(counts), INPUTS)), random.standard_normal((sum(counts), OUTPUTS))
    ranks = len(counts)

    def program(comm: ThreadCommunicator) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
        group = FlatGroup({"w": _spec(INPUTS, OUTPUTS), "b": _spec(OUTPUTS)}, "float64")
        slices = sufficient_factor_slices(group, "w", ("b",), ranks, 1)
        exchange = SufficientFactorExchange(group, slices, comm, 8)
        engine = virtual_engine(comm)

        def wait(handle: Handle) -> None:
            engine.wait_handle(handle, "exchange")

        first = sum(counts[: comm.rank])
        own = slice(first, first + counts[comm.rank])
        exchange.begin_step(counts)
        exchange.pack_inputs(x[own] if sends else None)
        wait(exchange.post_inputs())
        exchange.pack_errors(dy[own] if sends else None)
        wait(exchange.post_errors())
        for piece in range(len(slices)):
            exchange.multiply(piece)
        return [piece.part(comm.rank, ranks) for piece in slices], group.grad, group.parameters["b"].grad

    gradient = (x.T @ dy).reshape(-1) if sends else np.zeros(INPUTS * OUTPUTS)
    covered = []
    for parts, grad, bias in run_virtual(ranks, program):
        np.testing.assert_allclose(bias, dy.sum(0) if sends else 0.0, rtol=1e-12, atol=1e-12)
        for start, stop in parts:
            np.testing.assert_allclose(grad[start:stop], gradient[start:stop], rtol=1e-12, atol=1e-12)
            covered += range(start, stop)
    assert sorted(covered) == list(range(INPUTS * OUTPUTS))


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 1000), st.integers(2, 64))
def test_the_exchange_is_chosen_where_it_moves_less(inputs: int, outputs: int, batch: int, ranks: int) -> None:
    """Against P times the elements that leave a rank, without the parameters' gather, which both need."""
    exchange, gradients = inputs * batch / ranks + outputs * batch, inputs * outputs
    assert moves_less(inputs, outputs, batch, ranks) == (exchange < gradients)
    layout = GroupLayout({"w": _spec(inputs, outputs), "b": _spec(outputs)})
    found = exchanging_layers(layout, ranks, "auto", batch, 1)
    assert found == ({"w": ("b",)} if exchange < gradients else {})


def test_which_layers_may_exchange() -> None:
    layout = make_group()
    layers = {"a.weight": ("a.bias",), "unused.weight": ("unused.bias",), "b.weight": ("b.bias",)}
    assert linear_layers(layout) == layers
    assert exchanging_layers(layout, 2, "always", None, 1) == layers
    assert exchanging_layers(layout, 2, "auto", None, 1) == {}  # the batch is not known
    assert exchanging_layers(layout, 1, "auto", 1, 1) == {}  # one rank
    assert exchanging_layers(layout, 2, "always", None, 2) == {}  # several micro-batches
    assert exchanging_layers(layout, 2, "never", 1, 1) == {}
    assert exchanging_layers(GroupLayout({"w": _spec(0, 4)}), 2, "always", 1, 1) == {}  # nothing of it is here
