"""The limit of a run: by its own clock, or by Slurm's; and real jobs that end before it, with code 85 and nothing lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.experiment.max_time import max_time
from hpctrain.launch.exit_codes import FINISHED, STOPPED
from tests.support import run_in_process
from tests.support.jobs import Outcome
from tests.support.signal_storm import final_tensors, prepare, same_bits
from tests.support.virtual_runs import train_virtual

Job = Callable[..., Outcome]


def test_without_a_limit_there_is_nothing_to_say() -> None:
    limit = max_time(None)
    assert not limit.limit.finite
    assert (limit.sentence, limit.reason) == ("", None)


def test_a_limit_names_itself_once_it_has_asked() -> None:
    limit = max_time(1e-3)
    assert limit.sentence.startswith("max_time, 0.001 s: the run ends with a checkpoint and exit code 85 before ")
    assert limit.reason is None
    assert limit.limit.over()
    assert limit.reason == "max_time, 0.001 s"


def test_slurm_says_when_its_job_ends() -> None:
    assert max_time("slurm", {"SLURM_JOB_END_TIME": str(int(time.time()) + 9)}).limit.finite


# The program, in which a step takes 0.4 s longer and a checkpoint 0.3 s; rank RANK alone takes the limit for so much shorter.
_SLOW = """
import os, runpy, sys, time
rank, shorter = int(sys.argv.pop(1)), float(sys.argv.pop(1))
here = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
def patched(*arguments):
    from hpctrain.experiment import run
    from hpctrain.storage import checkpoint
    from hpctrain.train.step import TrainingStep
    from hpctrain.train.time_limit import TimeLimit
    step, write, limit = TrainingStep.run, checkpoint.write, TimeLimit.__init__
    TrainingStep.run = lambda *rest: (time.sleep(0.4), step(*rest))[1]
    checkpoint.write = lambda *rest: (time.sleep(0.3), write(*rest))[1]
    less = shorter if here == rank else 0.0
    TimeLimit.__init__ = lambda self, seconds=float("inf"), *rest: limit(self, seconds - less, *rest)
    return command(*arguments)
from hpctrain.cli import main
command = main.LazyGroup.get_command
main.LazyGroup.get_command = patched
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and data: 30 steps."""
    prepare(tmp_path, images=960, epochs=1)
    (tmp_path / "slow.py").write_text(_SLOW)
    return tmp_path


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "rank", "shorter"), [(0, 0, 0.0), (2, 1, 4.0)])
def test_a_run_ends_before_its_limit_and_goes_on_bit_by_bit(
    job: Job, folder: Path, ranks: int, rank: int, shorter: float
) -> None:
    """Also where one rank alone finds that the time is over: the others agree."""
    assert job(ranks, ["-m", "hpctrain", "train", "storm.yaml", "output=whole"], cwd=folder).code == FINISHED
    limit, begin = 10.0 + shorter, time.time()
    outcome = job(ranks, ["slow.py", str(rank), str(shorter), "train", "storm.yaml", f"max_time={limit:g}s"], cwd=folder)
    assert outcome.code == STOPPED, outcome.output
    assert f"stopped by max_time, {limit:g} s after step" in outcome.stdout
    written = list((folder / "runs").glob("*/checkpoints/*.h5"))
    assert len(written) == 1
    assert 2.0 < written[0].stat().st_mtime - begin < 10.5
    assert job(ranks, ["-m", "hpctrain", "train", "storm.yaml", "--resume", "auto"], cwd=folder).code == FINISHED
    assert same_bits(final_tensors(folder, "runs"), final_tensors(folder, "whole"))


def test_a_run_that_is_done_in_time_is_not_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is one whose limit is over in its last step, where nothing is left."""
    run_in_process.prepare(tmp_path)
    run_in_process.train(tmp_path, "max_time=5m")
    run_in_process.train(tmp_path, "data.test=", "epochs=1", "batch=10", "max_time=0.001")
    said = capsys.readouterr().out
    assert "max_time, 300 s: the run ends with a checkpoint and exit code 85 before" in said
    assert "stopped" not in said


def test_all_ranks_refuse_what_slurm_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process.prepare(tmp_path)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ConfigError, match="max_time is slurm, but SLURM_JOB_END_TIME is not in the environment"):
        train_virtual(2, tmp_path / "tiny.yaml", "max_time=slurm")
    assert not (tmp_path / "runs").exists()
