"""Whole runs in this process, on one rank: with an evaluation that says what a test wants, and an end wherever it wants one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hpctrain.cli.loading import load_config
from hpctrain.comm.single import SingleCommunicator
from hpctrain.data import format as data_format
from hpctrain.experiment.automatic_choice import Resolved
from hpctrain.experiment.options import filled
from hpctrain.experiment.run import run_training
from hpctrain.experiment.session import Session
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import ThreadPlan
from hpctrain.train.metrics import RunningSums
from hpctrain.train.replica import Replica

SAMPLES, BATCH = 10, 4
STEPS_PER_EPOCH = 3
TEST_SAMPLES = 20
CONFIG = """
name: tiny
seed: 7
backend: numpy
threads: 1
progress: none
model: {{name: small, channels: [2], hidden: 3}}
data: {{train: {folder}/train.h5, test: {folder}/test.h5, prefetch: 0}}
batch: {batch}
epochs: 2
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: constant
flight: none
metrics: {{interval_seconds: 1.0e+9}}
deadline_seconds: 60
output: {folder}/runs
"""


class Killed(BaseException):
    """The end of a run at a step: nothing of the program catches it."""


def prepare(folder: Path) -> None:
    """A configuration and two small data files."""
    random = np.random.default_rng(0)
    for name, count in (("train", SAMPLES), ("test", TEST_SAMPLES)):
        images = random.integers(0, 256, (count, 7, 6, 1), dtype=np.uint8)
        data_format.write(folder / f"{name}.h5", count, (7, 6, 1), ["a", "b", "c"], [(images, random.integers(0, 3, count))])
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder, batch=BATCH))


def train(folder: Path, *overrides: str, resume: str | None = None, steps: int = 0) -> None:
    """`hpctrain train tiny.yaml OVERRIDES --resume RESUME --steps STEPS`, but for signals."""
    config = filled(load_config(folder / "tiny.yaml", overrides)[0])
    session = Session.start(Resolved(config), Launcher("none"), ThreadPlan(1, 1, "a test"), SingleCommunicator(), {})
    try:
        run_training(session, SignalWatch(), resume=resume, steps=steps, style="none")
    finally:
        for thread in threading.enumerate():
            if thread.name == "hpctrain-checkpoint":
                thread.join()


@contextmanager
def disturbed(evaluation: Callable[[int], RunningSums], before_step: Callable[[int], None] = lambda step: None) -> Iterator[None]:
    """While this lasts, evaluations give `evaluation` of the steps done, and `before_step` is called with them first."""
    update = Replica.update

    def updated(replica: Replica, *arguments: object) -> object:
        before_step(replica.global_step)
        return update(replica, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "evaluate", lambda replica, loader, **options: evaluation(replica.global_step))
        patch.setattr(Replica, "update", updated)
        yield
