"""Stage `kernels`: every operator against float64 NumPy, and a GPU's against emulated ones; all roundings to bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from benchmarks.gpu.arithmetic_cases import arithmetic_results
from benchmarks.gpu.cases import Case, cases, exact
from benchmarks.gpu.operator_run import OperatorRun
from benchmarks.gpu.roundings import check_roundings
from benchmarks.gpu.settings import EMULATED_SEED, NotBuiltYetError, Settings
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import SoftmaxCrossEntropySpec
from hpctrain.core.errors import BackendError
from hpctrain_testing.emulator import kernels as build
from hpctrain_testing.emulator.device import EmulatedDevice

#: of float64 NumPy, relative to the largest element of the array
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "tf32": 1e-4, "bfloat16": 1e-2}
#: Limit for float32 sums of n products, divided by sqrt(n): 8 half units in the last place. A sum of one product after another
#: is off by up to sqrt(n) half units of the largest sum; an H100's 3x3 weight gradients (n = 12,544) are off by 2.3 sqrt(n).
#: Factors rounded to TF32 lead to errors of 3e-4 for every n, five times the limit at n = 12,544.
_LIMIT_BY_ROOT = 8 * 2.0**-24
#: part of the error of a set that has no such operator
NO_OPERATOR = "has no "


def run(settings: Settings, report: StageReport) -> None:
    """Compare all cases in all precisions, then the loss and arithmetic, then the roundings."""
    device = settings.make_device()
    if not settings.emulated and build.compiler():
        build.prepare(map(sources.text, sources.names()))  # the twins' sources, on all cores
    missing: set[str] = set()
    for precision in settings.precisions():
        kernels = kernel_set(device, precision)
        twin = kernel_set(EmulatedDevice(EMULATED_SEED), precision) if not settings.emulated and build.compiler() else None
        compare_all(kernels, twin, precision, cases(small=settings.emulated), report, missing)
        compare_loss(kernels, precision, report, missing)
        compare_arithmetic(kernels, precision, report)
    check_roundings(device, settings.emulated, report)
    if missing:
        raise NotBuiltYetError(f"operators of {', '.join(sorted(missing))}")


def kernel_set(device: Device, precision: Precision) -> CudaKernelSet:
    """Return the cuda set on a device."""
    return CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision))


def compare_all(
    kernels: CudaKernelSet,
    twin: CudaKernelSet | None,
    precision: Precision,
    chosen: Iterable[Case],
    report: StageReport,
    missing: set[str],
) -> None:
    """Add a check for each case, and record its largest error by array. twin: the same set on the emulated device."""
    rows: list[dict[str, Any]] = []
    for case in chosen:
        try:
            row = compare(kernels, twin, precision, case)
        except BackendError as error:
            if NO_OPERATOR not in str(error):
                raise
            missing.add(type(case.spec).__name__.removesuffix("Spec"))
            continue
        except Exception as error:
            row = {"case": case.name, "errors": {}, "worst": float("inf"), "failure": f"{type(error).__name__}: {error}"}
        rows.append(row)
        text = row.get("failure") or f"{row['array']} {row['errors'][row['array']]:.2e} of {row['limit']:.1e}"
        report.check(f"{case.name} in {precision}", not row.get("failure") and row["errors"][row["array"]] <= row["limit"], text)
    report.add(f"errors {precision}", rows)
    worst = max((row["worst"] for row in rows), default=float("inf"))
    report.note(f"{precision} {worst:.1e} ({len(rows)} cases)")


def compare(kernels: CudaKernelSet, twin: CudaKernelSet | None, precision: Precision, case: Case) -> dict[str, Any]:
    """Return the errors of a case by array, relative to NumPy's largest element, and the array that is nearest its limit."""
    fine = case.library and precision == "float32"
    actual, expected = results(kernels, kernels.runtime.dtype, case, fine), reference(case, fine)
    errors = differences(actual, expected)
    limits = {name: tolerance(precision, case.terms(name, expected["output"].shape)) for name in errors}
    array = max(errors, key=lambda name: errors[name] / limits[name])
    row = {"case": case.name, "errors": errors, "worst": max(errors.values()), "array": array, "limit": limits[array]}
    if twin is not None and not case.library and np.prod(case.shapes[0]) < 20_000:
        row["from_emulated"] = differences(actual, results(twin, twin.runtime.dtype, case))
    return row


