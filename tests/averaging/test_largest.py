"""Exactly the k largest, whatever the array, by passes over small arrays too; what is not sent is kept and sent later."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from hpctrain.averaging import top_k
from hpctrain.averaging import top_k as selection
from hpctrain.averaging.top_k import Band, Selection, TopK, kept_at

DTYPES = ["float32", "float64"]


@pytest.fixture(params=["as they are", "small"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits as they are partition arrays of a few thousand elements; small ones sample them and count."""
    if request.param == "small":
        monkeypatch.setattr(selection, "_BLOCK", 64)
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
    assert peak < 2 * 8 * selection._BLOCK + 10_000


@pytest.mark.parametrize(
    ("size", "kept", "sentence"),
    [
        *((size, kept, f"kept is {kept}") for size, kept in ((5, 0), (5, 6), (0, 1), (5, -1))),
        (2**31, 1, "at most 2147483647"),  # positions would need more bits
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
    monkeypatch.setattr(selection, "_BLOCK", 16)


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
