"""Stage 6: `hpctrain train` as users run it, on one rank and on two that share a GPU: both must train the same network.

So do two ranks whose averaging waits for the end of backward (`blocking`), and whose messages therefore hide nothing, and two
that split images and layers. How fast the first two ways are is told, too, with a network whose gradients are worth hiding.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.gpu.child import watch
from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport
from hpctrain.data import format as data_format
from hpctrain.storage.run_directory import latest

_CONFIG = """
name: ranks
seed: 7
backend: {backend}
model: {{name: small, channels: [8, 16], hidden: 24}}
batch_norm: {{statistics: synchronised}}
data: {{train: {folder}/train.h5, test: {folder}/test.h5}}
batch: 20
epochs: 2
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: constant
averager: {averager}
output: {folder}/runs-{name}
"""
#: trainings that are timed: the first epoch measures and captures, the second is told of
_MADE_UP = ("data.train=synthetic", "data.test=null", "epochs=2")
_TIMED = (
    *_MADE_UP,
    "model=resnet18",
    "batch=128",
    "data.synthetic.samples=1920",
    "data.synthetic.height=64",
    "data.synthetic.width=64",
)
_SMALL_TIMED = (*_MADE_UP, "model=small", "batch=8", "data.synthetic.samples=16")
_SPLIT = ("grid.rows=2", "plan.default=domain", "plan.classifier.*=model")
_TOLERANCE = 1e-2  # roundings turn ReLUs at inputs near zero


def run(settings: Settings, report: StageReport) -> None:
    """One rank on the CPU, one on the device, two on the device: with samples of their own, and sharing them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        cpu = checked_losses(folder, "cpu", "numpy", 0, report)
        one = checked_losses(folder, "one", "cuda", 0, report)
        compare("one rank as the CPU", one, cpu, report)
        if mpiexec() is None:
            raise SkippedError("mpiexec is not here")
        for name, averager in (("two", "sharded"), ("two-bucketed", "bucketed"), ("two-blocking", "blocking")):
            two = checked_losses(folder, name, "cuda", 2, report, averager)
            compare(f"two ranks as one, {averager}", two, one, report)
        split = losses_of(folder, "split", train(folder, "split", "cuda", 2, more=_SPLIT), report)
        compare("two ranks that split layers as one", split, one, report)
        add_overlap(folder, settings, report)


def add_overlap(folder: Path, settings: Settings, report: StageReport) -> None:
    """Images per second of two ranks whose messages travel beside backward, and behind it."""
    options, rates = _SMALL_TIMED if settings.emulated else _TIMED, {}
    for name, averager in (("overlapped", "bucketed"), ("behind", "blocking")):
        losses_of(folder, name, train(folder, name, "cuda", 2, averager, options), report)
        finished = latest(folder / f"runs-{name}", "ranks")
        lines = [] if finished is None else [line for line in finished.metrics() if line["kind"] == "epoch"]
        if lines:
            rates[name] = float(lines[-1]["images_per_second"])
    report.add("images per second of two ranks", rates)
    if len(rates) == 2:
        report.note(f"messages beside backward {rates['overlapped']:,.0f} images/s, behind it {rates['behind']:,.0f}")


def mpiexec() -> str | None:
    """The launcher beside this Python, else on PATH: the first is sure to be the one of its MPI."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def make_data(folder: Path) -> None:
    """Two small files of images that can be learnt."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 200, (3, 14, 14, 1))
    for name, count in (("train", 100), ("test", 20)):
        labels = random.integers(0, 3, count)
        images = (patterns[labels] + random.integers(0, 56, (count, 14, 14, 1))).astype(np.uint8)
        data_format.write(folder / f"{name}.h5", count, (14, 14, 1), ["a", "b", "c"], [(images, labels)])


def train(
    folder: Path, name: str, backend: str, ranks: int, averager: str = "sharded", more: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """`hpctrain train` on so many ranks, 0: without a launcher; `more` arguments behind the configuration."""
    config = folder / f"{name}.yaml"
    config.write_text(_CONFIG.format(backend=backend, folder=folder, name=name, averager=averager))
    launcher = (str(mpiexec()), "-n", str(ranks)) if ranks else ()
    command = [*launcher, sys.executable, "-m", "mpi4py", "-m", "hpctrain", "train", str(config), *more]
    print(f"---- {name}", flush=True)
    return watch(command, cwd=folder)


def checked_losses(
    folder: Path, name: str, backend: str, ranks: int, report: StageReport, averager: str = "sharded"
) -> list[float]:
    """The losses of a training that has to end well."""
    return losses_of(folder, name, train(folder, name, backend, ranks, averager), report)


def losses_of(folder: Path, name: str, done: subprocess.CompletedProcess[str], report: StageReport) -> list[float]:
    """Training losses by epoch of a job that has ended; none where it failed, which is a failed check."""
    text = "" if done.returncode == 0 else f"code {done.returncode}: {done.stdout.strip()[-300:]}"
    report.check(f"training {name} ends well", done.returncode == 0, text)
    finished = latest(folder / f"runs-{name}", "ranks")
    if done.returncode or finished is None:
        return []
    losses = [float(line["loss"]) for line in finished.metrics() if line["kind"] == "epoch"]
    report.add(f"losses {name}", losses)
    return losses


def compare(name: str, losses: Sequence[float], aims: Sequence[float], report: StageReport) -> None:
    """A check that two trainings had the same losses."""
    same = bool(losses) and len(losses) == len(aims) and bool(np.allclose(losses, aims, rtol=_TOLERANCE))
    report.check(name, same, f"{list(losses)} and {list(aims)}")
    report.note(f"{name}: {'yes' if same else 'NO'}")
