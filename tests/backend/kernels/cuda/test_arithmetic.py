"""The arithmetic service of the cuda set on the emulated device; bfloat16 is rounded as on the host, to the bit."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.kernels.cuda.arithmetic import STAGING_MOST, CudaArithmetic
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from tests.support.emulated import CudaKernelsFactory

DTYPES = ("float64", "float32", "bfloat16")
#: (elements, first one in its memory): whole packs, a rest, less than a pack, none; at places where packs may begin and not
PLACES = [(64, 0), (67, 0), (3, 0), (0, 0), (64, 1), (67, 4), (300, 2)]


def _values(size: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Random numbers that `dtype` holds exactly."""
    values = np.random.default_rng(seed).standard_normal(size) * 100
    return bfloat16_values(bfloat16_bits(values)) if dtype == "bfloat16" else values.astype(dtype)


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_values(bfloat16_bits(values)) if dtype == "bfloat16" else values.astype(dtype)


@pytest.mark.parametrize(("size", "first"), PLACES)
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_copies_round(cuda_kernels: CudaKernelsFactory, target_dtype: str, source_dtype: str, size: int, first: int) -> None:
    for seed in range(3):
        arithmetic = cuda_kernels(seed=seed).arithmetic
        values = _values(size, source_dtype)
        source, whole = arithmetic.zeros(size + first, source_dtype)[first:], arithmetic.zeros(size + first + 9, target_dtype)
        arithmetic.from_host(source, values)
        arithmetic.copy(whole[first : first + size], source)
        arrived = arithmetic.to_host(whole)
        np.testing.assert_array_equal(arrived[first : first + size], _rounded(values, target_dtype))
        assert not arrived[:first].any()
        assert not arrived[first + size :].any()


