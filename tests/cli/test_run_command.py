"""`hpctrain run`: trainings that are killed again and again reach the end with the bits of an undisturbed one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.cli.run_command import ATTEMPTS_FILE
from hpctrain_testing.run import StartedJob, clean_environment, find_mpiexec, patched_program, wait_until
from tests.support.here import run_here
from tests.support.sampling import amount
from tests.support.signal_storm import final_tensors, prepare, same_bits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and data: 3 epochs of 16 steps."""
    prepare(tmp_path, images=512, epochs=3)
    return tmp_path


class _Supervised(StartedJob):
    """A supervised training of `ranks` ranks (0: without a launcher) that is started here."""

    def __init__(self, folder: Path, ranks: int, options: Sequence[str], words: Sequence[str]) -> None:
        launcher = [find_mpiexec() or "mpiexec", "-n", str(ranks)] if ranks else []
        command = [sys.executable, "-m", "hpctrain", "run", *options, "--", *launcher]
        super().__init__([*command, sys.executable, "-m", "mpi4py", "-m", "hpctrain", "train", "storm.yaml", *words], folder)

    def kill_one(self, draws: random.Random) -> None:
        if found := [process for process in self.started_processes() if process != self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draws.choice(found), signal.SIGKILL)

    def end(self, patience_seconds: float) -> tuple[int, str]:
        """As the base's; no process is left."""
        ended = super().end(patience_seconds)
        assert self.started_processes() == [], ended
        return ended


def _train(ranks: int, folder: Path, *words: str) -> None:
    outcome = run_here(ranks, ["-m", "hpctrain", "train", "storm.yaml", *words], cwd=folder)
    assert outcome.code == 0, outcome.output


def _attempts(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "runs" / ATTEMPTS_FILE).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "seed"), [(0, 1), (2, 2), (2, 3)])
def test_a_training_that_is_killed_at_random_moments_reaches_the_end(folder: Path, ranks: int, seed: int) -> None:
    """Any process of it: a rank, a keeper, one of the launcher's."""
    draws = random.Random(seed)
    _train(ranks, folder, "output=whole", "checkpoint.every_steps=3")
    options = ["--restarts", "20", "--pause", "0.1"]
    supervised = _Supervised(folder, ranks, options, ["output=runs", "checkpoint.every_steps=3"])
    for _ in range(amount(2, 5)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervised.process.wait(draws.uniform(1, 8))
        supervised.kill_one(draws)
    code, said = supervised.end(400)
    assert code == 0, said
    assert same_bits(final_tensors(folder, "runs"), final_tensors(folder, "whole")), said
    attempts = _attempts(folder)
    assert attempts[-1]["code"] == 0
    assert all(attempt["code"] for attempt in attempts[:-1])
    assert said.count(" ended with exit code ") == len(attempts)


# The program; rank 1 is killed in each step whose number is a multiple of five, once.
_KILLED = """
def patch():
    from hpctrain.training.step import TrainingStep
    run = TrainingStep.run
    def killed(self, batch, global_step, lr):
        mark = Path(f"killed-{global_step}")
        if here == 1 and global_step % 5 == 4 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        run(self, batch, global_step, lr)
    TrainingStep.run = killed
"""


@pytest.mark.slow
@pytest.mark.job
def test_who_was_killed_and_where_is_reported(folder: Path) -> None:
    mpiexec = find_mpiexec()
    if mpiexec is None or "Open MPI" in subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("the exit code is that of MPICH's launcher")
    (folder / "hpctrain").write_text(patched_program(_KILLED))  # stands for the program by its name
    launcher = [mpiexec, "-n", "2", sys.executable, "-m", "mpi4py", "./hpctrain", "train"]
    command = [sys.executable, "-m", "hpctrain", "run", "--restarts", "0", "--", *launcher, "storm.yaml", "epochs=1"]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 9, done.stdout + done.stderr
    (attempt,) = _attempts(folder)
    assert attempt["finding"] == "Rank 1 was ended by SIGKILL (a training step, step 5)."
    # Messages travel under the next step, so the other rank may be one step ahead.
    assert attempt["step"] in (5, 6)
    assert (attempt["checkpoint"], attempt["node"]) == (None, "")
    assert "given up after a failure" in done.stderr
    reached = f"exit code 9, reached step {attempt['step']}; Rank 1 was ended by SIGKILL (a training step, step 5)."
    assert reached in done.stderr


@pytest.mark.slow
@pytest.mark.job
def test_a_request_ends_training_and_supervisor(folder: Path) -> None:
    supervised = _Supervised(folder, 2, [], ["output=runs", "epochs=1000"])
    wait_until(lambda: list(folder.glob("runs/*/metrics.jsonl")), 180)
    os.kill(supervised.process.pid, signal.SIGTERM)
    code, said = supervised.end(180)
    assert code == 85, said
    assert "stopped by SIGUSR1" in said
    assert "attempt 1 ended with exit code 85: stopped by SIGTERM" in said


@pytest.mark.slow
@pytest.mark.job
def test_an_old_run_of_the_same_name_is_left_alone(folder: Path) -> None:
    """It is not what this command goes on from, if that fails before its first checkpoint."""
    _train(0, folder, "output=runs", "--steps", "1")
    words = ["output=runs", "data.train=nowhere.h5"]
    code, said = _Supervised(folder, 0, ["--pause", "0"], words).end(180)
    assert code == 2, said
    assert "another start would fail the same way" in said
    assert _attempts(folder)[0]["checkpoint"] is None


def test_a_rank_supervises_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    environment = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    result = CliRunner().invoke(cli, ["run", "--", "hpctrain", "train", "storm.yaml"], env=environment)
    assert result.exit_code == 2
    assert "hpctrain run was started by Open MPI mpiexec as one of several" in result.stderr


@pytest.mark.job
def test_the_supervisor_loads_neither_numpy_nor_mpi(folder: Path) -> None:
    program = (
        "import sys\nfrom hpctrain.cli.main import cli\n"
        "try:\n    cli(['run', '--restarts', '0', '--', 'false', 'hpctrain', 'train', 'storm.yaml'])\n"
        "finally:\n    print(sorted({'numpy', 'h5py', 'mpi4py', 'mpi4py.MPI'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stdout) == (1, "[]\n"), done.stderr
