"""Signals end a training in good order or leave it alone: a checkpoint, words, exit code 85, and the same bits after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.backend.kernels.onednn.kernel_set import available
from hpctrain.launch.exit_codes import STOPPED
from hpctrain.storage.run_directory import latest
from tests.support.jobs import Outcome
from tests.support.signal_storm import QUIET, Setting, Tally, final_tensors, prepare, quiet_storm, same_bits

Job = Callable[..., Outcome]

# The program; rank RANK sends itself a signal in the middle of step STEP, counted from 0 on (-1: before MPI starts).
_SIGNALLED = """
import os, runpy, signal, sys, time
number, rank, step = signal.Signals[sys.argv.pop(1)], int(sys.argv.pop(1)), int(sys.argv.pop(1))
def send():
    if int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0) == rank:
        os.kill(os.getpid(), number)
        time.sleep(0.5)  # the thread that waits for signals takes it now
def patch():
    from hpctrain.experiment import session
    from hpctrain.train.step import TrainingStep
    start, run = session.start_world, TrainingStep.run
    def signalled_start(*arguments):
        if step == -1:
            send()
        return start(*arguments)
    def signalled_step(self, batch, global_step, lr):
        if global_step == step:
            send()
        run(self, batch, global_step, lr)
    session.start_world, TrainingStep.run = signalled_start, signalled_step
from hpctrain.cli import main
command = main.LazyGroup.get_command
def patched(*arguments):
    patch()
    return command(*arguments)
main.LazyGroup.get_command = patched
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and data: 2 epochs of 5 steps."""
    prepare(tmp_path, images=160, epochs=2)
    (tmp_path / "signalled.py").write_text(_SIGNALLED)
    return tmp_path


def _train(job: Job, folder: Path, ranks: int, *more: str) -> Outcome:
    return job(ranks, ["-m", "hpctrain", "train", "storm.yaml", *more], cwd=folder)


def _signalled(job: Job, folder: Path, ranks: int, number: str, rank: int, step: int, *more: str) -> Outcome:
    arguments = ["signalled.py", number, str(rank), str(step), "train", "storm.yaml", *more]
    return job(ranks, arguments, cwd=folder)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_stop_can_be_told_by_a_file_and_code_0(job: Job, folder: Path, ranks: int) -> None:
    """For launchers that kill the other ranks where one leaves with a code that is not 0."""
    told = folder / "stopped"
    outcome = _signalled(job, folder, ranks, "SIGUSR1", 0, 2, "--stopped-file", "stopped")
    assert (outcome.code, told.exists()) == (0, True), outcome.output
    assert "stopped by SIGUSR1" in outcome.output
    told.unlink()
    outcome = _train(job, folder, ranks, "--resume", "auto", "--stopped-file", "stopped")
    assert (outcome.code, told.exists()) == (0, False), outcome.output
    outcome = _signalled(job, folder, ranks, "SIGUSR1", 0, 2, "output=other", "--stopped-file", "nowhere/stopped")
    assert outcome.code != 0
    assert "nowhere/stopped cannot be used: No such file or directory." in outcome.stderr


@pytest.mark.parametrize(
    ("ranks", "stops"),
    [(0, [("SIGINT", 0, 1)]), (2, [("SIGTERM", 0, 2), ("SIGUSR1", 1, 6), ("SIGHUP", 1, 8)])],
)
def test_a_stopped_run_says_so_and_goes_on_bit_by_bit(
    job: Job, folder: Path, ranks: int, stops: list[tuple[str, int, int]]
) -> None:
    assert _train(job, folder, ranks, "output=whole").code == 0
    resume: list[str] = []
    for number, rank, step in stops:
        outcome = _signalled(job, folder, ranks, number, rank, step, "output=runs", *resume)
        assert outcome.code == STOPPED, outcome.output
        where = f"{number} on rank {rank}" if ranks else number
        # The request travels with its step's message, and is read under the next one.
        assert f"stopped by {where} after step {min(step + 2, 10)}, in epoch {1 + step // 5} of 2" in outcome.stdout
        run = latest(folder / "runs", "storm")
        assert run is not None
        assert f"checkpoint runs/{run.path.name}/checkpoints/checkpoint-{min(step + 2, 10):08d}.h5" in outcome.stdout
        assert f"--resume runs/{run.path.name} (exit code 85)" in outcome.stdout
        assert "Traceback" not in outcome.output
        # The accuracy of an earlier epoch is never told as if it were the result.
        told = [line for line in outcome.stdout.splitlines() if line.startswith("test accuracy ")]
        assert [line.split(" of ")[0] for line in told] == (["test accuracy after epoch 1"] if number == "SIGUSR1" else [])
        resume = ["--resume", "auto"]
    assert _train(job, folder, ranks, "output=runs", *resume).code == 0
    assert same_bits(final_tensors(folder, "runs"), final_tensors(folder, "whole"))


def test_a_request_from_before_the_first_step_is_kept(job: Job, folder: Path) -> None:
    outcome = _signalled(job, folder, 2, "SIGTERM", 1, -1)
    assert outcome.code == STOPPED, outcome.output
    assert "stopped by SIGTERM on rank 1 after step 2" in outcome.stdout
    run = latest(folder / "runs", "storm")
    assert run is not None
    assert [path.name for path in run.checkpoints.iterdir()] == ["checkpoint-00000002.h5"]


def test_a_run_that_has_done_its_steps_is_not_stopped(job: Job, folder: Path) -> None:
    outcome = _signalled(job, folder, 0, "SIGUSR1", 0, 2, "--steps", "3")
    assert outcome.code == 0, outcome.output


def test_an_evaluation_ends_at_once(job: Job, folder: Path) -> None:
    outcome = job(0, ["signalled.py", "SIGTERM", "0", "-1", "eval", "storm.yaml"], cwd=folder)
    assert outcome.code == 128 + 15, outcome.output
    assert "SIGTERM received: this process ends at once and writes no checkpoint." in outcome.stderr


# The program; in its second step it names the threads on which a handler could run.
_THREADS = """
import os, runpy, signal, threading
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
def patched(*arguments):
    global run  # imported here, and not before the program has begun
    from hpctrain.train.step import TrainingStep
    run, TrainingStep.run = TrainingStep.run, looking
    return command(*arguments)
from hpctrain.cli import main
command = main.LazyGroup.get_command
main.LazyGroup.get_command = patched
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("kernels", ["numpy", "onednn"])
def test_no_thread_of_a_run_runs_a_handler(job: Job, folder: Path, kernels: str) -> None:
    if kernels == "onednn" and available() is not None:
        pytest.skip("oneDNN is not installed here")
    (folder / "threads.py").write_text(_THREADS)
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    outcome = job(0, ["threads.py", "train", "storm.yaml", f"backend={kernels}", "--steps", "2"], cwd=folder, env=threads)
    assert outcome.code == 0, outcome.output
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("thread ")]
    assert len(lines) >= 3  # the program's, the loader's, a pool's
    assert [line for line in lines if not line.endswith("takes []")] == []


def test_a_storm_of_signals_changes_no_bit(job: Job, folder: Path) -> None:
    if available() is not None:
        pytest.skip("oneDNN is not installed here")
    assert _train(job, folder, 0, "output=reference", "backend=onednn").code == 0
    tally = Tally()
    quiet_storm(folder, Setting("onednn", 0, 1), tally, final_tensors(folder, "reference"), 20, random.Random(0))
    assert tally.faults == []
    assert all(tally.sent[number.name] >= 20 for number in QUIET)
