"""Stages of the check on a GPU, on the CPU: what they compare, run, time and leave when they pass, fail, cannot run or die."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_check
from benchmarks.gpu import links, pixels, stages, training
from benchmarks.gpu.build import kernel_names, make_convolutions
from benchmarks.gpu.cases import Case, cases, exact
from benchmarks.gpu.kernels import TOLERANCES, compare_all, differences, kernel_set, reference, results, tolerance
from benchmarks.gpu.ladder import Ladder
from benchmarks.gpu.pixels import add_rate, check_bits
from benchmarks.gpu.ranks import compare
from benchmarks.gpu.roundings import SOURCE, count_differences, rounding_kernel
from benchmarks.gpu.sanitizer import check_program
from benchmarks.gpu.settings import NotBuiltYetError, Settings, SkippedError
from benchmarks.gpu.stage_report import FAILED, NOT_BUILT, PASSED, SKIPPED, StageReport
from benchmarks.gpu.stages import STAGES, Stage, publish, run_all, run_apart, run_here
from benchmarks.gpu.training import check_precision, cpu_curve, digest
from benchmarks.gpu.training_run import Task, TrainingRun
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.arithmetic import CudaArithmetic
from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import InputView, Operator, StepContext
from hpctrain.backend.pixels import PixelBatch
from hpctrain.backend.specs import PoolSpec, TensorSpec
from hpctrain.comm import device_probe
from hpctrain.comm.base import Complete
from hpctrain.nn.compile import validate
from hpctrain.testing.operators import OperatorBench
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.virtual.run import lone_rank
from tests.support.emulated import CudaKernelsFactory, EmulatedDeviceFactory


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings("emulated", tmp_path)


def ending(monkeypatch: pytest.MonkeyPatch, settings: Settings, error: Exception | None, *checks: bool) -> dict:
    """The JSON of a stage that checks so and then raises."""

    def stage(_: Settings, report: StageReport) -> None:
        for number, passed in enumerate(checks):
            report.check(f"rule {number}", passed)
        report.note("measured 7")
        if error is not None:
            raise error

    monkeypatch.setattr(Stage, "function", lambda _: stage)
    run_here(Stage("facts", 1), settings)
    return json.loads((settings.out / "facts.json").read_text())


@pytest.mark.parametrize(
    ("error", "checks", "status"),
    [
        (None, (True, True), PASSED),
        (None, (True, False), FAILED),
        (None, (), FAILED),
        (SkippedError("no compiler"), (), SKIPPED),
        (SkippedError("no compiler"), (False,), FAILED),
        (NotBuiltYetError("no loss"), (True,), NOT_BUILT),
    ],
)
def test_the_status_follows_from_checks_and_errors(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, error: Exception | None, checks: tuple[bool, ...], status: str
) -> None:
    content = ending(monkeypatch, settings, error, *checks)
    assert content["status"] == status
    assert content["summary"].endswith("measured 7")
    assert str(error or "") in content["summary"]


def test_an_error_fails_the_stage_and_goes_on_to_the_log(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    with pytest.raises(ZeroDivisionError):
        ending(monkeypatch, settings, ZeroDivisionError("of nothing"), True)
    content = json.loads((settings.out / "facts.json").read_text())
    assert (content["status"], content["summary"]) == (FAILED, "ZeroDivisionError: of nothing; measured 7")


@pytest.mark.job
@pytest.mark.slow
def test_the_command_runs_stages_apart_and_publishes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    arguments = ["--device", "emulated", "--only", "facts", "--out", str(tmp_path / "out"), "--publish", str(results)]
    assert gpu_check.main(arguments) == 0
    (content,) = json.loads((results / "gpu-check.json").read_text())
    assert (content["stage"], content["status"], content["device"]) == ("facts", PASSED, "emulated")
    assert "facts.log" in (results / "gpu-check.log").read_text()
    assert "facts     passed" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "text"), [(-11, "ended with code -11"), (None, "stopped after its limit of 60 s")])
def test_a_stage_that_dies_or_hangs_after_its_report_has_failed(
    code: int | None, text: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries do when a process ends."""

    def reported(command: Sequence[str], settings: Settings, *_: object) -> int | None:
        (settings.out / "facts.json").write_text(json.dumps(ended("facts", PASSED, ("rule", True, ""))))
        return code

    monkeypatch.setattr(stages, "_run", reported)
    content = run_apart(Stage("facts", 60), settings, 60)
    assert (content["status"], content["summary"].partition(",")[0]) == (FAILED, text)


