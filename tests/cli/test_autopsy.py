"""`hpctrain autopsy` after jobs that hang, fail and are killed: it names the rank, the operation and the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.autopsy import directory_of
from hpctrain.cli.main import cli
from hpctrain.speaker import place
from tests.cli.test_starting import folder as folder
from tests.support.jobs import Outcome
from tests.support.tiny_runs import hpctrain

pytestmark = pytest.mark.slow
Job = Callable[..., Outcome]

# The program, in which rank RANK does something else in step 1, counted from 0 on.
_FAULTY = """
import os, runpy, signal, sys, time
rank = int(sys.argv.pop(1)); fault = sys.argv.pop(1)
here = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
def patch():
    from hpctrain.data.loader import Loader
    from hpctrain.train import evaluator, replica
    from hpctrain.train.step import TrainingStep
    run, make = TrainingStep.run, Loader._make
    def step(self, batch, global_step, lr):
        if global_step == 1 and rank in (here, -1):
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raise":
                raise ZeroDivisionError("no such luck")
            if fault == "skip":
                return
            if fault == "compute":
                time.sleep(60)
        run(self, batch, global_step, lr)
    def made(self, slot, epoch, number, begin):
        if fault == "load" and number == 1 and rank in (here, -1):
            time.sleep(60)
        return make(self, slot, epoch, number, begin)
    def evaluated(*arguments, **options):
        if fault == "evaluate" and rank in (here, -1):
            time.sleep(60)
        return evaluate(*arguments, **options)
    evaluate = replica.evaluate
    TrainingStep.run, Loader._make, replica.evaluate = step, made, evaluated
from hpctrain.cli import main
command = main.LazyGroup.get_command
def patched(*arguments):
    patch()
    return command(*arguments)
main.LazyGroup.get_command = patched
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


def _run(job: Job, folder: Path, ranks: int, rank: int, fault: str, *more: str) -> Outcome:
    (folder / "faulty.py").write_text(_FAULTY)
    arguments = ["faulty.py", str(rank), fault, "train", "tiny.yaml", "deadline_seconds=3", *more]
    return job(ranks, arguments, cwd=folder)


def _autopsy(folder: Path, *options: str) -> Result:
    (run,) = (folder / "runs").iterdir()
    return CliRunner().invoke(cli, ["autopsy", str(run), *options])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("load", "was in data loading"),
        ("compute", "was in a training step, step 2"),
        ("evaluate", "was in evaluation, step 2"),
        ("raise", "Rank 1 failed first: ZeroDivisionError: no such luck (a training step, step 2)"),
    ],
)
def test_the_rank_to_blame_is_named(job: Job, folder: Path, fault: str, words: str) -> None:
    outcome = _run(job, folder, 2, 1, fault)
    assert outcome.code not in (0, 85), outcome.output
    result = _autopsy(folder, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["blamed"] == [1], values["findings"]
    assert words in " ".join(values["findings"])
    if fault in ("load", "compute", "evaluate"):
        assert "autopsy: Rank 1" in outcome.stderr or f"{place(1, 2)}nothing has moved for the deadline of 3 s" in outcome.stderr


def test_a_rank_that_skips_a_step_has_not_posted_it(job: Job, folder: Path) -> None:
    """It goes on to the next message, so that both may wait for each other. Who gives up leaves its words in its log."""
    outcome = _run(job, folder, 2, 1, "skip", "--log-ranks", "all")
    assert outcome.code not in (0, 85)
    (logs,) = (folder / "runs").glob("*/logs")
    logged = "".join(path.read_text() for path in sorted(logs.iterdir()))
    assert " no completion within the deadline of 3 s: " in logged
    assert "in _give_up" in logged  # of the stacks
    assert f"logs of ranks 0-1: {logs}\n" in _autopsy(folder).output
    values = json.loads(_autopsy(folder, "--json").output)
    assert 1 in values["blamed"], values["findings"]
    assert "rank 1 has not posted" in values["findings"][0] or "Rank 1 never posted" in values["findings"][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("fault", ["load", "compute", "evaluate"])
def test_where_all_hang_alike_the_job_ends(job: Job, folder: Path, ranks: int, fault: str) -> None:
    outcome = _run(job, folder, ranks, -1, fault)
    assert outcome.code == 124 if ranks == 0 else outcome.code not in (0, 85), outcome.output
    place = {"load": "data loading", "compute": "a training step, step 2", "evaluate": "evaluation, step 2"}[fault]
    assert f"nothing has moved for the deadline of 3 s, in {place}" in outcome.stderr
    assert place.split(",")[0] in _autopsy(folder).output


@pytest.mark.parametrize("rank", [1, -1])
def test_ranks_that_are_stopped_end_the_job(job: Job, folder: Path, rank: int) -> None:
    """One of two, or all: then nobody is left to notice but their parents."""
    outcome = _run(job, folder, 2, rank, "stop")
    assert outcome.code not in (0, 85), outcome.output
    if rank == -1:
        assert "the process is stopped, or hangs without letting go of Python's lock" in outcome.stderr
    else:
        assert json.loads(_autopsy(folder, "--json").output)["blamed"] == [1]


def test_a_killed_rank_was_silent_and_a_finished_job_finished(job: Job, folder: Path) -> None:
    assert _run(job, folder, 2, 1, "kill").code != 0
    text = _autopsy(folder).output
    assert "a training step" in text
    outcome = _run(job, folder, 2, 1, "none", f"output={folder}/well")
    assert outcome.code == 0, outcome.output
    (run,) = (folder / "well").iterdir()
    result = CliRunner().invoke(cli, ["autopsy", str(run)])
    assert result.output.startswith("The job finished: ranks 0-1 ended in good order.\n"), result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_records_lie_where_the_configuration_says(folder: Path) -> None:
    hpctrain(0, folder, "train", f"flight={folder}/local")
    (run,) = (folder / "runs").iterdir()
    assert directory_of(run) == folder / "local" / run.name
    assert _autopsy(folder).exit_code == 0
    hpctrain(0, folder, "train", "flight=none", f"output={folder}/nowhere")
    (run,) = (folder / "nowhere").iterdir()
    assert not (run / "flight").exists()
    assert CliRunner().invoke(cli, ["autopsy", str(run)]).exit_code == 2
