"""Parameters that travel in 16 bits: replicas are equal and rounded, owners lose nothing, and a checkpoint keeps both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.rounded_parameters import PARAMETER_ERROR, RoundedParameters
from hpctrain.averaging.rounding import caster
from hpctrain.averaging.slices import Slice
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import Strategy
from hpctrain.comm.sixteen_bit import Wire
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Norms
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine, wait
from tests.support.averaging import OPTIMIZERS, Watched, averaged, make_group, run_steps
from tests.support.bfloat16 import rounded

ROUNDED: tuple[Wire, ...] = ("bfloat16", "float16")
STRATEGIES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "sharded": (Sharded, {"bucket_bytes": 100, "nominal_batch": 9, "fc_exchange": "never"}),
    "sharded, exchange": (Sharded, {"bucket_bytes": 100, "nominal_batch": 9, "fc_exchange": "always"}),
    "priority": (Priority, {"slice_parameters": 8, "window": 2, "fc_exchange": "never"}),
}
State = dict[str, dict[str, np.ndarray]]
Stored = tuple[np.ndarray, State]


def _averager(
    name: str, comm: ThreadCommunicator, dtype: str = "float32", optimizer: str = "momentum", **options: Any
) -> GradientAverager:
    kind, given = STRATEGIES[name]
    return averaged(kind, make_group(dtype), OPTIMIZERS[optimizer](), comm, virtual_engine(comm), **given, **options)


def _stored(averager: GradientAverager) -> Stored:
    state = {
        name: {key: values.copy() for key, values in averager.full_state(parameter).items()}
        for name, parameter in averager.group.parameters.items()
    }
    return averager.group.data.copy(), state


def _exact(stored: Stored, group: FlatGroup) -> np.ndarray:
    data, state = stored
    total = data.copy()
    for segment in group.segments:
        total[segment.start : segment.stop] += state[segment.parameter].get(PARAMETER_ERROR, 0)
    return total


def _fixed_gradients(averager: GradientAverager, steps: range) -> None:
    """Steps whose gradients do not depend on the parameters."""
    group = averager.group
    for step in steps:
        averager.begin_step(0.1, [1] * averager.comm.size)
        for parameter in reversed(group.parameters.values()):
            averager.before_forward([parameter])
            random = np.random.default_rng((step, averager.comm.rank, parameter.order))
            parameter.grad[...] = random.standard_normal(parameter.spec.shape)
            averager.grad_ready(parameter)
            averager.data_free(parameter)
        averager.end_backward()
    averager.drain()


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("nesterov", "float32"), ("lars, clipping", "float32"), ("nesterov", "float64")]
)
@pytest.mark.parametrize(("name", "nodes"), [("sharded", None), ("priority", (0, 0, 1, 1))])
def test_owners_lose_nothing(name: str, nodes: tuple[int, ...] | None, optimizer: str, dtype: str) -> None:
    """With the same gradients, what an owner has is to the bit what it has where parameters travel as they are; norms too."""

    def program(comm: ThreadCommunicator, wire_parameters: Wire) -> Stored:
        averager = _averager(name, comm, dtype, optimizer, nodes=nodes, wire_parameters=wire_parameters)
        _fixed_gradients(averager, range(6))
        return _stored(averager)

    group = make_group(dtype)
    (exact, _), *_ = run_virtual(4, lambda comm: program(comm, "float32"))
    for wire in ROUNDED:
        results = run_virtual(4, lambda comm, wire=wire: program(comm, wire), seed=3)
        for data, state in results:
            assert data.tobytes() == results[0][0].tobytes()
            assert _exact((data, state), group).tobytes() == exact.tobytes()
            assert data.tobytes() != exact.tobytes()
        if wire == "bfloat16":
            np.testing.assert_array_equal(results[0][0], rounded(exact))


@pytest.mark.slow
@pytest.mark.parametrize("wire", ROUNDED)
@pytest.mark.parametrize("stop", [0, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_that_goes_on_is_the_uninterrupted_one(name: str, wire: Wire, stop: int) -> None:
    def program(comm: ThreadCommunicator, first: int, last: int, stored: Stored | None) -> Stored:
        averager = _averager(name, comm, replan=False, wire=wire, wire_parameters=wire, optimizer="lars, clipping")
        if stored is not None:
            averager.group.data[...] = stored[0]
            for key, parameter in averager.group.parameters.items():
                averager.load_state(parameter, stored[1][key])
        run_steps(Watched(averager), last - first, first)
        return _stored(averager)

    through = run_virtual(3, lambda comm: program(comm, 0, 7, None))
    stored = run_virtual(3, lambda comm: program(comm, 0, stop, None))[0]
    for again, before in zip(run_virtual(3, lambda comm: program(comm, stop, 7, stored), seed=stop), through, strict=True):
        assert again[0].tobytes() == before[0].tobytes()
        for key, state in before[1].items():
            assert again[1][key].keys() == state.keys()
            assert all(again[1][key][entry].tobytes() == values.tobytes() for entry, values in state.items())


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_only_what_is_sent_is_rounded(wire: Wire) -> None:
    """A bias that every rank updates by itself has no error, and one rank sends nothing."""

    def program(comm: ThreadCommunicator) -> State:
        averager = _averager("sharded, exchange", comm, wire_parameters=wire)
        run_steps(averager, 2)
        return _stored(averager)[1]

    for ranks in (1, 3):
        for state in run_virtual(ranks, program):
            has = {name for name, values in state.items() if PARAMETER_ERROR in values}
            replicated = {"a.bias", "b.bias", "unused.bias"}
            assert has == (set(make_group().parameters) - replicated if ranks > 1 and wire != "float32" else set())


def test_what_is_not_finite_is_not_hidden() -> None:
    def program(comm: ThreadCommunicator) -> None:
        group = FlatGroup({"w": ParameterSpec((4,), lambda _, shape: np.zeros(shape))})
        group.data[...] = [1, np.inf, np.nan, 2 + 2**-20]
        cast = caster("bfloat16")
        assert cast is not None
        segment = group.segment("w")
        own = segment.part(2 * comm.rank, 2 * comm.rank + 2)
        parameters = RoundedParameters(group, [Slice("w", 0, 4, 0, ("w",))], [[own]], comm.rank, 2, cast)
        wait(parameters.gather(0, comm))
        np.testing.assert_array_equal(group.data, [1, np.inf, np.nan, 2])
        error = parameters.state(own)[PARAMETER_ERROR]
        np.testing.assert_array_equal(error, [[0, np.nan], [np.nan, 2**-20]][comm.rank])
        assert parameters.state(segment.part(0, 0))[PARAMETER_ERROR].size == 0
        parameters.restore(0)
        assert group.data[3] == (2 + 2**-20 if comm.rank else 2)

    run_virtual(2, program)


def test_norms_are_those_of_exact_values() -> None:
    def program(comm: ThreadCommunicator) -> None:
        group = FlatGroup({"w": ParameterSpec((9,), lambda _, shape: np.zeros(shape))})
        exact = np.random.default_rng(0).standard_normal(9).astype(np.float32)
        group.data[...], group.grad[...] = exact, 2 * exact
        cast = caster("float16")
        assert cast is not None
        piece = Slice("w", 0, 9, 0, ("w",))
        own = group.segment("w").part(*piece.part(comm.rank, 2))
        parameters = RoundedParameters(group, [piece], [[own]], comm.rank, 2, cast)
        wait(parameters.gather(0, comm))
        assert (group.data != exact).any()
        norms, expected = Norms(group), Norms(group)
        parameters.add_squares(norms, 0, [own])
        group.data[...] = exact
        expected.add_partial(group, [own])
        np.testing.assert_array_equal(norms.squares, expected.squares)

    run_virtual(2, program)
