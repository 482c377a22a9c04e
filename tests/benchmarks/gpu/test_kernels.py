"""Comparisons of a device with NumPy: what they run is what operators compute, and what they find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.arithmetic_cases import arithmetic_results
from benchmarks.gpu.cases import Case, cases, exact
from benchmarks.gpu.kernels import TOLERANCES, compare_all, differences, loss_results, results
from benchmarks.gpu.roundings import SOURCE, count_differences, rounding_kernel
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.abilities import InputView
from hpctrain.backend.kernels.base import Operator, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import PoolSpec, TensorSpec
from hpctrain.testing.operators import OperatorBench
from tests.support.emulated import CudaKernelsFactory

CASES = cases(small=True)
FAST = [case for case in CASES if "pool" in case.name or case.name.split()[0] == "relu"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_operators_run_is_that_of_the_projects_own_bench(case: Case) -> None:
    kernels = NumpyKernelSet()
    actual = results(kernels, "float64", case)
    bench = OperatorBench(kernels, case.spec, case.inputs(), parameters=dict(case.parameters()))
    n = case.shapes[0][0]
    output = bench.forward(StepContext(training=True, step=3, sample_ids=np.arange(n), global_count=n))
    np.testing.assert_array_equal(actual.pop("output"), output)
    if isinstance(bench.operator, InputView):
        return
    gradients = bench.backward(exact(np.random.default_rng(9).standard_normal(output.shape)))
    expected = {f"d input {number}": gradient for number, gradient in enumerate(gradients.inputs)}
    expected |= {f"d {role}": gradient for role, gradient in gradients.parameters.items()} | bench.statistics
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert values is not None
        np.testing.assert_array_equal(actual[name], values, name)


def test_inputs_are_the_same_numbers_in_every_dtype() -> None:
    for case in CASES:
        for values in (*case.inputs(), *case.parameters().values()):
            np.testing.assert_array_equal(exact(values), values)


def test_large_cases_have_the_operations_of_small_ones() -> None:
    assert [type(case.spec) for case in cases(small=False)] == [type(case.spec) for case in CASES]


def test_differences_are_relative_to_the_largest_element_and_infinite_where_there_is_no_number() -> None:
    values = np.array([1.0, -4.0])
    distances = differences(
        {"a": np.array([1.0, -4.4]), "b": np.array([np.nan, 1.0]), "c": values[:1]}, dict.fromkeys("abc", values)
    )
    assert distances["a"] == pytest.approx(0.1)
    assert (distances["b"], distances["c"]) == (np.inf, np.inf)


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_the_emulated_device_passes(cuda_kernels: CudaKernelsFactory, tmp_path: Path, precision: str) -> None:
    report, missing = StageReport(tmp_path / "kernels.json", "kernels", "emulated"), set[str]()
    compare_all(cuda_kernels(precision, 2), None, precision, FAST, report, missing)
    assert not missing
    assert len(report.content["checks"]) == len(FAST)
    assert all(check["passed"] for check in report.content["checks"])
    errors = {row["case"]: row["worst"] for row in report.content[f"errors {precision}"]}
    assert max(errors.values()) <= TOLERANCES[precision]


def test_a_wrong_kernel_and_one_that_raises_are_failed_checks(
    cuda_kernels: CudaKernelsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, kernels = StageReport(tmp_path / "kernels.json", "kernels", "emulated"), cuda_kernels("float64", 2)
    pools = [case for case in FAST if isinstance(case.spec, PoolSpec)][:2]
    make = kernels.make

    def wrong(spec: PoolSpec, inputs: tuple[TensorSpec, ...], **options: bool) -> Operator:
        if spec.kind == "average":
            raise ValueError("no such kernel")
        return make(PoolSpec("average", spec.window), inputs, **options)  # in the place of the maximum

    monkeypatch.setattr(kernels, "make", wrong)
    compare_all(kernels, None, "float64", pools, report, set())
    assert [check["passed"] for check in report.content["checks"]] == [False, False]
    assert report.content["checks"][1]["text"] == "ValueError: no such kernel"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arithmetic_and_loss_on_numpy_are_the_references(dtype: str) -> None:
    values = arithmetic_results(NumpyKernelSet(), dtype)
    np.testing.assert_array_equal(values["finite"], [1.0, 0.0])
    np.testing.assert_array_equal(values["fill"], np.full(values["fill"].size, 0.375))
    np.testing.assert_array_equal(values["sum"], values["fetch"])
    np.testing.assert_allclose(values["sum"] - values["copy"], values["from host"], atol=1e-6)
    logits, labels = np.random.default_rng(0).standard_normal((5, 7)), np.arange(5)
    sums = loss_results(NumpyKernelSet(), dtype, logits, labels, 0.0)
    shifted = logits - logits.max(axis=1, keepdims=True)
    expected = (np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(5), labels]).sum()
    assert sums["sums"][0] == pytest.approx(expected, rel=1e-6)
    assert sums["sums"][3] == 5


@pytest.mark.job
def test_a_wrong_rounding_is_found() -> None:
    """Half away from zero in the place of half to even: every second tie differs, one of 2^17 patterns."""
    device = EmulatedDevice()
    text = sources.text(SOURCE.stem, SOURCE.parent)
    assert count_differences(device, rounding_kernel(device), 0x3F7FF000, 1 << 18, 2) == (0, -1)
    away = text.replace("uint16_t((uint64_t(u) + 0x7fff + (u >> 16 & 1)) >> 16)", "uint16_t((uint64_t(u) + 0x8000) >> 16)")
    assert away != text
    kernel = device.kernel("away", "compare_roundings", text=away)
    count, pattern = count_differences(device, kernel, 0x3F7FF000, 1 << 18, 2)
    assert count == 2
    assert pattern & 0x1FFFF == 0x8000
