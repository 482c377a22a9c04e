"""Averaging in 16-bit messages: half of the bytes, the same bits on all ranks, and owners lose nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging import slicing
from hpctrain.averaging.base import GradientAverager, Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.sixteen_bits import (
    PARAMETER_ERROR,
    RoundedParameters,
    Rounding,
    caster,
    check_wire,
    wire_bytes,
    words_of_rounding,
)
from hpctrain.averaging.slicing import Slice
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.comm.base import Communicator
from hpctrain.comm.sums import Wire
from hpctrain.core.errors import OptionError
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.optimizers import Sgd
from hpctrain.planner.program.group_schedules import GroupSchedule
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine, wait
from tests.support.averaging import OPTIMIZERS, Watched, averaged, make_group, planned, run_steps, shares
from tests.support.bfloat16 import UNIT, rounded

WHOLE: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "overlap": (Overlap, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 100}),
}

OWNERS: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "sharded": (Sharded, {"bucket_bytes": 100, "nominal_batch": 9, "fc_exchange": "never"}),
    "sharded, exchange": (Sharded, {"bucket_bytes": 100, "nominal_batch": 9, "fc_exchange": "always"}),
    "priority": (Priority, {"slice_parameters": 8, "window": 2, "fc_exchange": "never"}),
}

ALL = {**WHOLE, **OWNERS}


def _averager(
    name: str, comm: Communicator, world: ThreadCommunicator, group: FlatGroup | None = None, **options: Any
) -> GradientAverager:
    kind, given = ALL[name]
    optimizer = options.pop("optimizer", "momentum")
    group = make_group() if group is None else group
    return averaged(kind, group, OPTIMIZERS[optimizer](), comm, virtual_engine(world), **given, **options)


def _train(name: str, ranks: int, seed: int | None = None, dtype: str = "float64", **options: Any) -> list[np.ndarray]:
    def program(comm: ThreadCommunicator) -> np.ndarray:
        return run_steps(Watched(_averager(name, comm, comm, make_group(dtype), **options)), 7)

    return run_virtual(ranks, program, seed=seed)


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("nodes", [None, (0, 1, 0, 1), (0, 0, 0, 1, 1, 1)])
@pytest.mark.parametrize("name", ALL)
def test_a_schedule_knows_the_bytes_that_communicators_count(
    monkeypatch: pytest.MonkeyPatch, name: str, nodes: tuple[int, ...] | None
) -> None:
    for cut in ("_LARGEST_BYTES", "_LEAST_PART_BYTES"):
        monkeypatch.setattr(slicing, cut, 64)  # so that buckets are sent in several messages, too
    wire, ranks = "bfloat16", 3 if nodes is None else len(nodes)
    kind, given = ALL[name]
    parameters = [{}] if name in WHOLE else [{}, {"wire_parameters": wire}, {"wire": "float32", "wire_parameters": wire}]
    for more in parameters:
        options = {**given, "wire": wire, "nodes": nodes, **more}
        strategy = planned(kind, make_group(), ranks, **options)

        def program(comm: ThreadCommunicator, options: dict[str, Any] = options) -> tuple[int, CollectiveSchedule | None]:
            counters = Counters()
            counting = CountingCommunicator(comm, counters)
            averager = averaged(kind, make_group(), Sgd(), counting, virtual_engine(comm), **options)
            run_steps(averager, 1)
            before = counters.snapshot()
            run_steps(averager, 1, first=1)
            return counters.since(before).total().exchanged_bytes, averager.schedule

        results = run_virtual(ranks, program)
        order = None if strategy.levels is None else strategy.levels.order
        samples = shares(1, ranks)
        group = GroupSchedule("all", (0,), ranks, make_group().size, tuple(samples), results[0][1], order, strategy.rounding)
        assert tuple(counted for counted, _ in results) == group.exchanged_bytes(8)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_ranks_end_with_the_same_bits_near_full_precision(name: str) -> None:
    (alone,) = _train("blocking", 1)
    for more in [{}] if name in WHOLE else [{}, {"wire_parameters": "bfloat16"}]:
        for ranks, seed, nodes in (
            (2, None, None),
            (3, 5, None),
            (4, None, (0, 0, 1, 1)),
            (4, 6, (0, 1, 0, 1)),
            (4, 7, (0, 1, 0, 1)),
        ):
            first, *others = _train(name, ranks, seed, wire="bfloat16", nodes=nodes, **more)
            assert all(other.tobytes() == first.tobytes() for other in others)
            assert 0 < np.linalg.norm(first - alone) <= 2 * UNIT * np.linalg.norm(alone)


@pytest.mark.parametrize("name", ALL)
def test_one_rank_changes_nothing(name: str) -> None:
    more = {} if name in WHOLE else {"wire_parameters": "bfloat16"}
    assert _train(name, 1, wire="bfloat16", **more)[0].tobytes() == _train(name, 1)[0].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_and_their_owners_change_no_bit_of_bfloat16(ranks: int) -> None:
    """All strategies that sum the same rounded gradients give the same parameters, however they cut them."""
    assert len({_train(name, ranks, wire="bfloat16")[0].tobytes() for name in WHOLE}) == 1
    assert len({_train(name, ranks, wire="bfloat16")[0].tobytes() for name in ("sharded", "priority")}) == 1


@pytest.mark.sample(1)
@pytest.mark.slow
def test_in_two_levels_no_order_of_messages_changes_a_bit() -> None:
    wire: Wire = "bfloat16"
    expected = _train("bucketed", 4, wire=wire, nodes=(0, 1, 0, 1))[0].tobytes()
    for seed in range(12):
        assert {data.tobytes() for data in _train("bucketed", 4, seed, wire=wire, nodes=(0, 1, 0, 1))} == {expected}
    flat = _train("bucketed", 4, wire=wire, nodes=(0, 1, 0, 1), two_level=False)[0].tobytes()
    assert flat == _train("bucketed", 4, wire=wire)[0].tobytes() != expected


def test_allreduces_have_levels_where_they_round_alone() -> None:
    def found(kind: type[Strategy], **options: Any) -> bool:
        return planned(kind, make_group(), 4, nodes=(0, 0, 1, 1), **options).levels is not None

    assert found(Bucketed, wire="bfloat16")
    assert not found(Bucketed)
    assert not found(Bucketed, wire="bfloat16", two_level=False)
    assert not found(Overlap, wire="bfloat16")
    requests = {planned(Bucketed, make_group(), 4, nodes=nodes, wire="bfloat16").request() for nodes in (None, (0, 0, 1, 1))}
    assert len(requests) == 2  # other bits, so a stored schedule of the one is none of the other


def _with_gradients(name: str, gradients: Sequence[np.ndarray], steps: int = 3, **options: Any) -> list[np.ndarray]:
    """Parameters after steps whose gradients are these, by rank, of one layer; of float32."""
    size = gradients[0].size

    def program(comm: ThreadCommunicator) -> np.ndarray:
        specs = {
            f"l{k}": ParameterSpec((end - begin,), lambda _, shape: np.zeros(shape)) for k, (begin, end) in enumerate(bounds)
        }
        group = FlatGroup(specs, "float32")
        averager = _averager(name, comm, comm, group, **options)
        for step in range(steps):
            averager.begin_step(0.5, [1] * comm.size)
            averager.before_forward(list(group.parameters.values()))
            for parameter in reversed(group.parameters.values()):
                segment = group.segment(parameter.name)
                parameter.grad[...] = gradients[comm.rank][segment.start : segment.stop] * (1 + step)
                averager.grad_ready(parameter)
                averager.data_free(parameter)
            averager.end_backward()
        averager.drain()
        return group.data.copy()

    bounds = [(0, size // 3), (size // 3, size)]
    return run_virtual(len(gradients), program)


@pytest.mark.parametrize("name", ["blocking", "bucketed", "sharded", "priority"])
def test_gradients_that_fit_are_averaged_as_in_full_precision(name: str) -> None:
    """Small integers, whose sums have 16 bits, too."""
    gradients = [np.random.default_rng(rank).integers(-20, 21, 50).astype(np.float32) for rank in range(3)]
    plain = _with_gradients(name, gradients)
    for after, before in zip(_with_gradients(name, gradients, wire="bfloat16"), plain, strict=True):
        assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("magnitude", [3e38, 1e-30])
@pytest.mark.parametrize("name", ["blocking", "sharded"])
def test_rounding_neither_overflows_nor_loses_what_is_small(name: str, magnitude: float) -> None:
    gradients = [magnitude / 40 * np.random.default_rng(rank).standard_normal(40).astype(np.float32) for rank in range(3)]
    gradients = [np.clip(gradient, -magnitude / 8, magnitude / 8) for gradient in gradients]
    plain = _with_gradients(name, gradients, steps=1)[0]
    after = _with_gradients(name, gradients, steps=1, wire="bfloat16")[0]
    np.testing.assert_allclose(after, plain, rtol=0, atol=3 * UNIT * np.abs(plain).max())
    assert np.abs(after).max() > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["blocking", "bucketed", "sharded"])
def test_gradients_that_are_not_finite_arrive_where_they_do_in_full_precision(name: str, bad: float) -> None:
    gradients = [np.ones(20, np.float32) for _ in range(3)]
    gradients[1][7] = bad
    plain = _with_gradients(name, gradients)[0]
    np.testing.assert_array_equal(np.isfinite(_with_gradients(name, gradients, wire="bfloat16")[0]), np.isfinite(plain))


def test_small_gradients_decide_about_the_exchange_of_factors() -> None:
    """Inputs and errors travel as they are, so gradients of half the bytes are exchanged less often."""
    for batch in range(1, 40):
        full, half = (
            planned(Sharded, make_group("float32"), 2, nominal_batch=batch, wire=wire) for wire in ("float32", "bfloat16")
        )
        assert set(half.exchanging) <= set(full.exchanging)  # type: ignore[attr-defined]
        twice = planned(Sharded, make_group("float32"), 2, nominal_batch=2 * batch)
        assert half.exchanging == twice.exchanging  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_is_for_one_wire(name: str) -> None:
    kind, given = ALL[name]
    plans = [planned(kind, make_group(), 3, **given, wire=wire).plan(None) for wire in ("float32", "bfloat16")]
    if name == "blocking":
        assert plans == [None] * 2
        return
    assert len({plan.request for plan in plans if plan is not None}) == 2
    for wire, stored in zip(("float32", "bfloat16"), plans, strict=True):
        assert stored is not None
        assert CollectiveSchedule.from_json(stored.to_json()) == stored
        assert ("rounding" in stored.to_json()) == (wire != "float32")
        for other in ("float32", "bfloat16"):
            assert planned(kind, make_group(), 3, **given, wire=other).accepts(stored) == (other == wire)
        assert [(piece.start, piece.stop) for piece in stored.slices] == [
            (piece.start, piece.stop)
            for piece in plans[0].slices  # type: ignore[union-attr]
        ]


def test_what_is_not_rounded_has_no_words_and_no_casts() -> None:
    assert planned(Sharded, make_group(), 3).rounding is None
    assert words_of_rounding(None) == ""
    assert words_of_rounding(Rounding("bfloat16")) == ", wire bfloat16"
    assert words_of_rounding(Rounding("float32", "bfloat16")) == ", wire float32, wire_parameters bfloat16"
    assert caster("float32") is None
    assert (wire_bytes(0, 4, "bfloat16"), wire_bytes(5, 4, "float32"), wire_bytes(5, 8, "bfloat16")) == (0, 20, 10)


@pytest.mark.parametrize("name", ALL)
def test_unknown_values_are_refused(name: str) -> None:
    kind, _ = ALL[name]
    for option in ("wire",) if name in WHOLE else ("wire", "wire_parameters"):
        with pytest.raises(OptionError, match=f"{option} is 'int8', but must be one of float32, bfloat16"):
            kind.Options(**{option: "int8"})
    check_wire(wire="bfloat16")


ROUNDED_STRATEGIES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "sharded": (Sharded, {"bucket_bytes": 100, "nominal_batch": 9, "fc_exchange": "never"}),
    "sharded, exchange": (Sharded, {"bucket_bytes": 100, "nominal_batch": 9, "fc_exchange": "always"}),
    "priority": (Priority, {"slice_parameters": 8, "window": 2, "fc_exchange": "never"}),
}

State = dict[str, dict[str, np.ndarray]]
Stored = tuple[np.ndarray, State]


def _rounded_averager(
    name: str, comm: ThreadCommunicator, dtype: str = "float32", optimizer: str = "momentum", **options: Any
) -> GradientAverager:
    kind, given = ROUNDED_STRATEGIES[name]
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


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("nesterov", "float32"), ("lars, clipping", "float32"), ("nesterov", "float64")]
)
@pytest.mark.parametrize(("name", "nodes"), [("sharded", None), ("priority", (0, 0, 1, 1))])
def test_owners_lose_nothing(name: str, nodes: tuple[int, ...] | None, optimizer: str, dtype: str) -> None:
    """With the same gradients, what an owner has is to the bit what it has where parameters travel as they are; norms too."""

    def program(comm: ThreadCommunicator, wire_parameters: Wire) -> Stored:
        averager = _rounded_averager(name, comm, dtype, optimizer, nodes=nodes, wire_parameters=wire_parameters)
        _fixed_gradients(averager, range(6))
        return _stored(averager)

    group = make_group(dtype)
    (exact, _), *_ = run_virtual(4, lambda comm: program(comm, "float32"))
    results = run_virtual(4, lambda comm: program(comm, "bfloat16"), seed=3)
    for data, state in results:
        assert data.tobytes() == results[0][0].tobytes()
        assert _exact((data, state), group).tobytes() == exact.tobytes()
        assert data.tobytes() != exact.tobytes()
    np.testing.assert_array_equal(results[0][0], rounded(exact))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 3])
@pytest.mark.parametrize("name", ROUNDED_STRATEGIES)
def test_a_run_that_goes_on_is_the_uninterrupted_one(name: str, stop: int) -> None:
    wire: Wire = "bfloat16"

    def program(comm: ThreadCommunicator, first: int, last: int, stored: Stored | None) -> Stored:
        averager = _rounded_averager(name, comm, replan=False, wire=wire, wire_parameters=wire, optimizer="lars, clipping")
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
        averager = _rounded_averager("sharded, exchange", comm, wire_parameters=wire)
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
