"""Signals and kills: a training ends in good order with a checkpoint, words and exit code 85, and goes on bit by bit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from hpctrain.backend.onednn.kernel_set import available
from hpctrain.launch.process_end import FINISHED, STOPPED
from hpctrain.storage import checkpoint
from hpctrain_testing.run import Outcome, patched_program
from tests.support.here import run_here
from tests.support.kills import WRITERS, moments, run_writer
from tests.support.newest_checkpoint import read_newest
from tests.support.signal_storm import QUIET, Setting, Tally, final_tensors, prepare, quiet_storm, run_setting, same_bits
from tests.support.tiny_runs import Start, newest_run

pytestmark = pytest.mark.slow

# Rank RANK sends itself a signal in the middle of step STEP, counted from 0 on (-1: before MPI starts).
_SIGNALLED = """
number, rank, step = signal.Signals[sys.argv.pop(1)], int(sys.argv.pop(1)), int(sys.argv.pop(1))
def send():
    if here == rank:
        os.kill(os.getpid(), number)
        time.sleep(0.5)  # the thread that waits for signals takes it now
def patch():
    from hpctrain.process.rank import RankProcess
    from hpctrain.training.step import TrainingStep
    start, run = RankProcess.start_world, TrainingStep.run
    def signalled_start(*arguments):
        if step == -1:
            send()
        return start(*arguments)
    def signalled_step(self, batch, global_step, lr):
        if global_step == step:
            send()
        run(self, batch, global_step, lr)
    RankProcess.start_world, TrainingStep.run = signalled_start, signalled_step
"""

# Checkpoints take a second longer. Ranks RANKS send themselves SIGNALS from the beginning of PHASE on, 0.15 s apart, the first
# one in the middle of it; what is 0.3 s after the first counts as a request that comes again.
_AGAIN = """
phase, ranks, names = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
begun = []
def send():
    for name in names.split(","):
        time.sleep(0.15)
        os.kill(os.getpid(), signal.Signals[name])
def begins(name, when=True):
    if name == phase and when and not begun and str(here) in ranks:
        begun.append(True)
        threading.Thread(target=send, daemon=True).start()
        time.sleep(0.3)
def patch():
    from hpctrain.process.rank import RankProcess
    from hpctrain.launch import signals
    from hpctrain.storage import checkpoint
    from hpctrain.training.replica import Replica
    from hpctrain.training.step import TrainingStep
    from hpctrain.training.trainer import Trainer
    signals.AGAIN_SECONDS = 0.3
    start, step, write = RankProcess.start_world, TrainingStep.run, checkpoint.write
    evaluate, save = Replica.evaluate, Trainer._save_once
    RankProcess.start_world = lambda *rest: (begins("start"), start(*rest))[1]
    TrainingStep.run = lambda self, batch, number, lr: (begins("training", number == 2), step(self, batch, number, lr))[1]
    Replica.evaluate = lambda *rest, **options: (begins("evaluation"), evaluate(*rest, **options))[1]
    Trainer._save_once = lambda *rest: (begins("checkpoint"), save(*rest))[1]
    checkpoint.write = lambda *rest: (time.sleep(1.0), write(*rest))[1]
"""
_MANY = ",".join(["SIGTERM", "SIGUSR1", "SIGTERM", "SIGHUP", "SIGTERM"] * 3)

# In its second step it names the threads on which a handler could run.
_THREADS = """
def looking(self, batch, global_step, lr):
    run(self, batch, global_step, lr)
    if global_step == 1:
        # The kernel unblocks what a thread waits for while it waits; no handler runs on it.
        waits = {str(thread.native_id) for thread in threading.enumerate() if thread.name == "hpctrain-signals"}
        for task in sorted(set(os.listdir("/proc/self/task")) - waits):
            status = dict(line.split(":\\t") for line in open(f"/proc/self/task/{task}/status").read().splitlines())
            blocked = int(status["SigBlk"], 16)
            names = "INT TERM USR1 USR2 HUP ALRM CHLD PROF".split()
            free = [name for name in names if not blocked >> (signal.Signals["SIG" + name] - 1) & 1]
            print(f"thread {status['Name']} takes {free}")
