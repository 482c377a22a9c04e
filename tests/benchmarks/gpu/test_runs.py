"""Stages that train, time and start other programs: their parts, on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import peer
from benchmarks.gpu.facts import output_of, versions
from benchmarks.gpu.ranks import compare
from benchmarks.gpu.sanitizer import watch
from benchmarks.gpu.settings import SkippedError
from benchmarks.gpu.speed import figures_of, floor
from benchmarks.gpu.stage_report import StageReport
from benchmarks.gpu.training import digest
from benchmarks.gpu.training_run import Task, TrainingRun
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet

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


def test_resident_images_are_those_of_the_first_batch() -> None:
    one = Task("small", 6, 28, batches=1, rate=0.05, learnable=True)
    resident = TrainingRun(one, NumpyKernelSet(), "float64", resident=True)
    copied = TrainingRun(one, NumpyKernelSet(), "float64")
    assert [resident.step() for _ in range(3)] == [copied.step() for _ in range(3)]


def test_digests_know_names_and_signs_of_zero() -> None:
    values = {"a": np.zeros(3)}
    assert digest(values) == digest({"a": np.zeros(3)})
    assert len({digest(values), digest({"b": np.zeros(3)}), digest({"a": -np.zeros(3)})}) == 3


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("emulated", "H100")],
)
def test_the_floor_is_that_of_the_gpu_by_its_name(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedDevice, "name", name)
    device = EmulatedDevice()
    assert figures_of(device).name.startswith(kind)
    figures = floor(device, Task("resnet20", 8, 32), "bfloat16", 1.0)
    assert figures["over_floor"] == pytest.approx(1.0 / float(figures["floor_seconds"]))


def test_trainings_are_compared_epoch_by_epoch(report: StageReport) -> None:
    compare("same", [0.5, 0.25], [0.5, 0.25 * (1 + 1e-6)], report)
    compare("other", [0.5, 0.25], [0.5, 0.26], report)
    compare("failed", [], [], report)
    compare("shorter", [0.5], [0.5, 0.25], report)
    assert outcomes(report) == [True, False, False, False]


def test_versions_and_programs_that_are_missing_are_said() -> None:
    assert versions(["numpy", "no-such-package"]) == {"numpy": np.__version__, "no-such-package": None}
    assert output_of(["no-such-program"]) == "no-such-program is not here"


@pytest.mark.job
def test_programs_that_fail_under_a_sanitizer_are_failed_checks(report: StageReport) -> None:
    watch("good", [sys.executable, "-c", "print('7 cases')"], report)
    watch("bad", [sys.executable, "-c", "import sys; print('ERROR SUMMARY: 3 errors'); sys.exit(86)"], report)
    assert outcomes(report) == [True, False]
    assert report.content["summary"] == "good: 7 cases, bad: ERROR SUMMARY: 3 errors"


@pytest.mark.job
def test_what_a_peer_does_not_tell_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    monkeypatch.setattr(peer, "_PROGRAM", program)
    program.write_text("""print('{"model": "m", "batch": 8, "images_per_second": 3.0}'); raise SystemExit("no memory")""")
    rows = peer.time_peer("m", (8, 4), compiled=False)
    assert rows[0]["images_per_second"] == 3.0
    assert (rows[1]["batch"], rows[1]["failure"]) == (4, "no memory")
    program.write_text("print('PyTorch is away'); raise SystemExit(77)")
    with pytest.raises(SkippedError, match="PyTorch is away"):
        peer.time_peer("m", (8,), compiled=True)
