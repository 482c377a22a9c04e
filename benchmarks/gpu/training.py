"""Stage `training`: a network learns as on the CPU, and with the same bits again, with and without captured graphs."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.gpu.settings import Settings
from benchmarks.gpu.stage_report import StageReport
from benchmarks.gpu.training_run import Task, TrainingRun
from hpctrain.backend.choice import make_backend
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime

#: the CPU's losses of the first steps of `TASK`: `python -m benchmarks.gpu.training` makes the file again
CURVE = Path(__file__).with_name("cpu_losses.json")
TASK, _STEPS = Task("resnet20", 128, 32, batches=5, rate=0.05, learnable=True), 20
_SMALL_TASK, _SMALL_STEPS = Task("resnet20", 4, 32, batches=2, rate=0.05, learnable=True), 6
#: largest difference from the CPU's losses, relative to the first one: over the first steps and over all of them. Roundings turn
#: a few ReLUs at inputs near zero, and each turns a share of a gradient: so losses in float32 part by 1e-3 within five steps of
#: a small batch, on the CPU's two kernel sets too.
_FIRST_STEPS = 5
_FIRST = {"float64": 1e-10, "float32": 1e-2, "tf32": 2e-2, "bfloat16": 5e-2}
_ALL = {"float64": 1e-8, "float32": 5e-2, "tf32": 0.1, "bfloat16": 0.2}


def run(settings: Settings, report: StageReport) -> None:
    """Compare curves in all precisions with the CPU's, and with repeats of each."""
    device = settings.make_device()
    task, curve = (_SMALL_TASK, cpu_curve(_SMALL_TASK, _SMALL_STEPS)) if settings.emulated else (TASK, stored_curve())
    for precision in settings.precisions():
        check_precision(device, precision, task, curve, report)


def cpu_curve(task: Task, steps: int) -> list[float]:
    """Return the losses of the same training on the CPU, in float64."""
    run = TrainingRun(task, make_backend("numpy", "float64").kernels, "float64")
    return [run.step() for _ in range(steps)]


def stored_curve() -> list[float]:
    """Return the stored losses of `TASK` on the CPU.

    Raises:
        ValueError: the file is of another task.
    """
    stored = json.loads(CURVE.read_text())
    if stored["task"] != asdict(TASK):
        raise ValueError(
            f"{CURVE.name} has the losses of {stored['task']}, and the task is {asdict(TASK)}; python -m benchmarks.gpu.training "
            "makes the file again."
        )
    return list(stored["losses"])


def check_precision(device: Device, precision: Precision, task: Task, curve: Sequence[float], report: StageReport) -> None:
    """Check one precision: the curve, repeats with and without graphs, and the memory that steps take."""
    captured, memory = train(device, precision, task, len(curve), graphs=True)
    plain, _ = train(device, precision, task, len(curve), graphs=False)
    losses = np.array([loss for loss, _ in captured])
    report.add(f"losses {precision}", losses.tolist())
    off = np.abs(losses - curve) / abs(curve[0])
    first, every = float(off[:_FIRST_STEPS].max()), float(off.max())
    report.check(f"first losses in {precision}", first <= _FIRST[precision], f"{first:.2e} of {_FIRST[precision]:.0e}")
    report.check(f"all losses in {precision}", every <= _ALL[precision], f"{every:.2e} of {_ALL[precision]:.0e}")
    report.check(f"it learns in {precision}", losses[-1] < 0.9 * losses[0], f"{losses[0]:.4f} to {losses[-1]:.4f}")
    same = all(one == other for one, other in zip(captured, plain, strict=True))
    report.check(f"graphs change no bit in {precision}", same, "losses and parameters of all steps")
    again, _ = train(device, precision, task, len(curve), graphs=True)
    report.check(f"a repeat changes no bit in {precision}", again == captured, "losses and parameters of all steps")
    half = len(memory) // 2  # by then modules are loaded, graphs captured and buffers allocated; later steps must take nothing
    growth = memory[-1] - memory[half]
    report.check(f"no step takes memory in {precision}", growth <= 0, f"{growth} bytes after step {half + 1} of {len(memory)}")
    report.note(f"{precision} {losses[0]:.3f} to {losses[-1]:.3f}, off by {every:.1e}")


def train(
    device: Device, precision: Precision, task: Task, steps: int, *, graphs: bool
) -> tuple[list[tuple[float, str]], list[int]]:
    """Return the loss and a digest of parameters and statistics after each step, and the device's bytes in use after each."""
    gc.collect()  # frees what the run before has held
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision, graphs=graphs))
    run, results, memory = TrainingRun(task, kernels, kernels.runtime.dtype), [], []
    for _ in range(steps):
        loss = run.step()
        results.append((loss, digest(run.values())))
        memory.append(device.memory_used())
    return results, memory


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a hash of all names and bits."""
    total = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        total.update(name.encode() + array.tobytes())
    return total.hexdigest()


def main() -> int:
    """Compute and write the losses of `TASK` on the CPU. 20 steps take half a minute."""
    made_by = (
        "python -m benchmarks.gpu.training: mean losses of single steps of the NumPy kernels in float64, rounded to 7 decimals"
    )
    losses = [round(loss, 7) for loss in cpu_curve(TASK, _STEPS)]
    CURVE.write_text(json.dumps({"made_by": made_by, "task": asdict(TASK), "losses": losses}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