def patch():
    global run
    from hpctrain.training.step import TrainingStep
    run, TrainingStep.run = TrainingStep.run, looking
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, data, and programs: 2 epochs of 5 steps."""
    prepare(tmp_path, images=160, epochs=2)
    for name, body in (("signalled", _SIGNALLED), ("again", _AGAIN), ("threads", _THREADS)):
        (tmp_path / f"{name}.py").write_text(patched_program(body))
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, np.ndarray]]:
    """Steps and tensors of an undisturbed run on 2 ranks."""
    folder = tmp_path_factory.mktemp("whole")
    prepare(folder, images=160, epochs=2)
    _train(folder, 2, "output=runs")
    return final_tensors(folder, "runs")


def _train(folder: Path, ranks: int, *more: str) -> Outcome:
    outcome = run_here(ranks, ["-m", "hpctrain", "train", "storm.yaml", *more], cwd=folder)
    assert outcome.code == FINISHED, outcome.output
    return outcome


def _signalled(job: Start, folder: Path, ranks: int, number: str, rank: int, step: int, *more: str) -> Outcome:
    return job(ranks, ["signalled.py", number, str(rank), str(step), "train", "storm.yaml", *more], cwd=folder)


def test_a_stop_can_be_reported_by_a_file_and_code_0(job: Start, folder: Path) -> None:
    """For launchers that kill the other ranks where one leaves with a code that is not 0."""
    marker = folder / "stopped"
    outcome = _signalled(job, folder, 2, "SIGUSR1", 0, 2, "--stopped-file", "stopped")
    assert (outcome.code, marker.exists()) == (0, True), outcome.output
    assert "stopped by SIGUSR1" in outcome.output
    marker.unlink()
    _train(folder, 2, "--resume", "auto", "--stopped-file", "stopped")
    assert not marker.exists()
    outcome = _signalled(job, folder, 0, "SIGUSR1", 0, 2, "output=other", "--stopped-file", "nowhere/stopped")
    assert outcome.code != 0
    assert "nowhere/stopped cannot be used: No such file or directory." in outcome.stderr


@pytest.mark.parametrize(
    ("ranks", "stops"), [(0, [("SIGINT", 0, 1)]), (2, [("SIGTERM", 0, 2), ("SIGUSR1", 1, 6), ("SIGHUP", 1, 8)])]
)
def test_a_stopped_run_says_so_and_goes_on_bit_by_bit(
    job: Start, folder: Path, ranks: int, stops: list[tuple[str, int, int]]
) -> None:
    _train(folder, ranks, "output=whole")
    resume: list[str] = []
    for number, rank, step in stops:
        outcome = _signalled(job, folder, ranks, number, rank, step, "output=runs", *resume)
        assert outcome.code == STOPPED, outcome.output
        where = f"{number} on rank {rank}" if ranks else number
        # The request travels with its step's message, and is read under the next one.
        assert f"stopped by {where} after step {min(step + 2, 10)}, in epoch {1 + step // 5} of 2" in outcome.stdout
        run = newest_run(folder, name="storm")
        assert f"checkpoint runs/{run.path.name}/checkpoints/checkpoint-{min(step + 2, 10):08d}.h5" in outcome.stdout
        assert f"continue with the same command and --resume runs/{run.path.name}\nexit code 85\n" in outcome.stdout
        assert "Traceback" not in outcome.output
        # The accuracy of an earlier epoch is never reported as if it were the result.
        accuracies = [line for line in outcome.stdout.splitlines() if line.startswith("test accuracy ")]
        assert [line.split(" of ")[0] for line in accuracies] == (["test accuracy after epoch 1"] if number == "SIGUSR1" else [])
        resume = ["--resume", "auto"]
    _train(folder, ranks, "output=runs", *resume)
    assert same_bits(final_tensors(folder, "runs"), final_tensors(folder, "whole"))


def test_a_request_from_before_the_first_step_is_kept(job: Start, folder: Path) -> None:
    outcome = _signalled(job, folder, 2, "SIGTERM", 1, -1)
    assert outcome.code == STOPPED, outcome.output
    assert "stopped by SIGTERM on rank 1 after step 2" in outcome.stdout
    assert [path.name for path in newest_run(folder, name="storm").checkpoints.iterdir()] == ["checkpoint-00000002.h5"]


def test_a_run_that_has_done_its_steps_is_not_stopped(job: Start, folder: Path) -> None:
    outcome = _signalled(job, folder, 0, "SIGUSR1", 0, 2, "--steps", "3")
    assert outcome.code == 0, outcome.output


def test_an_evaluation_ends_at_once(job: Start, folder: Path) -> None:
    outcome = job(0, ["signalled.py", "SIGTERM", "0", "-1", "eval", "storm.yaml"], cwd=folder)
    assert outcome.code == 128 + 15, outcome.output
    assert "SIGTERM received: this process ends at once and writes no checkpoint." in outcome.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("reached", ["0", "1", "01"])
@pytest.mark.parametrize("phase", ["start", "training", "evaluation", "checkpoint"])
def test_a_request_that_comes_again_loses_no_checkpoint(
    job: Start, folder: Path, whole: tuple[int, dict[str, np.ndarray]], phase: str, reached: str
) -> None:
    words = ["again.py", phase, reached, _MANY, "train", "storm.yaml", "checkpoint.every_steps=4", "output=runs"]
    outcome = job(2, words, cwd=folder)
    assert outcome.code == STOPPED, outcome.output
    run = newest_run(folder, name="storm")
    assert read_newest(run.checkpoints) is not None
    assert "Traceback" not in outcome.output
    steps = [step for step, _ in checkpoint.checkpoints(run.checkpoints)]
    assert f"after step {steps[-1]}," in outcome.stdout
    _train(folder, 2, "--resume", "auto")
    assert same_bits(final_tensors(folder, "runs"), whole)


def test_an_interrupt_in_the_checkpoint_ends_the_run_and_says_what_is_kept(job: Start, folder: Path) -> None:
    """The checkpoint that was there is kept, and whole."""
    _train(folder, 0, "--steps", "4")
    names = "SIGTERM,SIGTERM,SIGUSR1,SIGTERM,SIGINT"
    outcome = job(0, ["again.py", "checkpoint", "0", names, "train", "storm.yaml", "--resume", "auto"], cwd=folder)
    assert outcome.code == 130, outcome.output
    run = newest_run(folder, name="storm")
    kept = read_newest(run.checkpoints)
    assert kept is not None
    assert kept[0].name == "checkpoint-00000004.h5"
    sentence = "SIGINT received again: this process ends at once and writes no checkpoint; the newest one on the disk is"
    assert f"{sentence} runs/{run.path.name}/checkpoints/checkpoint-00000004.h5." in outcome.stderr


@pytest.mark.parametrize("kernels", ["numpy", "onednn"])
def test_no_thread_of_a_run_runs_a_handler(job: Start, folder: Path, kernels: str) -> None:
    if kernels == "onednn" and available() is not None:
        pytest.skip("oneDNN is not installed here")
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    outcome = job(0, ["threads.py", "train", "storm.yaml", f"backend={kernels}", "--steps", "2"], cwd=folder, env=threads)
    assert outcome.code == 0, outcome.output
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("thread ")]
    assert len(lines) >= 3  # the program's, the loader's, a pool's
    assert [line for line in lines if not line.endswith("takes []")] == []


def test_a_storm_of_signals_changes_no_bit(job: Start, folder: Path) -> None:
    if available() is not None:
        pytest.skip("oneDNN is not installed here")
    _train(folder, 0, "output=reference", "backend=onednn")
    tally = Tally()
    quiet_storm(folder, Setting("onednn", 0, 1), tally, final_tensors(folder, "reference"), 20, random.Random(0))
    assert tally.faults == []
    assert all(tally.sent[number.name] >= 20 for number in QUIET)


@pytest.mark.job
@pytest.mark.thorough
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("kernels", ["numpy", "onednn"])
def test_no_storm_ends_a_run_without_its_checkpoint(tmp_path: Path, kernels: str, ranks: int, threads: int) -> None:
    """Signals that stop a run are among them. `make signals` sets the number of signals of each kind."""
    prepare(tmp_path)
    tally = run_setting(tmp_path, Setting(kernels, ranks, threads), int(os.environ.get("HPCTRAIN_SIGNALS", "50")), seed=0)
    print(vars(tally))
    assert tally.faults == []


@pytest.mark.job
@pytest.mark.thorough  # tests/cli/test_run_command.py kills at random moments, tests/storage in the middle of writes
@pytest.mark.parametrize("name", WRITERS)
def test_killed_trainings_end_with_the_bits_of_an_undisturbed_one(tmp_path: Path, name: str) -> None:
    """Some of them while a checkpoint is written. `make faults` sets the number of kills."""
    prepare(tmp_path, images=256, epochs=3)
    kills = int(os.environ.get("HPCTRAIN_KILLS", "1"))
    tally = run_writer(tmp_path, name, WRITERS[name], kills, in_writes=max(1, kills // 7), seed=5)
    print(vars(tally))
    assert tally.faults == []
    assert min(tally.kills.total(), tally.in_writes, tally.compared) >= 1


def test_moments_are_as_many_as_asked_for() -> None:
    chosen = moments(9, 4, 2.0, seed=1)
    assert (len(chosen), chosen.count(None)) == (9, 4)
    assert all(0 <= moment <= 2 for moment in chosen if moment is not None)
