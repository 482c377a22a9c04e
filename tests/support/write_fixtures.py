"""Write tests/fixtures: small runs and data files of one version, which later versions must read and continue with the same bits.

    PYTHONPATH=<checkout of the version> <its Python> tests/support/write_fixtures.py tests/fixtures

Each run trains a few steps (`<case>/run`) and, in a copy, some further ones (`<case>/end.h5`, the checkpoint after them). All of
it is in float64 on the NumPy kernels; `arithmetic.txt` tells whether another machine computes the same bits. The script needs
nothing else of these tests, so that it runs with any version.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.data.writer import write_data_file

SAMPLES, SHAPE, CLASSES = 29, (6, 5, 1), ("a", "b", "c")
STEPS = 3  # of the end, whatever its case's own number

CONFIG = """
name: fixture
seed: 7
dtype: float64
backend: numpy
threads: 1
progress: test
model: {name: small, channels: [3], hidden: 4, grid: 2, dropout: 0.2}
data:
  train: train.h5
  augment: [{name: flip}, {name: pad_crop, padding: 1}]
batch: 7
epochs: 4
loss: {label_smoothing: 0.1}
checkpoint: {keep: 1}
deadline_seconds: 60
"""


@dataclass(frozen=True)
class Case:
    """A run: its ranks, its steps before the checkpoint, and what it adds to CONFIG."""

    ranks: int
    steps: int
    options: str


_SHARDED = "averager: {name: sharded, bucket_bytes: 256}\n"
_MOMENTUM = "optimizer: {name: sgd, lr: 0.05, momentum: 0.9%s}\n"
CASES = {
    "blocking": Case(
        1,
        3,
        "averager: blocking\noptimizer: {name: sgd, lr: 0.05, weight_decay: 1.0e-3}\n"
        "schedule: {name: constant, warmup_epochs: 0.5}\n",
    ),
    # Its operations are ordered by measured times after seven steps.
    "sharded": Case(2, 7, _SHARDED + _MOMENTUM % ", weight_decay: 1.0e-3" + "schedule: {name: cosine, warmup_epochs: 0.5}\n"),
    "priority": Case(
        2,
        3,
        "averager: {name: priority, slice_parameters: 24, fc_exchange: always}\n"
        + _MOMENTUM % ", nesterov: true"
        + "schedule: {name: polynomial, power: 2}\n",
    ),
    "lazy": Case(
        2,
        5,
        "averager: {name: lazy, layers: 2, check_every: 1, max_interval: 3, bucket_bytes: 256}\n"
        "optimizer: {name: sgd, lr: 0.001, momentum: 0.9}\nschedule: {name: step, milestones_epochs: [1], gamma: 0.5}\n",
    ),
    "lars": Case(
        2,
        3,
        _SHARDED
        + "optimizer: {name: lars, lr: 0.1, momentum: 0.9, trust_coefficient: 0.01, weight_decay: 1.0e-3, clip_norm: 0.5}\n"
        'schedule: {name: cosine}\ngrid: {rows: 2}\nplan: {default: batch, "classifier.*": model}\n'
        "batch_norm: {statistics: synchronised}\n",
    ),
    "domain": Case(
        2,
        3,
        "averager: {name: bucketed, bucket_bytes: 256}\n"
        + _MOMENTUM % ""
        + 'schedule: {name: constant}\ngrid: {rows: 2}\nplan: {default: batch, "stage*": domain}\n',
    ),
}


def arithmetic() -> str:
    """SHA-256 of products, exponentials and square roots in float64: machines with the same one compute the same bits."""
    random = np.random.default_rng(11)
    state = hashlib.sha256()
    for rows, depth, columns in ((7, 9, 3), (210, 9, 3), (7, 12, 4), (4, 7, 12), (12, 7, 4), (7, 4, 3)):
        left, right = random.standard_normal((rows, depth)), random.standard_normal((depth, columns))
        for array in (left @ right, np.exp(left), np.log(np.abs(left)), np.sqrt(np.abs(right)), left.sum(0), np.vdot(left, left)):
            state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()


def _write_data(folder: Path) -> None:
    random = np.random.default_rng(3)
    images = random.integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8)
    labels = random.integers(0, len(CLASSES), SAMPLES)
    write_data_file(folder / "train.h5", SAMPLES, SHAPE, list(CLASSES), [(images, labels)])


def _train(folder: Path, case: Case, steps: int, *more: str) -> None:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ranks = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(case.ranks)]
    train = ["-m", "mpi4py", "-m", "hpctrain", "train", "fixture.yaml", "--steps", str(steps), *more]
    subprocess.run([*ranks, sys.executable, *train], cwd=folder, env=os.environ | threads, check=True, timeout=120)


def _write_case(target: Path, data: Path, case: Case) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(data, folder)
        (folder / "fixture.yaml").write_text(CONFIG + case.options)
        _train(folder, case, case.steps)
        (run,) = (folder / "runs").iterdir()
        # Owners and flight records name the writer's host.
        shutil.copytree(run, target / "run", ignore=shutil.ignore_patterns("owners", "flight", "logs"))
        _train(folder, case, STEPS, "--resume", str(run))
        (end,) = (run / "checkpoints").iterdir()
        shutil.copy(end, target / "end.h5")


def main(target: Path) -> None:
    """Write everything into `target`, in which none of the cases lies yet."""
    target.mkdir(parents=True, exist_ok=True)
    _write_data(target)
    for name, case in CASES.items():
        _write_case(target / name, target / "train.h5", case)
    (target / "arithmetic.txt").write_text(arithmetic() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
