"""Descents on a device give the bits of the host's, for every cut of the buffers into runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.backend.arithmetic import Corrections, MomentRule, UpdateRun
from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.kernels.cuda.descent import TILE
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from tests.support.emulated import CudaKernelsFactory

HOST = HostArithmetic()
SIZE = 2 * TILE + 77
#: (factor, nesterov)
RULES = [(0.0, False), (0.9, False), (0.9, True)]


def _runs(step: int) -> list[UpdateRun]:
    """Runs with gaps; places that are no whole packs; an offset that is none; an empty run."""
    scale = 1 / (step + 1)
    return [
        UpdateRun(0, 3, 1.0, 0.0),
        UpdateRun(3, 8, scale, 1e-4),
        UpdateRun(10, 10, scale, 1e-4),
        UpdateRun(16, TILE + 16, scale, 1e-4, -8),
        UpdateRun(TILE + 20, SIZE - 5, 0.5 * scale, 0.0, -11),
    ]


def _train(
    kernels: CudaKernelSet, dtype: str, factor: float, nesterov: bool, *, start: int = 0, shadowed: bool = False
) -> tuple[np.ndarray, ...]:
    """Three steps on a device and on the host, which must agree. start: of the buffers in their memory."""
    random = np.random.default_rng(5)
    arithmetic = kernels.arithmetic
    host = [random.standard_normal(SIZE).astype(dtype) for _ in range(2)] + [np.zeros(SIZE if factor else 0, dtype)]
    device = [arithmetic.zeros(x.size + start, dtype)[start:] for x in host]
    for array, values in zip(device, host, strict=True):
        arithmetic.from_host(array, values)
    shadow = arithmetic.zeros(SIZE + start, "bfloat16")[start:] if shadowed else None
    descent = arithmetic.descent(*device, factor=factor, nesterov=nesterov, shadow=shadow)
    for step in range(3):
        gradient = random.standard_normal(SIZE).astype(dtype)
        arithmetic.from_host(device[1], gradient)
        descent.update(iter(_runs(step)), 0.1 / (step + 1))
        HOST.descent(host[0], gradient, host[2], factor=factor, nesterov=nesterov).update(_runs(step), 0.1 / (step + 1))
    for array, values in zip((device[0], device[2]), (host[0], host[2]), strict=True):
        np.testing.assert_array_equal(arithmetic.to_host(array), values)
    return host[0], arithmetic.to_host(device[0] if shadow is None else shadow)


@pytest.mark.parametrize(("factor", "nesterov"), RULES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_are_the_hosts(cuda_kernels: CudaKernelsFactory, dtype: str, factor: float, nesterov: bool, seed: int) -> None:
    _train(cuda_kernels(seed=seed), dtype, factor, nesterov)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_cut_into_runs_gives_the_hosts_bits(cuda_kernels: CudaKernelsFactory, data: st.DataObject) -> None:
    """Places in the state are packed in the order of the runs, as those of an owner's are."""
    cuts = sorted(data.draw(st.sets(st.integers(0, SIZE), min_size=2, max_size=12)))
    numbers = st.floats(0, 4, width=32)
    runs, size = [], 0
    for start, stop in pairwise(cuts):
        if data.draw(st.booleans()):
            runs.append(UpdateRun(start, stop, data.draw(numbers), data.draw(numbers), size - start))
            size += stop - start
    random = np.random.default_rng(len(runs))
    host = [random.standard_normal(n).astype(np.float32) for n in (SIZE, SIZE, size)]
    arithmetic = cuda_kernels(seed=data.draw(st.integers(0, 9))).arithmetic
    device = [arithmetic.zeros(x.size, "float32") for x in host]
    for array, values in zip(device, host, strict=True):
        arithmetic.from_host(array, values)
    for service, arrays in ((arithmetic, device), (HOST, host)):
        service.descent(*arrays, factor=0.9, nesterov=False).update(runs, 0.1)
    for array, values in zip(device, host, strict=True):
        np.testing.assert_array_equal(arithmetic.to_host(array), values)


@pytest.mark.parametrize("start", [1, 2, 4])
def test_buffers_may_begin_at_any_element(cuda_kernels: CudaKernelsFactory, start: int) -> None:
    _train(cuda_kernels(), "float32", 0.9, True, start=start, shadowed=True)


def test_the_shadow_is_written_where_data_is(cuda_kernels: CudaKernelsFactory) -> None:
    data, shadow = _train(cuda_kernels(), "float32", 0.9, False, shadowed=True)
    rounded = bfloat16_values(bfloat16_bits(data))
    for run in _runs(0):
        np.testing.assert_array_equal(shadow[run.start : run.stop], rounded[run.start : run.stop])
    assert not shadow[8:16].any()
    assert not shadow[SIZE - 5 :].any()


