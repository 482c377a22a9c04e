"""Sparse averaging against one process that simulates all nodes; and exactly the k largest elements of any array."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging import top_k
from hpctrain.averaging.base import GradientAverager, Strategy, for_holders
from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind
from hpctrain.averaging.slicing import Compression
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse, SparsePart, SparseSettings, sparse_pays
from hpctrain.averaging.top_k import Band, Selection, TopK, kept_at
from hpctrain.comm.link import LinkModel
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import Lars, Sgd
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine, wait
from tests.support.averaging import (
    LR,
    OraclePart,
    SparseOracle,
    averaged,
    exchanged,
    make_group,
    one_step,
    run_steps,
    shares,
    step_with,
    watched,
)

PLACES = {
    "2 of 1": (0, 1),
    "3 of 1": (0, 1, 2),
    "2 of 2": (0, 1, 0, 1),
    "3 of 2": (2, 1, 0, 0, 1, 2),
    "2 of 3": (0, 0, 0, 1, 1, 1),
}

OPTIONS: dict[str, Any] = {"density": 0.2, "compress": "always", "least_elements": 4, "bucket_bytes": 100}
PAIR_BYTES = 12  # float64 and int32


def _optimizer() -> Optimizer:
    return Sgd(momentum=0.9)


def _trained(
    nodes: Sequence[int], seed: int | None, steps: int = 9, optimizer: Callable[[], Optimizer] = _optimizer, **options: Any
) -> list[tuple[np.ndarray, CollectiveSchedule]]:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, CollectiveSchedule]:
        given = {**OPTIONS, **options}
        averager = averaged(watched(Sparse), make_group(), optimizer(), comm, virtual_engine(comm), nodes=nodes, **given)
        return run_steps(averager, steps), averager.inner.schedule  # type: ignore[attr-defined]

    return run_virtual(len(nodes), program, seed=seed)


def _parts(schedule: CollectiveSchedule) -> list[OraclePart]:
    """Of each compressed slice the parts of a node's ranks."""
    parts = []
    for piece in schedule.slices:
        if piece.compression is not None:
            spans = dict.fromkeys(piece.part(rank, schedule.ranks) for rank in range(schedule.ranks))
            parts += [OraclePart(*span, piece.compression.density) for span in spans]
    return parts


def _check(nodes: Sequence[int], results: list[tuple[np.ndarray, CollectiveSchedule]], steps: int = 9, **oracle: Any) -> None:
    parts = _parts(results[0][1])
    assert parts, "nothing is compressed"
    expected = SparseOracle(nodes, parts, **oracle).train(steps)
    for data, _ in results:
        assert data.tobytes() == results[0][0].tobytes(), "the replicas differ"
        np.testing.assert_allclose(data, expected, rtol=0, atol=1e-12)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("nodes", PLACES.values(), ids=PLACES)
def test_sparse_averaging_is_the_training_that_one_process_simulates(nodes: tuple[int, ...], seed: int | None) -> None:
    _check(nodes, _trained(nodes, seed), momentum=0.9)


#: the optimiser, options of the averager, and what the oracle knows of both
RULES: dict[str, tuple[Callable[[], Optimizer], dict[str, Any], dict[str, Any]]] = {
    **{
        # Of dense slices the owner keeps the momentum.
        f"correction, masking {masking}": (
            lambda: Sgd(momentum=0.0),
            {"momentum_correction": 0.6, "factor_masking": masking},
            {"correction": 0.6, "masking": masking},
        )
        for masking in (False, True)
    },
    "warm-up": (
        _optimizer,
        {"density": 0.1, "warmup_density": 0.8, "warmup_steps": 5},
        {"momentum": 0.9, "density": lambda step: 0.8 * (1 / 8) ** (min(step, 5) / 5)},
    ),
    # By the norm of the sparse sum, of which each element counts once, though all nodes hold it.
    "clipping": (lambda: Sgd(momentum=0.0, clip_norm=0.1), {}, {"clip_norm": 0.1}),
    "ratios of layers": (lambda: Lars(momentum=0.9, trust_coefficient=0.1), {}, {"momentum": 0.9, "trust": 0.1}),
}


