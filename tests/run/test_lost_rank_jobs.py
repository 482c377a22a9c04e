"""Runs that lose ranks where Open MPI goes on without them: they end as those that were stopped and resumed on the ranks left."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.core.text import place
from hpctrain.data.writer import write_data_file
from hpctrain.runs.directory import RunDirectory, runs
from hpctrain.storage import checkpoint
from hpctrain_testing.run import Outcome, find_mpiexec
from tests.support.tiny_runs import whole_lines

pytestmark = [pytest.mark.job, pytest.mark.slow, pytest.mark.mpi_differs]
Job = Callable[..., Outcome]
#: ranks, how they end, and where: module, attribute, the number of the call
Deaths = Sequence[tuple[Sequence[int], str, str, str, int]]
FAULT_TOLERANT = ("--with-ft", "ulfm")
CONFIG = """
{{name: tiny, backend: numpy, progress: test, model: {{name: small, channels: [4, 6], hidden: 9, dropout: 0.2}},
 data: {{train: {folder}/train.h5, test: {folder}/test.h5}}, batch: 12, epochs: 2,
 optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}, schedule: {{name: cosine}}, averager: overlap, on_lost_rank: shrink,
 checkpoint: {{every_steps: 5, keep: 99, asynchronous: false}}, deadline_seconds: 30, output: {folder}/runs}}
"""
# The program; calls of some functions end some ranks.
DYING = """
import importlib, json, os, runpy, signal
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
ends = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "raise": lambda: 1 // 0,
}
def plant(how, module, place, number):
    owner = importlib.import_module(module)
    *path, name = place.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), []
    def replaced(*arguments, **options):
        calls.append(None)
        if len(calls) == number:
            ends[how]()
        return original(*arguments, **options)
    setattr(owner, name, replaced)
from hpctrain.cli import main
command = main.LazyGroup.get_command
def patched(*arguments):
    for ranks, *death in json.loads(os.environ["DEATHS"]):
        if rank in ranks:
            plant(*death)
    return command(*arguments)
main.LazyGroup.get_command = patched
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""
STEP = ("hpctrain.training.step", "TrainingStep.run")


@pytest.fixture(scope="module", autouse=True)
def fault_tolerant() -> None:
    """Only Open MPI has such a launcher; that others refuse is tested in test_lost_ranks.py."""
    mpiexec = find_mpiexec()
    version = (
        "" if mpiexec is None else subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    )
    if "Open MPI" not in version:
        pytest.skip("mpiexec is not that of Open MPI")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, count in (("train", 120), ("test", 21)):
        images = random.integers(0, 256, (count, 9, 8, 1), dtype=np.uint8)
        write_data_file(tmp_path / f"{name}.h5", count, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, count))])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "dying.py").write_text(DYING)
    return tmp_path


def _train(job: Job, ranks: int, folder: Path, deaths: Deaths, *more: str) -> Outcome:
    return job(
        ranks,
        ["dying.py", "train", "tiny.yaml", *more],
        cwd=folder,
        env={"DEATHS": json.dumps(deaths)},
        timeout_seconds=120,
        launcher_options=FAULT_TOLERANT,
    )


def _run(folder: Path, output: str = "runs") -> RunDirectory:
    (run,) = runs(folder / output, "tiny")  # one: a run that goes on does so in its directory
    return run


def _stopped_and_resumed(job: Job, folder: Path, stages: Sequence[tuple[int, int]], *more: str) -> None:
    """The same training, in stages with numbers of ranks and steps; the last one has 0, for all that are left.

    A stage of 0 steps before it has left nothing: its ranks were lost before their first checkpoint.
    """
    output = folder / "reference"
    for number, (ranks, steps) in enumerate([stage for stage in stages[:-1] if stage[1]] + [stages[-1]]):
        arguments = [f"output={output}", *(["--steps", str(steps)] if steps else []), *more]
        outcome = _train(job, ranks, folder, [], *arguments, *(["--resume", "auto"] if number else []))
        assert outcome.code == 0, outcome.output


def _assert_same(a: RunDirectory, b: RunDirectory) -> None:
    (one, other) = (checkpoint.read_newest(run.checkpoints) for run in (a, b))
    assert (one[0].name, one[1].tensors.keys()) == (other[0].name, other[1].tensors.keys())
    for name, tensor in other[1].tensors.items():
        assert one[1].tensors[name].tobytes() == tensor.tobytes(), name


def _shrinks(run: RunDirectory) -> list[tuple[Any, ...]]:
    return [(record["lost"], record["step"], record["ranks"]) for record in run.metrics() if record["kind"] == "shrink"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ranks", "lost", "options"),
    [(3, (1,), ["averager=overlap"]), (4, (0, 2), ["averager=sharded", "grid.rows=2", "checkpoint.layout=sharded"])],
    ids=["data-parallel", "grid"],
)
def test_it_ends_with_the_bits_of_a_run_that_was_stopped_and_resumed(
    job: Job, folder: Path, ranks: int, lost: tuple[int, ...], options: list[str]
) -> None:
    outcome = _train(job, ranks, folder, [(lost, "SIGKILL", *STEP, 9)], *options)
    assert outcome.code == 0, outcome.output
    left, run = ranks - len(lost), _run(folder)
    ((named, step, now),) = _shrinks(run)
    assert (named, now) == (list(lost), left)
    assert whole_lines(outcome.stdout).count(f"; continuing with {left} ranks from step {step}\n") == 1
    assert outcome.stdout.count("test accuracy") == 1 + outcome.stdout.count("best test accuracy")
    _stopped_and_resumed(job, folder, [(ranks, int(step)), (left, 0)], *options)
    _assert_same(run, _run(folder, "reference"))
    steps = [record["step"] for record in run.metrics() if record["kind"] == "epoch"]
    assert steps == [10, 20]


