"""A stage: the first three plans of every convolution of a step, timed one by one, and ResNet-50's step with the fastest ones."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.convolutions import convolutions
from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.speed import measure
from benchmarks.gpu.stage_report import StageReport
from benchmarks.gpu.training_run import Task
from hpctrain.backend.cuda.cudnn_graphs import describe
from hpctrain.backend.cuda.cudnn_plans import TIMED_PLANS
from hpctrain.backend.cuda.device import Precision

_MODELS: tuple[tuple[str, int, Precision], ...] = (
    ("resnet50", 256, "bfloat16"),
    ("resnet50", 32, "bfloat16"),
    ("vgg16", 64, "bfloat16"),
)


def run(settings: Settings, report: StageReport) -> None:
    """All networks in turn."""
    if settings.emulated:
        raise SkippedError("the emulated device has one plan for each convolution, and no time of its own")
    settings.make_device()  # where there is none, its sentence says why
    from hpctrain.backend.cuda.cupy_device import CupyDevice

    rows: list[dict[str, Any]] = []
    for model, batch, precision in _MODELS:
        device = CupyDevice(candidates=TIMED_PLANS)
        if not rows:
            step = measure(device, Task(model, batch, 224, batches=1), precision, graphs=True, timed=True)
            report.add("step", step)
            text = f"{step['images_per_second']:.0f}/s with plans by time"
            report.check(f"{model} {batch} with plans by time has a finite loss", step["loss"] == step["loss"], text)
            report.note(f"{model} {batch}: {text}")
        row = times(device, model, batch, precision)
        rows.append(row)
        report.add("plans", rows)
        text = f"{row['first_seconds'] * 1e3:.2f} ms by the heuristic, {row['fastest_seconds'] * 1e3:.2f} ms by time"
        report.check(f"convolutions of {model} {batch} have times", row["fastest_seconds"] > 0, text)
        report.note(f"{model} {batch}: {text}")


def times(device: Any, model: str, batch: int, precision: Precision) -> dict[str, Any]:
    """Seconds of each plan, and their sums over the different convolutions of the network.

    Args:
        device: a `CupyDevice` with several candidates for each convolution.
    """
    keys = convolutions(model, batch, precision)
    for key in keys:
        device.convolution(key)
    device.time_plans()
    seconds: dict[str, dict[str, float]] = device.plan_seconds()
    choices = device.plan_choices()
    timed = [describe(key) for key in keys if describe(key) in seconds]
    return {
        "model": model,
        "batch": batch,
        "precision": precision,
        "convolutions": len(keys),
        "with_a_choice": len(timed),
        "first_seconds": sum(next(iter(seconds[name].values())) for name in timed),
        "fastest_seconds": sum(seconds[name][choices[name]] for name in timed),
        "plans": {name: seconds[name] for name in timed},
    }
