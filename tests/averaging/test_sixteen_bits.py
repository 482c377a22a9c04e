"""Averaging in 16-bit messages: casts of every code, half of the bytes, the same bits on all ranks, and owners lose nothing."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging import sixteen_bits, slicing
from hpctrain.averaging.base import GradientAverager, Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.sixteen_bits import (
    PARAMETER_ERROR,
    Bfloat16Codes,
    Cast16,
    OddRounding,
    RoundedParameters,
    Rounding,
    caster,
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
from hpctrain.nn.parameter import FlatGroup, Parameter, ParameterSpec
from hpctrain.optim.optimizers import Sgd
from hpctrain.planner.program.group_schedules import GroupSchedule
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine, wait
from tests.support import averaging
from tests.support.averaging import OPTIMIZERS, Saved, Watched, averaged, make_group, planned, restore, run_steps, saved, shares
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
            averaging.step_with(averager, 0.5, gradients[comm.rank] * (1 + step))
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


def _exact(stored: Saved, group: FlatGroup) -> np.ndarray:
    data, state = stored
    total = data.copy()
    for segment in group.segments:
        total[segment.start : segment.stop] += state[segment.parameter].get(PARAMETER_ERROR, 0)
    return total


def _fixed_gradients(averager: GradientAverager, steps: range) -> None:
    """Steps whose gradients do not depend on the parameters."""

    def gradient(parameter: Parameter, step: int) -> np.ndarray:
        return np.random.default_rng((step, averager.comm.rank, parameter.order)).standard_normal(parameter.spec.shape)

    for step in steps:
        averaging.step_with(averager, 0.1, partial(gradient, step=step))
    averager.drain()


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("nesterov", "float32"), ("lars, clipping", "float32"), ("nesterov", "float64")]
)
@pytest.mark.parametrize(("name", "nodes"), [("sharded", None), ("priority", (0, 0, 1, 1))])
def test_owners_lose_nothing(name: str, nodes: tuple[int, ...] | None, optimizer: str, dtype: str) -> None:
    """With the same gradients, what an owner has is to the bit what it has where parameters travel as they are; norms too."""

    def program(comm: ThreadCommunicator, wire_parameters: Wire) -> Saved:
        averager = _averager(
            name, comm, comm, make_group(dtype), optimizer=optimizer, nodes=nodes, wire_parameters=wire_parameters
        )
        _fixed_gradients(averager, range(6))
        return saved(averager)

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
@pytest.mark.parametrize("name", OWNERS)
def test_a_run_that_goes_on_is_the_uninterrupted_one(name: str, stop: int) -> None:
    wire: Wire = "bfloat16"

    def program(comm: ThreadCommunicator, first: int, last: int, stored: Saved | None) -> Saved:
        averager = _averager(
            name, comm, comm, make_group("float32"), replan=False, wire=wire, wire_parameters=wire, optimizer="lars, clipping"
        )
        if stored is not None:
            restore(averager, stored)
        run_steps(Watched(averager), last - first, first)
        return saved(averager)

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

    def program(comm: ThreadCommunicator) -> dict[str, dict[str, np.ndarray]]:
        averager = _averager("sharded, exchange", comm, comm, make_group("float32"), wire_parameters=wire)
        run_steps(averager, 2)
        return saved(averager)[1]

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


DTYPES = ["float32", "float64"]

BLOCK = sixteen_bits._BLOCK


@pytest.fixture
def small_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bits, "_BLOCK", 64)


def message_of(cast: Cast16, values: np.ndarray) -> np.ndarray:
    message = np.empty(cast.message_size, np.uint8)
    cast.compress(values, message)
    return message


def received(cast: Cast16, values: np.ndarray) -> np.ndarray:
    again = np.full_like(values, 9)
    cast.decompress(message_of(cast, values), again)
    return again


def arrays(dtype: str) -> list[np.ndarray]:
    """Arrays of all sizes of numbers, up to the last third of the range of the dtype, and down to denormal ones."""
    numbers = np.random.default_rng(1)
    low, high = (-149, 125) if dtype == "float32" else (-1074, 1021)
    whole = [
        numbers.standard_normal(size) * 2.0 ** float(scale)
        for size in (1, 63, 64, 65, 300)
        for scale in (low, low + 5, low // 2, -24, 0, 14, high // 2, high - 2)
    ]
    mixed = [numbers.standard_normal(200) * 2.0 ** numbers.integers(low, 125, 200).astype(float) for _ in range(5)]
    return [values.astype(dtype) for values in (*whole, *mixed, np.zeros(70), np.empty(0))]


@pytest.mark.usefixtures("small_casts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_is_the_nearest_of_eight_digits(dtype: str) -> None:
    cast = Cast16(70, dtype)
    numbers = np.random.default_rng(2)
    values = (numbers.standard_normal(70) * 2.0 ** numbers.integers(-120, 120, 70)).astype(dtype)
    unit = 2.0 ** (np.frexp(np.abs(values).astype(np.float64))[1] - 8)
    np.testing.assert_array_equal(received(cast, values), np.round(values / unit) * unit)


@pytest.mark.usefixtures("small_casts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_received_and_lost_are_the_array_exactly(dtype: str) -> None:
    for values in arrays(dtype):
        if np.abs(values).max(initial=0) > 2.0**127:
            continue
        cast = Cast16(values.size, dtype)
        lost, message, before = values.copy(), message_of(cast, values), values.copy()
        assert values.tobytes() == before.tobytes()
        cast.subtract_from(message, lost)
        again = received(cast, values)
        total = np.linspace(-1, 1, values.size).astype(dtype)
        expected = total + again
        cast.add_to(message, total)
        np.testing.assert_array_equal(total, expected)
        assert cast.message_size == 2 * values.size
        np.testing.assert_array_equal(lost + again, values)
        np.testing.assert_array_equal(lost, values - again)


@pytest.mark.usefixtures("small_casts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_received_so(dtype: str) -> None:
    for value in (np.inf, -np.inf, np.nan):
        values = np.ones(130, dtype)
        values[[3, 129]] = value
        np.testing.assert_array_equal(received(Cast16(130, dtype), values), values)
        residual = values.copy()
        cast = Cast16(130, dtype)
        cast.subtract_from(message_of(cast, values), residual)
        assert not np.isfinite(residual[[3, 129]]).any()


@pytest.mark.usefixtures("small_casts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_takes_no_memory(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bits, "_BLOCK", BLOCK)
    values = np.random.default_rng(5).standard_normal(300_000).astype(dtype)
    cast = Cast16(values.size, dtype)
    message, target = message_of(cast, values), values.copy()
    tracemalloc.start()
    try:
        cast.compress(values, message)
        cast.add_to(message, target)
        cast.subtract_from(message, target)
        cast.decompress(message, target)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10_000
    assert peak < 100_000


CODES = np.arange(1 << 16, dtype=np.uint16)


def values_of(codes: np.ndarray = CODES) -> np.ndarray:
    Bfloat16Codes(codes.size).decode(codes, values := np.empty(codes.size, np.float32))
    return values


def codes_of(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        Bfloat16Codes(values.size).encode(values, codes := np.empty(values.size, np.uint16))
    return codes


def finite() -> np.ndarray:
    """The codes of numbers of plus sign, in ascending order, and of infinity."""
    return CODES[: int(np.flatnonzero(np.isinf(values_of()))[0]) + 1]


def test_values_are_those_that_the_format_defines() -> None:
    codes = np.array([0, 1, 0x3F80, 0x7F7F, 0x8080, 0xFF80], np.uint16)
    largest = 2.0**127 * (2 - 2**-7)
    np.testing.assert_array_equal(values_of(codes), [0, 2**-133, 1, largest, -(2.0**-126), -np.inf])


def test_every_code_is_its_value_s_code() -> None:
    values = values_of()
    again = codes_of(values)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(again[number], CODES[number])
    assert np.isnan(values_of(again[~number])).all()


def test_numbers_between_two_codes_become_the_nearer_and_halves_the_even_one() -> None:
    codes = finite()[:-1]
    values = values_of(codes).astype(np.float64)
    middle = (values[:-1] + values[1:]) / 2
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    single = middle.astype(np.float32)
    assert (single == middle).all(), "the middle of two codes is a float32"
    for sign, bit in ((1, 0), (-1, 0x8000)):
        np.testing.assert_array_equal(codes_of(sign * single), even | bit)
        below, above = (sign * np.nextafter(single, np.float32(limit)) for limit in (-np.inf, np.inf))
        np.testing.assert_array_equal(codes_of(below), codes[:-1] | bit)
        np.testing.assert_array_equal(codes_of(above), codes[1:] | bit)


def test_the_border_of_infinity() -> None:
    border = 2.0**128 * (1 - 2**-9)
    values = np.array([border, np.nextafter(np.float32(border), np.float32(0))], np.float32)
    assert np.isinf(values_of(codes_of(values))).tolist() == [True, False]


def nearest(value: float, ascending: np.ndarray) -> int:
    """The code of a float64 of plus sign, rounded once, by fractions."""
    place = int(np.searchsorted(ascending, value))
    if place == 0 or ascending[place] == value:
        return place
    low, high = (Fraction(float(ascending[place + shift])) for shift in (-1, 0))
    gap = Fraction(value) - low, high - Fraction(value)
    return place if gap[1] < gap[0] or (gap[0] == gap[1] and place % 2 == 0) else place - 1


@pytest.mark.slow
def test_float64_is_rounded_as_if_once() -> None:
    """Numbers whose nearest float32 is the middle of two codes, though they are not."""
    codes = finite()[:-1]
    ascending = values_of(codes).astype(np.float64)
    numbers = np.random.default_rng(2)
    chosen = numbers.integers(0, codes.size - 1, 3000)
    middle = (ascending[chosen] + ascending[chosen + 1]) / 2
    for shift in (-1, 0, 1):
        values = middle + shift * np.spacing(middle) * 2.0 ** numbers.integers(0, 20, middle.size)
        narrowed = np.empty(values.size, np.float32)
        OddRounding(values.size).narrow(values, narrowed)
        assert codes_of(narrowed).tolist() == [nearest(value, ascending) for value in values]


def test_narrowed_numbers_are_odd_neighbours() -> None:
    numbers = np.random.default_rng(3)
    values = numbers.standard_normal(20_000) * 2.0 ** numbers.integers(-160, 129, 20_000)
    values[::7] = np.round(values[::7])
    narrowed = np.empty(values.size, np.float32)
    with np.errstate(all="ignore"):
        OddRounding(values.size).narrow(values, narrowed)
    for value, result in zip(values.tolist(), narrowed, strict=True):
        assert math.isfinite(result)
        if value != float(result):
            assert result.view(np.uint32) % 2 == 1
            assert abs(value) >= 2.0**127 or abs(value - float(result)) < float(np.spacing(np.abs(result)))
    assert (narrowed == values).any()


def test_narrowing_leaves_exact_and_not_finite_numbers() -> None:
    values = np.array([0.0, -0.0, 1.5, -3.0, 2.0**-149, np.inf, -np.inf, np.nan])
    narrowed = np.empty(values.size, np.float32)
    OddRounding(values.size).narrow(values, narrowed)
    np.testing.assert_array_equal(narrowed, values)
    np.testing.assert_array_equal(np.signbit(narrowed[:4]), np.signbit(values[:4]))
