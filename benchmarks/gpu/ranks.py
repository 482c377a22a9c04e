"""Stage `ranks`: `hpctrain train` as users run it. One rank, and two ranks that share a GPU, must train the same network.

Two ranks average during backward (`sharded`, `bucketed`) or after it (`blocking`), or split images and layers. A larger network
measures how many images per second `bucketed` and `blocking` make.
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
from hpctrain.data.writer import write_data_file
from hpctrain.runs.directory import latest

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
#: timed trainings: the first epoch measures and captures graphs, the second one counts
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
    """Train on one rank on the CPU, on one on the device, and on two on the device that split the batch or the layers."""
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
    """Measure images per second of two ranks whose messages travel during backward, and after it."""
    options, rates = _SMALL_TIMED if settings.emulated else _TIMED, {}
    for name, averager in (("overlapped", "bucketed"), ("after", "blocking")):
        losses_of(folder, name, train(folder, name, "cuda", 2, averager, options), report)
        finished = latest(folder / f"runs-{name}", "ranks")
        lines = [] if finished is None else [line for line in finished.metrics() if line["kind"] == "epoch"]
        if lines:
            rates[name] = float(lines[-1]["images_per_second"])
    report.add("images per second of two ranks", rates)
    if len(rates) == 2:
        report.note(f"messages during backward {rates['overlapped']:,.0f} images/s, after it {rates['after']:,.0f}")


def mpiexec() -> str | None:
    """Return the launcher next to this Python, which belongs to its MPI, else the one on PATH; None if there is none."""
    sibling = Path(sys.executable).with_name("mpiexec")
    return str(sibling) if sibling.exists() else shutil.which("mpiexec")


def make_data(folder: Path) -> None:
    """Write two small files of images that can be learnt."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 200, (3, 14, 14, 1))
    for name, count in (("train", 100), ("test", 20)):
        labels = random.integers(0, 3, count)
        images = (patterns[labels] + random.integers(0, 56, (count, 14, 14, 1))).astype(np.uint8)
        write_data_file(folder / f"{name}.h5", count, (14, 14, 1), ["a", "b", "c"], [(images, labels)])


def train(
    folder: Path, name: str, backend: str, ranks: int, averager: str = "sharded", more: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `hpctrain train` on `ranks` ranks, 0: without a launcher. more: arguments after the configuration."""
    config = folder / f"{name}.yaml"
    config.write_text(_CONFIG.format(backend=backend, folder=folder, name=name, averager=averager))
    launcher = (str(mpiexec()), "-n", str(ranks)) if ranks else ()
    command = [*launcher, sys.executable, "-m", "mpi4py", "-m", "hpctrain", "train", str(config), *more]
    print(f"---- {name}", flush=True)
    return watch(command, cwd=folder)


def checked_losses(
    folder: Path, name: str, backend: str, ranks: int, report: StageReport, averager: str = "sharded"
) -> list[float]:
    """Train, and return the losses; a failure is a failed check."""
    return losses_of(folder, name, train(folder, name, backend, ranks, averager), report)


def losses_of(folder: Path, name: str, done: subprocess.CompletedProcess[str], report: StageReport) -> list[float]:
    """Return the training losses by epoch of a job that has ended; none if it failed, which is a failed check."""
    text = "" if done.returncode == 0 else f"code {done.returncode}: {done.stdout.strip()[-300:]}"
    report.check(f"training {name} ends well", done.returncode == 0, text)
    finished = latest(folder / f"runs-{name}", "ranks")
    if done.returncode or finished is None:
        return []
    losses = [float(line["loss"]) for line in finished.metrics() if line["kind"] == "epoch"]
    report.add(f"losses {name}", losses)
    return losses


def compare(name: str, losses: Sequence[float], aims: Sequence[float], report: StageReport) -> None:
    """Check that two trainings had the same losses."""
    same = bool(losses) and len(losses) == len(aims) and bool(np.allclose(losses, aims, rtol=_TOLERANCE))
    report.check(name, same, f"{list(losses)} and {list(aims)}")
    report.note(f"{name}: {'yes' if same else 'NO'}")