def tolerance(precision: Precision, terms: int) -> float:
    """Return the limit for errors of sums of `terms` products, relative to the largest sum."""
    return max(TOLERANCES[precision], _LIMIT_BY_ROOT * terms**0.5) if precision == "float32" else TOLERANCES[precision]


@cache
def reference(case: Case, fine: bool = False) -> dict[str, np.ndarray]:
    """Return NumPy's results in float64. Precisions with the same inputs share them."""
    return results(NumpyKernelSet(), "float64", case, fine)


def results(kernels: KernelSet, dtype: str, case: Case, fine: bool = False) -> dict[str, np.ndarray]:
    """Return everything that an operator writes in a step, in float64 on the host. fine: inputs have all bits of float32."""
    operator = OperatorRun(kernels, case.spec, case.inputs(fine), case.parameters(fine), dtype)
    written = operator.forward()
    cotangent = exact(np.random.default_rng(9).standard_normal(written["output"].shape), fine)
    return written | operator.backward(cotangent)


def differences(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Return by array the largest difference over the largest element; infinity if shapes differ or values are not finite."""
    errors = {}
    for name, values in expected.items():
        if actual[name].shape != values.shape or not np.isfinite(actual[name]).all():
            errors[name] = float("inf")
            continue
        scale = max(float(np.abs(values).max(initial=0.0)), 1e-30)
        errors[name] = float(np.abs(actual[name] - values).max(initial=0.0)) / scale
    return errors


def compare_loss(kernels: CudaKernelSet, precision: Precision, report: StageReport, missing: set[str]) -> None:
    """Compare softmax cross entropy with and without smoothing."""
    logits = 4.0 * exact(np.random.default_rng(10).standard_normal((37, 1000)))
    labels = np.random.default_rng(11).integers(0, 1000, 37)
    for smoothing in (0.0, 0.1):
        try:
            actual = loss_results(kernels, kernels.runtime.dtype, logits, labels, smoothing)
        except BackendError as error:
            if NO_OPERATOR not in str(error):
                raise
            missing.add("SoftmaxCrossEntropy")
            return
        errors = differences(actual, loss_results(NumpyKernelSet(), "float64", logits, labels, smoothing))
        worst = max(errors.values())
        report.check(f"loss, smoothing {smoothing}, in {precision}", worst <= TOLERANCES[precision], f"{worst:.2e}")


def compare_arithmetic(kernels: CudaKernelSet, precision: Precision, report: StageReport) -> None:
    """Compare copies, sums, updates and norms outside of operators with NumPy, both in the dtype of parameters."""
    kept = kernels.runtime.parameter_dtype
    errors = differences(arithmetic_results(kernels, kernels.runtime.dtype), arithmetic_results(NumpyKernelSet(), kept))
    worst = max(errors, key=lambda name: errors[name])
    report.check(f"arithmetic of parameters in {precision}", errors[worst] <= TOLERANCES[kept], f"{worst}: {errors[worst]:.2e}")


def loss_results(
    kernels: KernelSet, dtype: str, logits: np.ndarray, labels: np.ndarray, smoothing: float
) -> dict[str, np.ndarray]:
    """Return the sums, and the gradient of the logits."""
    arithmetic = kernels.arithmetic
    x, dx = (arithmetic.zeros(logits.size, dtype).reshape(logits.shape) for _ in range(2))
    arithmetic.from_host(x, logits.astype("float32" if dtype == "bfloat16" else dtype))
    sums = kernels.make_loss(SoftmaxCrossEntropySpec(smoothing)).run(x, labels, 64, dx).result()
    values = np.array([sums.loss, sums.top1, sums.top5, sums.count], np.float64)
    return {"sums": values, "d logits": np.array(arithmetic.to_host(dx), np.float64)}