def test_extreme_values_have_the_hosts_bits(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, 1.0], np.float32)
    data, gradient = (values[pick.reshape(-1)] for pick in np.meshgrid(np.arange(9), np.arange(9)))
    arrays = [kernels.arithmetic.zeros(81, "float32") for _ in range(3)]
    kernels.arithmetic.from_host(arrays[0], data)
    kernels.arithmetic.from_host(arrays[1], gradient)
    runs = [UpdateRun(0, 40, 1.0, 0.0), UpdateRun(40, 81, 2.0, 0.5)]
    kernels.arithmetic.descent(*arrays, factor=0.9, nesterov=True).update(runs, 0.3)
    with np.errstate(all="ignore"):
        HOST.descent(data, gradient, np.zeros(81, np.float32), factor=0.9, nesterov=True).update(runs, 0.3)
    arrived = kernels.arithmetic.to_host(arrays[0])
    np.testing.assert_array_equal(arrived, data)
    np.testing.assert_array_equal(np.signbit(arrived[np.isfinite(data)]), np.signbit(data[np.isfinite(data)]))


def test_tables_are_uploaded_where_runs_change_and_memory_is_kept(
    cuda_kernels: CudaKernelsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = cuda_kernels()
    device, uploads = kernels.runtime.device, []
    upload = device.upload

    def counted(*arguments: object) -> None:
        uploads.append(arguments)
        upload(*arguments)  # type: ignore[arg-type]

    arrays = [kernels.arithmetic.zeros(100, "float32") for _ in range(3)]
    descent = kernels.arithmetic.descent(*arrays, factor=0.9, nesterov=False)
    monkeypatch.setattr(device, "upload", counted)
    steps = [[UpdateRun(0, 60, 1.0, 0.1), UpdateRun(60, 70, 1.0, 0.0)], [UpdateRun(70, 100, 1.0, 0.0)]]
    for runs in steps:
        descent.update(runs, 0.1)
    used = device.memory_used()
    for _ in range(3):
        for runs in steps:
            descent.update(runs, 0.1)
    assert len(uploads) == 2
    descent.update([UpdateRun(0, 70, 0.5, 0.1)], 0.1)
    descent.update([UpdateRun(0, 70, 0.25, 0.1)], 0.1)
    descent.update([], 0.1)
    assert len(uploads) == 4
    assert device.memory_used() == used


def test_more_runs_in_the_same_place_get_a_larger_table(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    arrays = [kernels.arithmetic.zeros(64, "float32") for _ in range(3)]
    kernels.arithmetic.fill(arrays[1], 1)
    descent = kernels.arithmetic.descent(arrays[0], arrays[1], arrays[2][:0], factor=0.0, nesterov=False)
    expected = np.zeros(64, np.float32)
    for count in (1, 4, 2, 64, 8):
        step = 64 // count
        descent.update([UpdateRun(i * step, (i + 1) * step, i, 0.0) for i in range(count)], 1.0)
        expected -= np.arange(64) // step
    np.testing.assert_array_equal(kernels.arithmetic.to_host(arrays[0]), expected)


@pytest.mark.parametrize("directs", [False, True])
@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments_have_the_hosts_bits(cuda_kernels: CudaKernelsFactory, dtype: str, start: int, directs: bool) -> None:
    """Three steps: of numbers as they come, of very small and of large ones. start: of the buffers in their memory."""
    random, arithmetic = np.random.default_rng(7), cuda_kernels(seed=start).arithmetic
    rule = MomentRule(0.9, 0.99, 1e-8)
    host = [random.standard_normal(SIZE).astype(dtype) for _ in range(2)] + [np.zeros(SIZE, dtype) for _ in range(2)]
    device = [arithmetic.zeros(x.size + start, dtype)[start:] for x in host]
    shadow = arithmetic.zeros(SIZE + start, "bfloat16")[start:] if dtype == "float32" else None
    arithmetic.from_host(device[0], host[0])
    descents = HOST.moment_descent(*host, rule), arithmetic.moment_descent(*device, rule, shadow=shadow)
    for step, scale in enumerate((1.0, 1e-25, 1e10)):
        gradient = (scale * random.standard_normal(SIZE)).astype(dtype)
        host[1][:] = gradient
        arithmetic.from_host(device[1], gradient)
        corrections = Corrections(1 / (1 - 0.9 ** (step + 1)), 1 / (1 - 0.99 ** (step + 1)) ** 0.5)
        for descent in descents:
            if directs:
                descent.direct(iter(_runs(step)), corrections)
            else:
                descent.update(iter(_runs(step)), corrections, 0.01)
        for array, values in zip(device, host, strict=True):
            np.testing.assert_array_equal(arithmetic.to_host(array), values)
    if shadow is not None and not directs:
        written = arithmetic.to_host(shadow)[: _runs(0)[1].stop]
        np.testing.assert_array_equal(written, bfloat16_values(bfloat16_bits(host[0]))[: written.size])


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_averages_have_the_hosts_bits(cuda_kernels: CudaKernelsFactory, dtype: str, start: int) -> None:
    random, arithmetic = np.random.default_rng(3), cuda_kernels(seed=start).arithmetic
    average, values = (random.standard_normal(SIZE).astype(dtype) for _ in range(2))
    target, source = (arithmetic.zeros(SIZE + start, dtype)[start:] for _ in range(2))
    arithmetic.from_host(target, average)
    arithmetic.from_host(source, values)
    expected = 0.9 * average + 0.1 * values
    arithmetic.average_into(target, source, 0.9)
    HOST.average_into(average, values, 0.9)
    np.testing.assert_array_equal(arithmetic.to_host(target), average)
    np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-6)
