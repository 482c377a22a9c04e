"""A user's program under `hpctrain script`: however one of its ranks ends, the job ends, and its reason is printed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.core.text import place
from hpctrain.flight.ring import file_name, read
from hpctrain.launch.process_end import DEADLINE, SIGNALLED, STOPPED, End
from hpctrain_testing.run import Outcome

pytestmark = pytest.mark.slow
Job = Callable[..., Outcome]
ROOT = Path(__file__).parents[2]

#: BEFORE, WITHIN and AFTER the block of `start`, on the last rank
PROGRAM = """
import os, signal, sys, time
LAST = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0) == int(sys.argv[1]) - 1
if LAST:
    @BEFORE@
import hpctrain
from tests.support import nets
import numpy as np
with hpctrain.start(batch=8, progress="test", flight="flight", deadline_seconds=@DEADLINE@, signals=@SIGNALS@) as job:
    replica = job.replica(nets.plain(), (9, 7, 3), backend="numpy")
    for batch in job.array_loader(replica, np.zeros((48, 9, 7, 3)), np.zeros(48, int)).epoch(0):
        if LAST and replica.global_step == 2:
            @WITHIN@
        replica.step(batch, 0.1)
        if @SIGNALS@ and job.stop_requested:
            job.stop()
if LAST:
    @AFTER@
sys.stdout.write(f"end {sys.argv[1:]} {__name__} {__file__}\\n")  # at once: ranks share a pipe
"""


def run(job: Job, ranks: int, folder: Path, *, signals: bool = False, deadline_seconds: int = 60, **lines: str) -> Outcome:
    text = PROGRAM.replace("@SIGNALS@", str(signals)).replace("@DEADLINE@", str(deadline_seconds))
    for moment in ("before", "within", "after"):
        text = text.replace(f"@{moment.upper()}@", lines.get(moment, "pass"))
    (folder / "inner").mkdir(exist_ok=True)
    (folder / "inner" / "program.py").write_text(text)
    words = ["-m", "hpctrain", "script", "inner/program.py", str(max(ranks, 1)), "--more", "-x"]
    # Both ways to start: with three ranks through mpi4py, which has its own way to end them.
    return job(ranks, words, cwd=folder, env={"PYTHONPATH": str(ROOT)}, through_mpi4py=ranks == 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_a_program_is_run_as_python_does(job: Job, ranks: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path)
    assert outcome.code == 0, outcome.output
    said = f"end ['{max(ranks, 1)}', '--more', '-x'] __main__ inner/program.py"
    assert outcome.stdout.splitlines() == [said] * max(ranks, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["before", "within", "after"])
@pytest.mark.parametrize("ranks", [0, 1, 2, 3])
def test_an_error_anywhere_ends_the_job_with_its_traceback_once(job: Job, ranks: int, place: str, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, **{place: "raise ValueError('mine alone')"})
    assert outcome.code == 1, outcome.output
    assert outcome.stderr.count("ValueError: mine alone") == outcome.stderr.count("Traceback") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(("call", "code"), [("sys.exit(3)", 3), ("sys.exit('words of mine')", 1), ("sys.exit(0)", 0)])
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_program_leaves_with_its_own_code_after_the_block(job: Job, ranks: int, call: str, code: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, after=call)
    assert outcome.code == code, outcome.output
    assert ("words of mine" in outcome.stderr) == ("words" in call)


def test_one_that_leaves_alone_before_the_start_ends_the_job(job: Job, tmp_path: Path) -> None:
    assert run(job, 2, tmp_path, before="sys.exit(3)").code == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_is_killed_is_said_to_be_and_recorded(job: Job, ranks: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, within="os.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.code != 0
    assert f"hpctrain: {place(ranks - 1, ranks) if ranks > 1 else ''}the process was ended by SIGKILL" in outcome.stderr
    assert read(tmp_path / "flight" / file_name(ranks - 1)).end is End.SIGNAL


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_leaves_without_a_word_is_a_failure(job: Job, ranks: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, within="os._exit(0)")
    assert outcome.code != 0
    assert "the process exited with code 0 before the run was over" in outcome.stderr
    assert read(tmp_path / "flight" / file_name(ranks - 1)).end is End.EXITED


def test_one_that_is_stopped_is_ended_by_its_parent(job: Job, tmp_path: Path) -> None:
    outcome = run(job, 0, tmp_path, within="os.kill(os.getpid(), signal.SIGSTOP)", deadline_seconds=2)
    assert outcome.code == DEADLINE, outcome.output
    assert "the process is stopped, or hangs" in outcome.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_a_request_to_stop_is_heard(job: Job, ranks: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, signals=True, within="os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5)")
    assert outcome.code == STOPPED, outcome.output
    assert "end" not in outcome.stdout


def test_an_unhandled_one_ends_the_process_at_once(job: Job, tmp_path: Path) -> None:
    outcome = run(job, 0, tmp_path, within="os.kill(os.getpid(), signal.SIGTERM); time.sleep(50)")
    assert outcome.code == SIGNALLED + 15, outcome.output