@pytest.mark.parametrize("nodes", [PLACES["3 of 1"], PLACES["2 of 2"]], ids=["3 of 1", "2 of 2"])
@pytest.mark.parametrize("rule", RULES)
def test_corrections_warm_ups_and_norms_are_simulated_too(rule: str, nodes: tuple[int, ...]) -> None:
    optimizer, options, oracle = RULES[rule]
    _check(nodes, _trained(nodes, 4, optimizer=optimizer, **options), **oracle)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-12)])
def test_sparse_averaging_at_density_1_is_dense_averaging(dtype: str, tolerance: float) -> None:
    """On 1 to 4 nodes of 1 to 3 ranks; of one node's, each counts as a node."""

    def program(comm: ThreadCommunicator, kind: type[Strategy], nodes: Sequence[int], options: dict[str, Any]) -> np.ndarray:
        averager = averaged(kind, make_group(dtype), _optimizer(), comm, virtual_engine(comm), nodes=nodes, **options)
        return run_steps(averager, 6)

    for count, per_node in product((1, 2, 3, 4), (1, 2, 3)):
        nodes = [rank % count for rank in range(count * per_node)]
        given = {**OPTIONS, "density": 1.0, "two_level": count > 1}
        sparse = run_virtual(len(nodes), partial(program, kind=Sparse, nodes=nodes, options=given), seed=count)
        (alone,) = run_virtual(1, partial(program, kind=Sharded, nodes=None, options={}))
        for data in sparse:
            assert np.linalg.norm(data - alone) <= tolerance * np.linalg.norm(alone), f"{count} nodes of {per_node}"


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("nodes", [PLACES["3 of 1"], PLACES["2 of 2"]], ids=["3 of 1", "2 of 2"])
def test_replicas_have_the_same_bits_after_100_steps_in_any_order_of_messages(nodes: tuple[int, ...]) -> None:
    results = [data.tobytes() for seed in (None, 5, 6) for data, _ in _trained(nodes, seed, 100)]
    assert len(set(results)) == 1


