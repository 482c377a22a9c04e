"""The arithmetic service of a kernel set, call by call, from host arrays to host arrays."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.arithmetic import Array, UpdateRun
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import parameter_dtype
from hpctrain.core.intervals import whole

_SIZE = 5_003  # no multiple of any pack
_RUNS = (UpdateRun(0, 1_000, 1.0, 1e-4), UpdateRun(1_000, 1_001, 0.5, 0.0), UpdateRun(1_001, _SIZE, 2.0, 0.01))


def arithmetic_results(kernels: KernelSet, dtype: str) -> dict[str, np.ndarray]:
    """Everything that the service computes, on the host, float64. dtype: of activations; the rest follows from it."""
    arithmetic, random = kernels.arithmetic, np.random.default_rng(12)
    kept = parameter_dtype(dtype)
    values = [random.standard_normal(_SIZE).astype(np.float32).astype(np.float64) for _ in range(3)]

    def array(number: int) -> Array:
        target = arithmetic.zeros(_SIZE, kept)
        arithmetic.from_host(target, values[number].astype(kept))
        return target

    results: dict[str, Array] = {"from host": array(0)}
    results["copy"] = arithmetic.zeros(_SIZE, kept)
    arithmetic.copy(results["copy"], array(1))
    results["sum"], results["difference"], results["fill"] = array(0), array(0), arithmetic.zeros(_SIZE, kept)
    arithmetic.add(results["sum"], array(1))
    arithmetic.subtract(results["difference"], array(2))
    arithmetic.fill(results["fill"], 0.375)
    images = array(0)[: 5 * 9 * 7 * 15].reshape(5, 9, 7, 15)
    results["box"], results["means"], results["spread"] = (arithmetic.zeros(size, kept) for size in (2 * 9 * 15, 75, images.size))
    for accumulate in (False, True):
        target = results["box"].reshape(2, 9, 1, 15)
        arithmetic.copy_box(target, whole(target.shape), images, ((3, 5), (0, 9), (6, 7), (0, 15)), accumulate=accumulate)
    arithmetic.sum_pixels(results["means"].reshape(5, 1, 1, 15), images, 1 / 63)
    arithmetic.spread_pixels(results["spread"].reshape(images.shape), results["means"].reshape(5, 1, 1, 15), 0.25)
    for nesterov in (False, True):
        data, gradient, momentum = array(0), array(1), array(2)
        descent = arithmetic.descent(data, gradient, momentum, factor=0.9, nesterov=nesterov)
        for lr in (0.1, 0.05):
            descent.update(_RUNS, lr)
        results |= {f"data, nesterov {nesterov}": data, f"momentum, nesterov {nesterov}": momentum}
    hosted = {name: np.array(arithmetic.to_host(result), np.float64) for name, result in results.items()}
    first, second = array(0), array(1)  # held until the work on them is done: tables of arrays know their places only
    hosted["square sums"] = np.array(arithmetic.square_sums([first, second]), np.float64)
    arithmetic.fill(second[7:8], float("nan"))
    hosted["finite"] = np.array(arithmetic.fetch_finite([first, second]).result(), np.float64)
    hosted["fetch"] = np.array(arithmetic.fetch(results["sum"]).result(), np.float64)
    return hosted
