"""Stages that train, time and start other programs: their parts, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.gpu import peer
from benchmarks.gpu.facts import event_seconds, host_seconds, output_of, versions
from benchmarks.gpu.ranks import compare
from benchmarks.gpu.sanitizer import watch
from benchmarks.gpu.settings import SkippedError
from benchmarks.gpu.speed import figures_of, floor
from benchmarks.gpu.stage_report import StageReport
from benchmarks.gpu.training import check_precision, cpu_curve, digest
from benchmarks.gpu.training_run import Task, TrainingRun
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from tests.support.emulated import EmulatedDeviceFactory

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
    curve = cpu_curve(task, "float64", 4)
    check_precision(emulated_device(2), "float64", task, curve, report)
    assert outcomes(report) == [True] * 6
    check_precision(emulated_device(2), "float64", task, [*curve[:-1], curve[-1] + 1e-6], report)
    names = [check["name"] for check in report.content["checks"] if not check["passed"]]
    assert names == ["first losses in float64", "all losses in float64"]


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


def test_times_are_medians_behind_a_warm_up() -> None:
    """Times of the device come from its events, in milliseconds; those of the host end when everything is enqueued."""
    milliseconds, synchronised = iter([900.0, 3.0, 1.0, 2.0]), []
    stream = SimpleNamespace(synchronize=lambda: synchronised.append(1))
    event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
    cuda = SimpleNamespace(
        get_current_stream=lambda: stream, Event=lambda: event, get_elapsed_time=lambda begin, end: next(milliseconds)
    )
    calls: list[int] = []
    assert event_seconds(SimpleNamespace(cuda=cuda), lambda: calls.append(1), repeats=3) == 2e-3
    assert len(calls) == 4
    assert 0.0 < host_seconds(SimpleNamespace(cuda=cuda), lambda: calls.append(1), repeats=3) < 1.0
    assert len(calls) == 8
    assert len(synchronised) == 5  # before each turn, and at the end


@pytest.mark.job
@pytest.mark.slow
def test_the_shell_runs_where_nothing_is_carried(tmp_path: Path) -> None:
    top = Path(__file__).parents[3]
    paths = {"PYTHON": sys.executable, "WHEELS": str(tmp_path), "OUT": str(tmp_path / "results"), "TMPDIR": str(tmp_path)}
    command = ["bash", str(top / "benchmarks" / "gpu_check.sh"), "--device", "emulated", "--only", "facts"]
    done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (content,) = json.loads((tmp_path / "results" / "gpu-check.json").read_text())
    assert content["status"] == "passed"
    assert not list(tmp_path.glob("tmp.*")), "the temporary folder is left behind"


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