@pytest.mark.job
def test_stages_for_which_no_time_is_left_are_skipped(settings: Settings) -> None:
    seen: list[int] = []
    run_all(STAGES[:2], settings, 1.0, lambda contents: seen.append(len(contents)))
    assert seen == [1, 2]
    contents = [json.loads((settings.out / f"{stage.name}.json").read_text()) for stage in STAGES[:2]]
    assert [content["status"] for content in contents] == [SKIPPED] * 2
    publish(settings.out / "results", settings.out, contents)
    assert json.loads((settings.out / "results" / "gpu-check.json").read_text()) == contents


def ended(name: str, status: str, *checks: tuple[str, bool, str]) -> dict[str, Any]:
    """The JSON of a stage."""
    rows = [{"name": check, "passed": passed, "text": text} for check, passed, text in checks]
    return {"stage": name, "status": status, "summary": "", "checks": rows, "seconds": 1.0}


@pytest.mark.parametrize(
    ("rungs", "goes_on"),
    [
        ((("driver", False), ("device", True)), True),
        ((("driver", True), ("device", False)), False),
        ((("driver", True),), False),  # it hung or crashed on the way
        ((), True),  # it could not be imported
    ],
)
def test_without_a_device_the_ladder_is_the_last_stage(
    rungs: tuple[tuple[str, bool], ...], goes_on: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def apart(stage: Stage, settings: Settings, limit: float) -> dict[str, Any]:
        started.append(stage.name)
        return ended(stage.name, FAILED, *[(rung, passed, "") for rung, passed in rungs])

    monkeypatch.setattr(stages, "run_apart", apart)
    contents: list[dict[str, Any]] = []
    run_all(STAGES[:3], settings, 540.0, lambda so_far: contents.__setitem__(slice(None), so_far))
    assert started == (["ladder", "facts", "build"] if goes_on else ["ladder"])
    assert [content["summary"] for content in contents] == ["", *["" if goes_on else "the ladder made no device"] * 2]


def test_all_limits_fit_one_call() -> None:
    assert sum(stage.limit for stage in STAGES) <= 540
    order = "ladder facts build kernels training speed peer links ranks pixels sanitizer tests"
    assert [stage.name for stage in STAGES] == order.split()


TASK = Task("small", 6, 28, batches=2, rate=0.05, learnable=True)


@pytest.fixture
def report(tmp_path: Path) -> StageReport:
    return StageReport(tmp_path / "stage.json", "stage", "emulated")


def outcomes(report: StageReport) -> list[bool]:
    return [check["passed"] for check in report.content["checks"]]


def test_the_task_is_learnt_and_repeats_bit_by_bit() -> None:
    first, second = (TrainingRun(TASK, NumpyKernelSet(), "float64") for _ in range(2))
    losses = [first.step() for _ in range(6)]
    assert losses[-1] < 0.9 * losses[0]
    assert [second.step() for _ in range(6)] == losses
    assert digest(first.values()) == digest(second.values())
    second.step()
    assert digest(first.values()) != digest(second.values())


@pytest.mark.slow
def test_a_curve_is_checked_with_its_repeats_and_memory(emulated_device: EmulatedDeviceFactory, report: StageReport) -> None:
    task = Task("small", 2, 28, batches=1, rate=0.01, learnable=True)
    curve = cpu_curve(task, 4)
    check_precision(emulated_device(2), "float64", task, curve, report)
    assert outcomes(report) == [True] * 6
    check_precision(emulated_device(2), "float64", task, [*curve[:-1], curve[-1] + 1e-6], report)
    names = [check["name"] for check in report.content["checks"] if not check["passed"]]
    assert names == ["first losses in float64", "all losses in float64"]


@pytest.mark.parametrize(("memory", "passes"), [((0, 1, 2, 3, 3, 3), True), ((0, 1, 2, 3, 3, 4), False)])
def test_memory_that_the_first_steps_take_is_no_leak(
    memory: tuple[int, ...], passes: bool, emulated_device: EmulatedDeviceFactory, report: StageReport, monkeypatch: Any
) -> None:
    """Modules are loaded by the first call that needs them, which may be one of the third step."""
    losses = [2.0, 1.8, 1.6, 1.4, 1.2, 1.0]
    monkeypatch.setattr(training, "train", lambda *_, graphs: ([(loss, "digest") for loss in losses], list(memory)))
    check_precision(emulated_device(), "float64", TASK, losses, report)
    assert [check["name"] for check in report.content["checks"] if not check["passed"]] == (
        [] if passes else ["no step takes memory in float64"]
    )


@pytest.mark.slow
def test_the_stored_losses_are_those_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the model, of initial values, images or update that would make the file's curve another one."""
    monkeypatch.delenv(validate.ENVIRONMENT_VARIABLE)  # the plan is checked elsewhere, for longer than the steps take
    stored = training.stored_curve()
    assert len(stored) == 20
    np.testing.assert_allclose(cpu_curve(training.TASK, 2), stored[:2], rtol=1e-6)
    monkeypatch.setattr(training, "TASK", replace(training.TASK, rate=0.06))
    with pytest.raises(ValueError, match="makes the file again"):
        training.stored_curve()


def test_trainings_are_compared_epoch_by_epoch(report: StageReport) -> None:
    compare("same", [0.5, 0.25], [0.5, 0.25 * (1 + 1e-6)], report)
    compare("other", [0.5, 0.25], [0.5, 0.26], report)
    compare("failed", [], [], report)
    compare("shorter", [0.5], [0.5, 0.25], report)
    assert outcomes(report) == [True, False, False, False]


@pytest.mark.job
def test_programs_that_fail_under_a_sanitizer_are_failed_checks(report: StageReport) -> None:
    check_program("good", [sys.executable, "-c", "print('7 cases')"], report)
    check_program("bad", [sys.executable, "-c", "import sys; print('ERROR SUMMARY: 3 errors'); sys.exit(86)"], report)
    assert outcomes(report) == [True, False]
    assert report.content["summary"] == "good: 7 cases, bad: ERROR SUMMARY: 3 errors"


CASES = cases(small=True)

FAST = [case for case in CASES if "pool" in case.name or case.name.split()[0] == "relu"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_operators_run_is_that_of_the_projects_own_bench(case: Case) -> None:
    kernels = NumpyKernelSet()
    actual = results(kernels, "float64", case)
    bench = OperatorBench(kernels, case.spec, case.inputs(), parameters=dict(case.parameters()))
    n = case.shapes[0][0]
    output = bench.forward(StepContext(training=True, step=3, sample_ids=np.arange(n)))
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


def test_differences_are_relative_to_the_largest_element_and_infinite_where_there_is_no_number() -> None:
    values = np.array([1.0, -4.0])
    distances = differences(
        {"a": np.array([1.0, -4.4]), "b": np.array([np.nan, 1.0]), "c": values[:1]}, dict.fromkeys("abc", values)
    )
    assert distances["a"] == pytest.approx(0.1)
    assert (distances["b"], distances["c"]) == (np.inf, np.inf)


def tf32(values: np.ndarray) -> np.ndarray:
    """Round to the 10 bits of TF32, as float64."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x0FFF + (bits >> 13 & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32).astype(np.float64)


class CaseInTf32(Case):
    """Factors are rounded to TF32 before they are multiplied, as a library does unless it must keep float32."""

    def inputs(self, fine: bool = False) -> list[np.ndarray]:
        return [tf32(values) for values in super().inputs(fine)]

    def parameters(self, fine: bool = False) -> Mapping[str, np.ndarray]:
        return {role: tf32(values) for role, values in super().parameters(fine).items()}


@pytest.mark.parametrize("case", [case for case in CASES if case.library], ids=lambda case: case.name)
def test_tf32_in_the_place_of_float32_is_off_by_more_than_the_tolerance(case: Case) -> None:
    slipped = results(NumpyKernelSet(), "float64", CaseInTf32(case.name, case.spec, case.shapes, True), fine=True)
    errors = differences(slipped, reference(case, fine=True))
    for name in ("output", "d input 0", "d weight"):
        assert errors[name] > tolerance("float32", 12_544), name  # of the longest sum that a GPU is checked with


def test_the_tolerance_of_float32_follows_the_length_of_the_sum() -> None:
    """An H100's 3x3 weight gradients, sums of 12,544 products, were off by 1.55e-5; one product after another by 4e-6."""
    case = next(case for case in cases(small=False) if case.name == "3x3 groups 16x28x28x128")
    output = (16, 28, 28, 128)
    assert [case.terms(name, output) for name in ("output", "d input 0", "d weight")] == [9 * 32, 9 * 32, 16 * 28 * 28]
    assert tolerance("float32", 16 * 28 * 28) / 2 > 1.55e-5
    random = np.random.default_rng(0)
    factors, weights = (random.standard_normal((12_544, 64)).astype(np.float32) for _ in range(2))
    total = np.zeros((64, 64), np.float32)
    for row, weight in zip(factors, weights, strict=True):
        total += row[:, None] * weight
    exact_sums = factors.T.astype(np.float64) @ weights.astype(np.float64)
    error = np.abs(total - exact_sums).max() / np.abs(exact_sums).max()
    assert error < tolerance("float32", 12_544) / 4
    assert tolerance("float32", 1) == TOLERANCES["float32"]


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_the_emulated_device_passes(cuda_kernels: CudaKernelsFactory, report: StageReport, precision: str) -> None:
    missing = set[str]()
    compare_all(cuda_kernels(precision, 2), None, precision, FAST, report, missing)
    assert not missing
    assert outcomes(report) == [True] * len(FAST)
    errors = {row["case"]: row["worst"] for row in report.content[f"errors {precision}"]}
    assert max(errors.values()) <= TOLERANCES[precision]


def test_a_wrong_kernel_and_one_that_raises_are_failed_checks(
    cuda_kernels: CudaKernelsFactory, report: StageReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = cuda_kernels("float64", 2)
    pools = [case for case in FAST if isinstance(case.spec, PoolSpec)][:2]
    make = kernels.make

    def wrong(spec: PoolSpec, inputs: tuple[TensorSpec, ...], **options: bool) -> Operator:
        if spec.kind == "average":
            raise ValueError("no such kernel")
        return make(PoolSpec("average", spec.window), inputs, **options)  # in the place of the maximum

    monkeypatch.setattr(kernels, "make", wrong)
    compare_all(kernels, None, "float64", pools, report, set())
    assert outcomes(report) == [False, False]
    assert report.content["checks"][1]["text"] == "ValueError: no such kernel"


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


@pytest.mark.usefixtures("emulated_device")
def test_all_operations_are_checked(report: StageReport, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "trial", lambda: "unaware: no driver")
    links.run(settings, report)
    names = [check["name"] for check in report.content["checks"]]
    kinds = ("allreduce", "reduce-scatter", "allgather", "allgather in place", "broadcast", "all-to-all")
    assert names == ["this rank has a GPU of its own", *(f"NCCL with one rank: {kind}" for kind in kinds)]
    assert all(outcomes(report))
    assert report.content["mpi"] == "unaware: no driver"


def test_an_operation_that_brings_nothing_fails(report: StageReport, cuda_kernels: CudaKernelsFactory) -> None:
    links.check("nothing", lambda send, recv: Complete(), cuda_kernels("float32"), lone_rank()[1], report)
    (check,) = report.content["checks"]
    assert (check["passed"], check["text"]) == (False, "0.0 to 0.0 of 10.0")


SIZES = pixels.Sizes(9, 7, 4, 2)


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_bits_are_compared_and_a_rate_is_reported(
    emulated_device: EmulatedDeviceFactory, report: StageReport, precision: Precision
) -> None:
    kernels = kernel_set(emulated_device(2), precision)
    check_bits(kernels, SIZES, report)
    add_rate(kernels, SIZES, report)
    assert outcomes(report) == [True] * 6
    for left in ("windows", "resized windows"):
        assert report.content[f"images per second of {left} {precision}"] > 0


def test_one_wrong_element_is_seen(
    emulated_device: EmulatedDeviceFactory, report: StageReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PixelBatch.__array__

    def wrong(batch: PixelBatch, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        images = made(batch, dtype, copy)
        images[0, 0, 0, 0] += 1
        return images

    monkeypatch.setattr(PixelBatch, "__array__", wrong)
    check_bits(kernel_set(emulated_device(2), "float32"), SIZES, report)
    assert [check["text"] for check in report.content["checks"]] == [f"1 of {4 * 7 * 7 * 3} elements differ"] * 6


@pytest.mark.job
@pytest.mark.parametrize("source", sources.names())
def test_every_name_is_a_kernel_and_float64_is_for_the_cpu(source: str) -> None:
    names, on_gpu = kernel_names(source, on_cpu=True), kernel_names(source, on_cpu=False)
    device = EmulatedDevice()
    for name in names:
        device.kernel(source, name)
    assert on_gpu
    assert set(on_gpu) < set(names) or not any("f64" in name for name in names)
    assert not any("f64" in name for name in on_gpu)


def test_subnormals_that_are_flushed_fail_their_rung(
    emulated_device: EmulatedDeviceFactory, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Ladder(settings).subnormals() == "1.0e-42 to 2.6e-40"
    monkeypatch.setattr(CudaArithmetic, "average_into", lambda self, target, source, kept: self.fill(target, 0.0))
    with pytest.raises(AssertionError, match="Mismatched elements: 256 / 256"):
        Ladder(settings).subnormals()


@pytest.mark.parametrize(("model", "of_images"), [("vgg16", ["forward", "weight"]), ("resnet20", [])])
def test_every_convolution_asks_for_its_plans(model: str, of_images: list[str]) -> None:
    """Three for each shape; the images' gradient is not asked for, and a first convolution without a bias is a product."""
    recorder = make_convolutions(EmulatedDevice(), model, 2, "bfloat16")
    assert not recorder.failures
    assert {key.kind for key in recorder.plans} == {"forward", "weight", "input"}
    shapes = {(key.x, key.w) for key in recorder.plans}
    first = [key for key in recorder.plans if key.x[3] == 3]
    assert sorted(key.kind for key in first) == of_images
    assert len(recorder.plans) == 3 * len(shapes) - len(of_images) // 2