def test_ranks_that_are_lost_one_after_another_and_in_the_recovery_itself(job: Job, folder: Path) -> None:
    """Rank 0 in a step, rank 3 as the others agree on that; then one more, and a rank is left alone."""
    deaths = [([0], "SIGKILL", *STEP, 7), ([3], "SIGKILL", "hpctrain.comm.mpi", "shrunk", 1), ([2], "SIGSEGV", *STEP, 13)]
    outcome = _train(job, 4, folder, deaths)
    assert outcome.code == 0, outcome.output
    run = _run(folder)
    shrinks = _shrinks(run)
    assert [ranks for *_, ranks in shrinks] == [2, 1]
    assert [lost for lost, *_ in shrinks] == [[0, 3], [1]]  # numbers as they were last reported
    stages = [(4, int(shrinks[0][1])), (2, int(shrinks[1][1]) - int(shrinks[0][1])), (1, 0)]
    _stopped_and_resumed(job, folder, stages)
    _assert_same(run, _run(folder, "reference"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("SIGSEGV", (*STEP, 2)),
        ("exit", (*STEP, 2)),
        ("SIGKILL", ("hpctrain.job.session", "Session.start", 1)),
        ("SIGKILL", ("hpctrain.runs.directory", "RunDirectory.follow_config", 1)),
    ],
    ids=["SIGSEGV", "exit", "start-up", "recovery"],
)
def test_before_the_first_checkpoint_it_begins_again(job: Job, folder: Path, how: str, place: tuple[str, str, int]) -> None:
    """The run is the one that the ranks that are left would have begun."""
    deaths: list[Any] = [([0], how, *place)]
    if place[1] == "RunDirectory.follow_config":  # of the rank that writes after a first loss
        deaths = [([0], "SIGKILL", *STEP, 2), ([1], how, *place)]
    outcome = _train(job, 3, folder, deaths)
    assert outcome.code == 0, outcome.output
    left = 3 - len(deaths)
    assert _shrinks(_run(folder)) == [(list(range(len(deaths))), 0, left)]
    _stopped_and_resumed(job, folder, [(left, 0)])
    _assert_same(_run(folder), _run(folder, "reference"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "place",
    [
        ("hpctrain.training.replica", "Replica.evaluate", 1),
        ("hpctrain.storage.checkpoint", "write", 2),
        ("hpctrain.data.loader", "Loader._make", 9),
        ("hpctrain.comm.mpi", "all_done", 1),
    ],
    ids=["evaluation", "checkpoint", "data loading", "end"],
)
def test_wherever_a_rank_dies_the_run_is_finished(job: Job, folder: Path, place: tuple[str, str, int]) -> None:
    outcome = _train(job, 3, folder, [([0], "SIGKILL", *place)])
    assert outcome.code == 0, outcome.output
    ((lost, _, ranks),) = _shrinks(_run(folder))
    assert (lost, ranks) == ([0], 2)
    assert outcome.stdout.count("test accuracy") == 1 + outcome.stdout.count("best test accuracy")
    assert checkpoint.checkpoints(_run(folder).checkpoints)[-1][0] == 20


def test_the_records_until_the_loss_are_kept(job: Job, folder: Path) -> None:
    outcome = _train(job, 3, folder, [([1], "SIGKILL", *STEP, 9)])
    assert outcome.code == 0, outcome.output
    run = _run(folder)
    before = CliRunner().invoke(cli, ["autopsy", str(run.flight / "before-loss-1"), "--json"])
    assert json.loads(before.output)["findings"][0].startswith("Rank 1 was ended by SIGKILL (")
    assert [rank["end"] for rank in json.loads(before.output)["ranks"]] == ["continued", "killed", "continued"]
    after = CliRunner().invoke(cli, ["autopsy", str(run.path), "--json"])
    assert json.loads(after.output)["findings"] == ["The job finished: ranks 0-1 ended normally."]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "options", "words"),
    [
        ("raise", [], "ZeroDivisionError"),
        ("SIGKILL", ["on_lost_rank.least=3"], "which leaves 2, but on_lost_rank.least is 3"),
        ("SIGKILL", ["grid.cols=3"], "A grid of 1 x 3 has 3 places, but the number of ranks is 2"),
        # Of its keeper; the sentence of the rank that ends the job may be lost with the pipes of this launcher.
        ("SIGKILL", ["on_lost_rank=stop"], f"{place(1, 3)}the process was ended by SIGKILL"),
    ],
    ids=["a bug", "too few", "another grid", "stop"],
)
def test_what_no_smaller_world_mends_ends_the_job(job: Job, folder: Path, how: str, options: list[str], words: str) -> None:
    """With a code that `hpctrain run` starts again on."""
    outcome = _train(job, 3, folder, [([1], how, *STEP, 9)], *options)
    assert outcome.code == 1, outcome.output
    assert words in outcome.stderr, outcome.stderr
    assert not _shrinks(_run(folder))
