"""Stage 5: a network learns on the device as it does on the CPU; twice the same bits, with and without captured graphs."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.gpu.settings import Settings
from benchmarks.gpu.stage_report import StageReport
from benchmarks.gpu.training_run import Task, TrainingRun
from hpctrain.backend.backend import make_backend
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime

_TASK, _STEPS = Task("resnet20", 128, 32, batches=5, rate=0.05, learnable=True), 50
_SMALL_TASK, _SMALL_STEPS = Task("resnet20", 8, 32, batches=2, rate=0.05, learnable=True), 6
#: largest difference from the CPU's losses, relative to the first one: over the first steps and over all of them. Roundings turn
#: a few ReLUs at inputs near zero, and each turns a share of a gradient: so losses in float32 part by 1e-3 within five steps of
#: a small batch, on the CPU's two kernel sets too.
_FIRST_STEPS = 5
_WARM_STEPS = 2  # the third one launches graphs that the second has captured
_FIRST = {"float64": 1e-10, "float32": 1e-2, "tf32": 2e-2, "bfloat16": 5e-2}
_ALL = {"float64": 1e-8, "float32": 5e-2, "tf32": 0.1, "bfloat16": 0.2}


def run(settings: Settings, report: StageReport) -> None:
    """Curves in all precisions against the CPU's, and repeats of each."""
    task, steps = (_SMALL_TASK, _SMALL_STEPS) if settings.emulated else (_TASK, _STEPS)
    device = settings.make_device()
    curves: dict[str, list[float]] = {}
    for precision in settings.precisions():
        dtype = "float64" if precision == "float64" else "float32"
        if dtype not in curves:
            curves[dtype] = cpu_curve(task, dtype, steps)
            report.add("cpu_losses", curves)
        check_precision(device, precision, task, curves[dtype], report)


def cpu_curve(task: Task, dtype: str, steps: int) -> list[float]:
    """Losses of the same training on the CPU: by oneDNN in float32 where its library loads, else by NumPy."""
    from hpctrain.backend.kernels.onednn.kernel_set import available

    name = "onednn" if dtype == "float32" and available() is None else "numpy"
    run = TrainingRun(task, make_backend(name, dtype).kernels, dtype)
    return [run.step() for _ in range(steps)]


def check_precision(device: Device, precision: Precision, task: Task, curve: Sequence[float], report: StageReport) -> None:
    """One precision: the curve, its repeat without graphs, and the memory that steps take."""
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
    growth = memory[-1] - memory[min(_WARM_STEPS, len(memory) - 1)]
    report.check(f"no step takes memory in {precision}", growth <= 0, f"{growth} bytes behind step {_WARM_STEPS}")
    report.note(f"{precision} {losses[0]:.3f} to {losses[-1]:.3f}, off by {every:.1e}")


def train(
    device: Device, precision: Precision, task: Task, steps: int, *, graphs: bool
) -> tuple[list[tuple[float, str]], list[int]]:
    """The loss and a digest of all parameters and statistics behind each step, and the device's memory in use."""
    gc.collect()  # what the run before held is free before this one counts
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision, graphs=graphs))
    run, results, memory = TrainingRun(task, kernels, kernels.runtime.dtype), [], []
    for _ in range(steps):
        loss = run.step()
        results.append((loss, digest(run.values())))
        memory.append(device.memory_used())
    return results, memory


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """The hash of all bits, by name."""
    total = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        total.update(name.encode() + array.tobytes())
    return total.hexdigest()
