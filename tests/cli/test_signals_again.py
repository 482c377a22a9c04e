"""Signals that come again and again while a run stops: none but an interrupt loses the checkpoint, whatever the run does then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.launch.exit_codes import FINISHED, STOPPED
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import latest
from tests.support.jobs import Outcome, run_job
from tests.support.signal_storm import final_tensors, prepare, same_bits

Job = Callable[..., Outcome]

# The program, whose checkpoints take a second longer. Ranks RANKS send themselves SIGNALS from the beginning of PHASE on, 0.15 s
# apart, the first one in the middle of it; what is 0.3 s behind the first counts as a request that comes again.
_AGAIN = """
import os, runpy, signal, sys, threading, time
phase, ranks, names = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
here = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
begun = []
def send():
    for name in names.split(","):
        time.sleep(0.15)
        os.kill(os.getpid(), signal.Signals[name])
def begins(name, when=True):
    if name == phase and when and not begun and here in ranks:
        begun.append(True)
        threading.Thread(target=send, daemon=True).start()
        time.sleep(0.3)
def patched(*arguments):
    from hpctrain.experiment import run, session
    from hpctrain.launch import signals
    from hpctrain.storage import checkpoint
    from hpctrain.train.replica import Replica
    from hpctrain.train.step import TrainingStep
    from hpctrain.train.trainer import Trainer
    signals.AGAIN_SECONDS = 0.3
    start, step, write = session.start_world, TrainingStep.run, checkpoint.write
    evaluate, save = Replica.evaluate, Trainer._save_once
    session.start_world = lambda *rest: (begins("start"), start(*rest))[1]
    TrainingStep.run = lambda self, batch, number, lr: (begins("training", number == 2), step(self, batch, number, lr))[1]
    Replica.evaluate = lambda *rest, **options: (begins("evaluation"), evaluate(*rest, **options))[1]
    Trainer._save_once = lambda *rest: (begins("checkpoint"), save(*rest))[1]
    checkpoint.write = lambda *rest: (time.sleep(1.0), write(*rest))[1]
    return command(*arguments)
from hpctrain.cli import main
command = main.LazyGroup.get_command
main.LazyGroup.get_command = patched
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""
_MANY = ",".join(["SIGTERM", "SIGUSR1", "SIGTERM", "SIGHUP", "SIGTERM"] * 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and data: 2 epochs of 5 steps."""
    prepare(tmp_path, images=160, epochs=2)
    (tmp_path / "again.py").write_text(_AGAIN)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, np.ndarray]]:
    """Steps and tensors of a run on 2 ranks that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    prepare(folder, images=160, epochs=2)
    assert run_job(2, ["-m", "hpctrain", "train", "storm.yaml", "output=runs"], cwd=folder).code == FINISHED
    return final_tensors(folder, "runs")


def _run(job: Job, folder: Path, ranks: int, *words: str) -> Outcome:
    return job(ranks, ["again.py", *words[:3], "train", "storm.yaml", *words[3:]], cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["0", "1", "01"])
@pytest.mark.parametrize("phase", ["start", "training", "evaluation", "checkpoint"])
def test_a_request_that_comes_again_loses_no_checkpoint(
    job: Job, folder: Path, whole: tuple[int, dict[str, np.ndarray]], phase: str, reached: str
) -> None:
    outcome = _run(job, folder, 2, phase, reached, _MANY, "checkpoint.every_steps=4", "output=runs")
    assert outcome.code == STOPPED, outcome.output
    run = latest(folder / "runs", "storm")
    assert run is not None
    assert checkpoint.read_newest(run.checkpoints) is not None
    assert "Traceback" not in outcome.output
    steps = [step for step, _ in checkpoint.checkpoints(run.checkpoints)]
    assert f"after step {steps[-1]}," in outcome.stdout
    assert job(2, ["-m", "hpctrain", "train", "storm.yaml", "--resume", "auto"], cwd=folder).code == FINISHED
    assert same_bits(final_tensors(folder, "runs"), whole)


def test_an_interrupt_in_the_checkpoint_ends_the_run_and_says_what_is_kept(job: Job, folder: Path) -> None:
    """The checkpoint that was there is kept, and whole."""
    assert job(0, ["-m", "hpctrain", "train", "storm.yaml", "--steps", "4"], cwd=folder).code == FINISHED
    names = "SIGTERM,SIGTERM,SIGUSR1,SIGTERM,SIGINT"
    outcome = _run(job, folder, 0, "checkpoint", "0", names, "--resume", "auto")
    assert outcome.code == 130, outcome.output
    run = latest(folder / "runs", "storm")
    assert run is not None
    kept = checkpoint.read_newest(run.checkpoints)
    assert kept is not None
    assert kept[0].name == "checkpoint-00000004.h5"
    sentence = "SIGINT received again: this process ends at once and writes no checkpoint; the newest one on the disk is"
    assert f"{sentence} runs/{run.path.name}/checkpoints/checkpoint-00000004.h5." in outcome.stderr
