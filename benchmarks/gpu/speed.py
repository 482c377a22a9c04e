"""Stage `speed`: seconds of a training step, with captured graphs and without, over the floor of the same step; peak memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.devices import DEVICES, DeviceFigures
from benchmarks.gpu.floor import Clock, prediction, step_of
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.stage_report import StageReport
from benchmarks.gpu.training_run import Task, TrainingRun
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.nn.program import StepHooks

_REPEATS, _WARM_UP, _STEPS = 9, 4, 5
_FIGURES = ("model", "batch", "precision", "graphs", "loss", "remark")  # recorded of the emulated device
_RUNS: tuple[tuple[Task, Precision], ...] = (
    (Task("resnet50", 256, 224, batches=1), "bfloat16"),
    (Task("resnet50", 32, 224, batches=1), "bfloat16"),
    (Task("vgg16", 64, 224, batches=1), "bfloat16"),
)
_SMALL_RUNS: tuple[tuple[Task, Precision], ...] = ((Task("small", 2, 28, batches=1), "bfloat16"),)


def run(settings: Settings, report: StageReport) -> None:
    """Time every network with graphs, then without; on the emulated device, only run one step of each."""
    device = settings.make_device()
    runs, (repeats, steps) = (_SMALL_RUNS, (1, 1)) if settings.emulated else (_RUNS, (_REPEATS, _STEPS))
    rows: list[dict[str, Any]] = []

    def add(task: Task, precision: Precision, remark: str, *, graphs: bool) -> None:
        row = measure(device, task, precision, graphs=graphs, repeats=repeats, steps=steps)
        row["remark"] = remark
        rows.append({name: row[name] for name in _FIGURES if name in row} if settings.emulated else row)
        report.add("runs", rows)
        name = f"{task.model} {task.batch}{remark}"
        report.check(f"{name} has a finite loss", bool(np.isfinite(row["loss"])), f"{row['loss']:.4f}")
        if not settings.emulated:
            report.note(f"{name}: {row['images_per_second']:.0f}/s, {row['over_floor']:.2f} of the floor's time")

    for task, precision in runs:
        add(task, precision, "", graphs=True)
        add(task, precision, " without graphs", graphs=False)
    if settings.emulated:
        report.note("the emulated device's times mean nothing, and are not kept")
        return
    report.add("layers", layer_seconds(device, *runs[0]))


def measure(
    device: Device, task: Task, precision: Precision, *, graphs: bool, repeats: int = _REPEATS, steps: int = _STEPS
) -> dict[str, Any]:
    """Time a step, as means over `steps` steps in each of `repeats` turns after a warm-up. Images are on the device before."""
    gc.collect()  # networks of the runs before, with their arenas
    before, begin = device.memory_used(), time.perf_counter()
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision, graphs=graphs))
    run = TrainingRun(task, kernels, kernels.runtime.dtype, resident=True)
    stream, losses = kernels.runtime.stream, list[float]()
    for _ in range(_WARM_UP):
        losses.append(run.step())
    setup, seconds = time.perf_counter() - begin, []
    for _ in range(repeats):
        stream.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            handle = run.enqueue()
        stream.synchronize()
        seconds.append((time.perf_counter() - begin) / steps)
        losses.append(handle.result().loss / task.batch)
    median = float(np.median(seconds))
    return {
        "model": task.model,
        "batch": task.batch,
        "precision": precision,
        "graphs": graphs,
        "setup_and_warm_up_seconds": setup,
        "step_seconds": seconds,
        "median_seconds": median,
        "images_per_second": task.batch / median,
        "loss": losses[-1],
        "memory_bytes": device.memory_used() - before,
        **floor(device, task, precision, median),
    }


def figures_of(device: Device) -> DeviceFigures:
    """Return the figures of this kind of GPU, by its name; an H100's if it is unknown."""
    return next((figures for name, figures in DEVICES.items() if name in device.name.lower()), DEVICES["h100"])


def floor(device: Device, task: Task, precision: Precision, seconds: float) -> dict[str, float | str]:
    """Return the floor and the predicted time of a step on this kind of GPU, and its measured time over the floor."""
    figures = figures_of(device)
    counted: Precision = "float32" if precision == "float64" else precision
    predicted = prediction(step_of(task.model, task.batch, counted), Clock(figures, counted))
    return {
        "floor_of": figures.name,
        "floor_seconds": predicted["floor_seconds"],
        "predicted_seconds": predicted["with_graph_seconds"],
        "over_floor": seconds / predicted["floor_seconds"],
    }


class DeviceLaps(StepHooks):
    """Seconds of the device by (operator, phase). Each operator is waited for, so the sum exceeds a step's seconds."""

    def __init__(self, stream: Any) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self._stream, self._last = stream, 0.0

    def start(self) -> None:
        """A step begins."""
        self._stream.synchronize()
        self._last = time.perf_counter()

    def operator_done(self, name: str, phase: str) -> None:
        self._stream.synchronize()
        now = time.perf_counter()
        self.seconds.setdefault((name, phase), []).append(now - self._last)
        self._last = now


def layer_seconds(device: Device, task: Task, precision: Precision, steps: int = 5) -> Sequence[dict[str, Any]]:
    """Return the median seconds of each operator's phases, without graphs."""
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision, graphs=False))
    run, laps = TrainingRun(task, kernels, kernels.runtime.dtype, resident=True), DeviceLaps(kernels.runtime.stream)
    run.step()
    for _ in range(steps):
        laps.start()
        run.enqueue(laps)
    return [
        {"layer": name, "phase": phase, "seconds": float(np.median(values))} for (name, phase), values in laps.seconds.items()
    ]