def test_what_is_not_finite_on_one_rank_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = PLACES["2 of 2"]

    def program(comm: ThreadCommunicator) -> set[str]:
        averager = averaged(Sparse, make_group(), _optimizer(), comm, virtual_engine(comm), nodes=nodes, **OPTIONS)
        one_step(averager, 0)
        if comm.rank == 3:
            averager.group.parameters["b.weight"].grad[...] = np.nan  # before it is written again, which no layer does
            averager.group.parameters["unused.weight"].grad[0, 1] = np.inf
        one_step(averager, 1)
        averager.drain()
        return {name for name, parameter in averager.group.parameters.items() if not np.isfinite(parameter.data).all()}

    with np.errstate(invalid="ignore"):
        assert run_virtual(len(nodes), program) == [{"unused.weight"}] * len(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("warmup_steps", [0, 2])
@pytest.mark.parametrize("nodes", PLACES.values(), ids=PLACES)
def test_a_step_sends_what_its_schedule_says(nodes: tuple[int, ...], warmup_steps: int) -> None:
    ranks = len(nodes)

    def program(comm: ThreadCommunicator) -> tuple[Counters, CollectiveSchedule, int]:
        counters, given = Counters(), {**OPTIONS, "warmup_steps": warmup_steps}
        counting = CountingCommunicator(comm, counters)
        averager = averaged(Sparse, make_group(), _optimizer(), counting, virtual_engine(comm), nodes=nodes, **given)
        run_steps(averager, 7)  # past the warm-up, and any new ordering
        before = counters.snapshot()
        run_steps(averager, 1, first=7)
        schedule = averager.schedule
        assert schedule is not None
        # Streams count ranks by number on the node.
        position = comm.rank if averager._order is None else averager._order.index(comm.rank)  # type: ignore[attr-defined]
        return counters.since(before), schedule, position

    for counters, schedule, position in run_virtual(ranks, program):
        expected = exchanged(schedule, position, shares(7, ranks))
        names = {name for name, _ in counters}
        sparse = sum(counters.total(name).exchanged_bytes for name in names if "nodes across nodes" in name)
        assert sparse == PAIR_BYTES * expected[OperationKind.SPARSE] // 2
        everything = schedule.exchanged_bytes_by_rank(shares(7, ranks), 8)[position]
        if ranks == len(set(nodes)):
            assert counters.total().exchanged_bytes == everything
        else:  # dense slices in two levels move no less within nodes
            assert counters.total().exchanged_bytes >= everything - 8 * make_group().size


@pytest.mark.parametrize("warm_up", [{}, {"warmup_density": 0.8, "warmup_steps": 7}], ids=["at once", "warm-up"])
def test_no_step_makes_a_compressor(warm_up: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("hpctrain.averaging.strategies.sparse.TopK", lambda *args, **kw: made.append(1) or TopK(*args, **kw))
    nodes = (0, 1)
    _trained(nodes, None, steps=3, **warm_up)
    first = len(made)
    made.clear()
    _trained(nodes, None, steps=9, **warm_up)
    assert len(made) == first


SAVED_PLACES = {"3 of 1": (0, 1, 2), "2 of 2": (0, 1, 0, 1), "3 of 2": (2, 1, 0, 0, 1, 2), "one rank": (0,)}
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
        flat = random.standard_normal(group.size)
        total += flat
        step_with(averager, LR, flat)
    averager.drain()
    return total


@pytest.mark.parametrize("nodes", SAVED_PLACES.values(), ids=SAVED_PLACES)
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


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("nodes", SAVED_PLACES.values(), ids=SAVED_PLACES)
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


SIZE = 40


def _part(comm: ThreadCommunicator, settings: SparseSettings) -> SparsePart:
    return SparsePart(SIZE, "float64", Compression(comm.size, settings.density), settings, comm, Selection("float64"), (3,))


def test_the_density_falls_exponentially_to_the_last_one() -> None:
    settings = SparseSettings(0.01, 0.25, 4)
    densities = [settings.density_at(step) for step in range(6)]
    assert densities[0] == 0.25
    assert densities[4:] == [0.01, 0.01]
    ratios = [b / a for a, b in pairwise(densities[:5])]
    assert ratios == pytest.approx([(0.01 / 0.25) ** 0.25] * 4)
    assert (settings.largest_density, SparseSettings(0.01, 0.25, 0).largest_density) == (0.25, 0.01)
    assert SparseSettings(0.01, 0.25, 0).density_at(0) == 0.01


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("nodes", [2, 3])
def test_residuals_and_sums_are_all_gradients(nodes: int, warmup: int) -> None:
    settings = SparseSettings(0.1, 0.5, warmup)

    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        part, random = _part(comm, settings), np.random.default_rng(comm.rank)
        given, applied, gradient = np.zeros(SIZE), np.zeros(SIZE), np.empty(SIZE)
        chosen = []
        for step in range(6):
            new = random.standard_normal(SIZE)
            before = part.residual + new
            wait(part.send(new, step))
            sent = before - part.residual
            kept = Compression(comm.size, 0.1).kept(SIZE, settings.density_at(step))
            # The k largest, whole: nothing that is kept back is larger, and what is sent leaves nothing.
            assert np.count_nonzero(sent) == kept
            assert not part.residual[sent != 0].any()
            assert np.abs(before[sent == 0]).max() <= np.abs(before[sent != 0]).min()
            chosen.append(kept)
            part.receive(gradient)
            given, applied = given + new, applied + gradient
        return given, applied, part.residual, chosen

    results = run_virtual(nodes, program)
    given, residuals = (sum(result[i] for result in results) for i in (0, 2))
    for _, applied, _, chosen in results:
        np.testing.assert_allclose(applied + residuals, given, rtol=0, atol=1e-13)
        assert applied.tobytes() == results[0][1].tobytes()
        assert chosen == ([20, 12, 7, 4, 4, 4] if warmup else [4] * 6)


D = 10_000_000

#: 200 Mb/s and 100 us
SLOW = LinkModel(100e-6, 1 / 25e6)


@pytest.mark.parametrize("nodes", [2, 4, 16])
@pytest.mark.parametrize("item_bytes", [4, 8])
def test_the_crossover_by_bytes_alone_is_the_papers_rule(nodes: int, item_bytes: int) -> None:
    """rho < 2 b_v / (m (b_v + b_i)): below 1 / m for float32."""
    pays = partial(sparse_pays, D, nodes, item_bytes, LinkModel(0.0, 1e-9))
    expected = 2 * item_bytes / (nodes * (item_bytes + 4))
    assert pays(int(D * expected * 0.999))
    assert not pays(math.ceil(D * expected * 1.001))


def test_ends_of_the_range() -> None:
    assert not sparse_pays(D, 1, 4, SLOW, 1)  # one node: nothing crosses
    assert sparse_pays(D, 4, 4, SLOW, D // 100)


DTYPES = ["float32", "float64"]


@pytest.fixture(params=["as they are", "small"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits as they are partition arrays of a few thousand elements; small ones sample them and count."""
    if request.param == "small":
        monkeypatch.setattr(top_k, "_BLOCK", 64)
        monkeypatch.setattr(top_k, "_SMALL_SIZE", 0)
        monkeypatch.setattr(top_k, "_SPARE_CANDIDATES", 5)
        monkeypatch.setattr(top_k, "_SAMPLE_STRIDE", 7)


def adversarial(dtype: str, count: int) -> Iterator[np.ndarray]:
    """Random arrays of many kinds: zeros, ties, denormal and huge numbers, layers of different scales, repeating patterns."""
    numbers = np.random.default_rng(3)
    least, largest = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    kinds = [
        lambda d: np.zeros(d),
        lambda d: np.full(d, -0.5),
        lambda d: numbers.standard_normal(d),
        lambda d: numbers.standard_cauchy(d),
        lambda d: numbers.integers(-2, 3, d).astype(float),
        lambda d: numbers.integers(-9, 9, d) * float(least),
        lambda d: np.where(numbers.random(d) < 0.02, numbers.standard_normal(d), 0),
        lambda d: np.where(np.arange(d) % 7 == 0, 0, numbers.standard_normal(d)),
        lambda d: np.where(np.arange(d) % 7 == 0, 9, numbers.random(d)),
        lambda d: numbers.standard_normal(d) * 10.0 ** np.repeat(numbers.integers(-30, 30, 10), d // 10 + 1)[:d],
        lambda d: np.sort(numbers.random(d)),
        lambda d: np.sort(numbers.random(d))[::-1],
        lambda d: numbers.choice([float(largest), -float(largest), 1.0, -0.0], d),
        lambda d: 1 + np.arange(d) * float(np.finfo(dtype).eps),
    ]
    for number in range(count):
        size = int(numbers.choice([1, 2, 3, 50, 700, 2000]))
        yield np.asarray(kinds[number % len(kinds)](size)).astype(dtype)


def message_of(compressor: TopK, values: np.ndarray) -> np.ndarray:
    message = np.empty(compressor.message_size, np.uint8)
    compressor.compress(values, message)
    return message


def check_largest(compressor: TopK, values: np.ndarray, message: np.ndarray) -> None:
    """Exactly `kept` elements, as they are, no other larger, and of ties a run."""
    positions = compressor.positions(message)
    assert positions.size == compressor.kept
    assert compressor.message_size == compressor.kept * (values.itemsize + 4)
    assert (np.diff(positions) > 0).all()
    assert positions.size == 0 or (positions[0] >= 0 and positions[-1] < values.size)
    assert compressor.values(message).tobytes() == values[positions].tobytes()
    magnitudes = np.abs(values)
    np.testing.assert_array_equal(np.sort(magnitudes[positions]), np.sort(magnitudes)[values.size - compressor.kept :])
    ties = np.flatnonzero(magnitudes == magnitudes[positions].min(initial=np.inf))
    chosen = np.flatnonzero(np.isin(ties, positions))
    assert chosen.size == 0 or chosen[-1] - chosen[0] + 1 == chosen.size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_largest_are_kept_of_a_thousand_arrays(dtype: str, limits: None) -> None:
    numbers = np.random.default_rng(4)
    for number, values in enumerate(adversarial(dtype, 1000)):
        kept = int(numbers.choice([1, kept_at(values.size, 0.01), kept_at(values.size, 0.2), values.size]))
        compressor = TopK(values.size, dtype, kept, seed=(number,))
        before = values.copy()
        message = message_of(compressor, values)
        assert before.tobytes() == values.tobytes()
        check_largest(compressor, values, message)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_array_is_sampled_as_it_is(dtype: str) -> None:
    numbers = np.random.default_rng(5)
    for values in (numbers.standard_normal(200_001), np.zeros(200_001), np.where(np.arange(200_001) % 127 == 0, 1e3, 1.0)):
        compressor = TopK(values.size, dtype, 2000)
        check_largest(compressor, values.astype(dtype), message_of(compressor, values.astype(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_and_sent_are_the_array_bit_by_bit(dtype: str, limits: None) -> None:
    for values in adversarial(dtype, 70):
        compressor = TopK(values.size, dtype, kept_at(values.size, 0.1))
        message = message_of(compressor, values)
        residual, sent = values.copy(), np.full_like(values, 7)
        compressor.subtract_from(message, residual)
        compressor.decompress(message, sent)
        assert not ((residual != 0) & (sent != 0)).any()
        total = np.where(sent == 0, residual, sent)
        np.testing.assert_array_equal(total, values)
        np.testing.assert_array_equal(residual + sent, values)
        base = np.arange(values.size).astype(dtype)
        again = base.copy()
        compressor.add_to(message, again)
        np.testing.assert_array_equal(again, base + sent)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_sent_first(dtype: str, value: float, limits: None) -> None:
    values = np.full(3000, np.finfo(dtype).max, dtype)
    compressor = TopK(3000, dtype, 30)
    values[[1234, 2999]] = value
    message = message_of(compressor, values)
    received = np.zeros_like(values)
    compressor.add_to(message, received)
    np.testing.assert_array_equal(np.flatnonzero(~np.isfinite(received)), [1234, 2999])
    residual = values.copy()
    compressor.subtract_from(message, residual)
    assert np.isfinite(residual).all()


def test_the_window_of_ties_follows_from_seed_and_step(limits: None) -> None:
    values = np.ones(5000, np.float32)

    def first(seed: tuple[int, ...], step: int) -> int:
        compressor = TopK(values.size, "float32", 50, seed=seed)
        compressor.begin_step(step)
        positions = compressor.positions(message_of(compressor, values))
        np.testing.assert_array_equal(np.diff(positions), 1)
        return int(positions[0])

    assert first((1, 2), 3) == first((1, 2), 3)
    starts = [first((1, 2), step) for step in range(40)]
    assert len(set(starts)) > 35
    assert min(starts) < 1000
    assert max(starts) > 4000
    assert [first((2, 2), step) for step in range(5)] != starts[:5]


def test_all_or_none_or_one_of_an_array_are_kept() -> None:
    empty = TopK(0, "float32", 0)
    assert (empty.message_size, message_of(empty, np.empty(0, np.float32)).size) == (0, 0)
    everything = TopK(3, "float64", 3)
    values = np.array([0.0, -1.0, 5.0])
    again = np.empty(3)
    everything.decompress(message_of(everything, values), again)
    np.testing.assert_array_equal(again, values)
    single = TopK(1, "float32", 1)
    np.testing.assert_array_equal(single.values(message_of(single, np.array([-2], np.float32))), [-2])


@pytest.mark.parametrize("numbers", [(3000, 700, 30, 1, 900, 3000), (200, 100, 200)])
def test_fewer_are_kept_as_if_it_had_been_made_for_them(numbers: tuple[int, ...], limits: None) -> None:
    values = np.random.default_rng(8).standard_normal(3000).astype(np.float32)
    compressor = TopK(3000, "float32", numbers[0])
    for kept in numbers:
        compressor.keep(kept)
        alone = TopK(3000, "float32", kept)
        assert compressor.message_size == alone.message_size
        np.testing.assert_array_equal(message_of(compressor, values), message_of(alone, values))
        target = values.copy()
        compressor.subtract_from(message_of(compressor, values), target)
        assert np.count_nonzero(target) == 3000 - kept
    with pytest.raises(ValueError, match=f"kept is {numbers[0] + 1}"):
        compressor.keep(numbers[0] + 1)


def test_a_density_keeps_a_whole_number_of_elements() -> None:
    sizes = [(1000, 0.01, 10), (1, 0.01, 1), (100, 0.07, 7), (30, 0.01, 1), (0, 0.5, 0), (7, 1.0, 7)]
    assert [kept_at(size, density) for size, density, _ in sizes] == [kept for *_, kept in sizes]


def test_compressors_that_take_turns_share_their_scratch_memory(limits: None) -> None:
    scratch, numbers = Selection("float32"), np.random.default_rng(6)
    shared = [TopK(size, "float32", kept, scratch=scratch) for size, kept in ((3000, 30), (500, 100), (4000, 10))]
    for compressor in shared:
        values = numbers.standard_normal(compressor.size).astype(np.float32)
        alone = TopK(compressor.size, "float32", compressor.kept)
        np.testing.assert_array_equal(message_of(compressor, values), message_of(alone, values))


def test_a_call_takes_memory_for_a_block_alone() -> None:
    values = np.random.default_rng(7).standard_normal(2_000_000).astype(np.float32)
    compressor = TopK(values.size, "float32", 20_000)
    message = message_of(compressor, values)
    target = values.copy()
    tracemalloc.start()
    try:
        compressor.compress(values, message)
        compressor.add_to(message, target)
        compressor.subtract_from(message, target)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10_000
    assert peak < 2 * 8 * top_k._BLOCK + 10_000


@pytest.mark.parametrize(
    ("size", "kept", "sentence"),
    [
        *((size, kept, f"kept is {kept}") for size, kept in ((5, 0), (5, 6), (0, 1), (5, -1))),
        (2**31, 1, "from 0 to 2147483647"),  # positions would need more bits
    ],
)
def test_an_illegal_number_of_elements_is_refused(size: int, kept: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TopK(size, "float32", kept)


def arrays_about_a_block(dtype: str) -> list[np.ndarray]:
    """Arrays around the size of a block, with ties, zeros of both signs, denormal and not finite numbers."""
    numbers = np.random.default_rng(1)
    tiny = np.finfo(dtype).smallest_subnormal
    mixed = np.array([0.0, -0.0, tiny, -tiny, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan], dtype)
    return [
        np.empty(0, dtype),
        np.array([-3.0], dtype),
        *(numbers.standard_normal(size).astype(dtype) for size in (15, 16, 17, 32, 1000)),
        *(numbers.choice(mixed, size) for size in (16, 100, 333)),
    ]


@pytest.fixture
def small_selections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "_BLOCK", 16)


def magnitudes(values: np.ndarray, passes: Selection) -> np.ndarray:
    return values.view(passes.unsigned) & passes.unsigned.type(passes.top - 1)


@pytest.mark.usefixtures("small_selections")
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_are_all_above_and_a_window_of_the_band(dtype: str) -> None:
    passes = Selection(dtype)
    numbers = np.random.default_rng(2)
    for values in arrays_about_a_block(dtype):
        whole = magnitudes(values, passes)
        for _ in range(20):
            thresholds = np.array([0, 1, passes.infinity, passes.top, *map(int, whole[:5])], object)
            below, above = sorted(numbers.choice(thresholds, 2))
            band = np.flatnonzero((whole.astype(object) >= below) & (whole.astype(object) < above))
            first, stop = sorted(numbers.integers(0, band.size + 1, 2))
            expected = np.sort(np.append(np.flatnonzero(whole.astype(object) >= above), band[first:stop]))
            choice, out = Band(above, below, first, stop), np.full(values.size, -1, np.intp)
            size = passes.positions(values.view(passes.unsigned), choice, out)
            np.testing.assert_array_equal(out[:size], expected)
            if expected.size:
                short = out[: expected.size - 1]
                assert passes.positions(values.view(passes.unsigned), choice, short) is None


@pytest.mark.usefixtures("small_selections")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_common_magnitude_is_one_that_many_of_a_sample_have(dtype: str) -> None:
    passes = Selection(dtype)
    passes.reserve(1000, 0)
    values = np.where(np.arange(1000) % 2 == 0, -4, np.arange(1000)).astype(dtype)
    bits = values.view(passes.unsigned)
    assert passes.common(bits, 1, 998) == int(np.array(4, dtype).view(passes.unsigned))
    assert passes.common(bits, 1, 100) is None