@pytest.mark.parametrize(("size", "first"), PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_subtract_and_fill(cuda_kernels: CudaKernelsFactory, dtype: str, size: int, first: int) -> None:
    a, b = _values(size, dtype, 1), _values(size, dtype, 2)
    for seed in range(3):
        arithmetic = cuda_kernels(seed=seed).arithmetic
        whole, source = arithmetic.zeros(size + first + 9, dtype), arithmetic.zeros(size + first, dtype)[first:]
        target = whole[first : first + size]
        arithmetic.from_host(target, a)
        arithmetic.from_host(source, b)
        arithmetic.add(target, source)
        np.testing.assert_array_equal(arithmetic.to_host(target), _rounded(a + b, dtype))
        arithmetic.subtract(target, source)
        np.testing.assert_array_equal(arithmetic.to_host(target), _rounded(_rounded(a + b, dtype) - b, dtype))
        arithmetic.fill(target, 0.3)
        expected = np.zeros(whole.size)
        expected[first : first + size] = _rounded(np.array(0.3), dtype)
        np.testing.assert_array_equal(arithmetic.to_host(whole), expected)


def _half_bits(kernels: CudaKernelSet, source: np.ndarray) -> np.ndarray:
    """The bits of float32 values that a kernel has rounded to bfloat16."""
    arithmetic = kernels.arithmetic
    single, half = arithmetic.zeros(source.size, "float32"), arithmetic.zeros(source.size, "bfloat16")
    arithmetic.from_host(single, source)
    arithmetic.copy(half, single)
    return arithmetic.to_host(half.view("uint16"))


def test_every_bfloat16_survives_the_way_to_float32_and_back(cuda_kernels: CudaKernelsFactory) -> None:
    kernels, bits = cuda_kernels(), np.arange(1 << 16, dtype=np.uint16)
    arithmetic = kernels.arithmetic
    half, single = arithmetic.zeros(bits.size, "bfloat16"), arithmetic.zeros(bits.size, "float32")
    arithmetic.from_host(half.view("uint16"), bits)
    arithmetic.copy(single, half)
    np.testing.assert_array_equal(arithmetic.to_host(single).view(np.uint32), bits.astype(np.uint32) << 16)
    arithmetic.copy(half, single)
    not_a_number = (bits & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(arithmetic.to_host(half.view("uint16")), np.where(not_a_number, 0x7FFF, bits))


def test_every_float32_near_a_bfloat16_is_rounded_as_on_the_host(cuda_kernels: CudaKernelsFactory) -> None:
    """Between all neighbours: the tie, and one bit below and above it; subnormals, the largest numbers and NaN are among them."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        source = (upper | np.uint32(lower)).view(np.float32)
        np.testing.assert_array_equal(_half_bits(cuda_kernels(), source), bfloat16_bits(source))


def test_random_float32_are_rounded_to_the_nearest(cuda_kernels: CudaKernelsFactory) -> None:
    source = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    source = source[np.isfinite(source) & (np.abs(source) < 3e38)]
    rounded = bfloat16_values(_half_bits(cuda_kernels(), source)).astype(np.float64)
    step = np.spacing(np.abs(source)).astype(np.float64) * (1 << 16)
    assert (np.abs(rounded - source) <= step / 2).all()


def test_square_sums_and_finiteness(cuda_kernels: CudaKernelsFactory) -> None:
    arithmetic = cuda_kernels().arithmetic
    flat = arithmetic.zeros(100, "float32")
    arithmetic.from_host(flat, np.arange(100))
    arrays = [flat[:10], flat[10:10], flat[10:]]
    for _ in range(2):
        np.testing.assert_array_equal(arithmetic.square_sums(arrays), [285, 0, 328350 - 285])
    assert arithmetic.square_sums([]).shape == (0,)
    before = arithmetic.fetch_finite(arrays)
    arithmetic.fill(flat[50:51], np.nan)
    after = arithmetic.fetch_finite(arrays)
    assert before.result().tolist() == [True, True, True]
    assert after.result().tolist() == [True, True, False]
    assert arithmetic.fetch_finite([]).result().shape == (0,)


def test_the_second_call_for_the_same_arrays_allocates_nothing(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    flat = kernels.arithmetic.zeros(1000, "float32")

    def step() -> None:
        kernels.arithmetic.square_sums([flat[:10], flat[10:]])
        kernels.arithmetic.fetch_finite([flat[:10], flat[10:]]).result()
        kernels.arithmetic.fetch(flat[:10]).result()
        kernels.arithmetic.from_host(flat, np.zeros(1000))
        kernels.arithmetic.to_host(flat)

    step()
    used, kernels.runtime.device.pinned = kernels.runtime.device.memory_used(), None  # type: ignore[method-assign, assignment]
    step()
    assert kernels.runtime.device.memory_used() == used


def test_large_arrays_travel_by_pieces(cuda_kernels: CudaKernelsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.backend.kernels.cuda.arithmetic.STAGING_BYTES", 4096)
    arithmetic = cuda_kernels(seed=4).arithmetic
    size = (STAGING_MOST + 5) * 4096 + 3
    values = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    array = arithmetic.zeros(size, "uint8")
    arithmetic.from_host(array, values)
    arrived = arithmetic.to_host(array)
    np.testing.assert_array_equal(arrived, values)
    with pytest.raises(ValueError, match="read-only"):
        arrived[0] = 1


def test_arrays_may_be_dropped_before_it_is_known_whether_they_are_finite(cuda_kernels: CudaKernelsFactory) -> None:
    for seed in range(10):
        kernels = cuda_kernels("float32", seed)
        answers = []
        for value in (1.0, np.inf):
            array = kernels.arithmetic.zeros(8, "float32")
            kernels.arithmetic.fill(array, value)
            answers.append(kernels.arithmetic.fetch_finite([array]))
            del array
        assert [bool(answer.result()[0]) for answer in answers] == [True, False]
        kernels.runtime.device.finish()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bfloat16_arrives_rounded_piece_by_piece(
    cuda_kernels: CudaKernelsFactory, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr("hpctrain.backend.kernels.cuda.arithmetic.STAGING_BYTES", 256)
    source = np.random.default_rng(0).standard_normal((7, 43)).astype(dtype)
    for seed in range(3):
        arithmetic = cuda_kernels("bfloat16", seed=seed).arithmetic
        target = arithmetic.zeros(301, "bfloat16").reshape(7, 43)
        values = source.copy()
        arithmetic.from_host(target, values)
        values[...] = 0
        np.testing.assert_array_equal(arithmetic.to_host(target), bfloat16_values(bfloat16_bits(source)).reshape(7, 43))


def test_boxes_are_copied(cuda_kernels: CudaKernelsFactory) -> None:
    arithmetic = cuda_kernels().arithmetic
    target, source = arithmetic.zeros(12, "float32").reshape(3, 4), arithmetic.zeros(2, "float32").reshape(1, 2)
    arithmetic.from_host(source, np.array([[1.0, 2.0]]))
    for _ in range(2):
        arithmetic.copy_box(target, ((1, 2), (2, 4)), source, ((0, 1), (0, 2)), accumulate=True)
    np.testing.assert_array_equal(arithmetic.to_host(target), [[0] * 4, [0, 0, 2, 4], [0] * 4])


def test_sizes_that_differ_are_refused(cuda_kernels: CudaKernelsFactory) -> None:
    arithmetic = cuda_kernels().arithmetic
    short, long = arithmetic.zeros(3, "float32"), arithmetic.zeros(4, "float32")
    for call in (arithmetic.copy, arithmetic.add, arithmetic.subtract):
        with pytest.raises(AssertionError, match="4 elements do not fit"):
            call(short, long)
    with pytest.raises(AssertionError, match="4 elements do not fit"):
        arithmetic.from_host(short, np.zeros(4))
    with pytest.raises(AssertionError, match="is not added"):
        arithmetic.add(short, arithmetic.zeros(3, "bfloat16"))


def test_the_service_is_that_of_all_sets() -> None:
    for name, method in inspect.getmembers(Arithmetic, inspect.isfunction):
        offered = getattr(CudaArithmetic, name)
        assert offered is not method, f"{name} goes by way of the host"
        assert inspect.signature(offered).parameters.keys() == inspect.signature(method).parameters.keys()
