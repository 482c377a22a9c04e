"""Checkpoints of whole runs: background writes, faulty disks, any ranks to any others, users' own loops, and wrong clocks."""

import contextlib
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.cli.main import cli
from hpctrain.core.errors import CheckpointError, DivergedError
from hpctrain.optim.optimizers import Sgd
from hpctrain.run.python_job import LoopCheckpoints
from hpctrain.runs.directory import RunDirectory, is_run, latest, runs
from hpctrain.runs.owner import MARKER
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, read
from hpctrain.training.replica import LoopState, Replica
from hpctrain.training.saving import BackgroundWriter
from hpctrain.training.step import TrainingStep
from hpctrain_testing.run import Outcome, run_job
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.newest_checkpoint import read_newest
from tests.support.runs import train_virtual
from tests.support.tiny_runs import assert_same, newest_run, whole_lines, write_images
from tests.support.training import Task, batches, replica_of

SHAPE = (7, 6, 1)
CONFIG = """
{name: tiny, seed: 7, backend: numpy, progress: test, model: {name: small, channels: [3], hidden: 5}, data: {train: train.h5},
 batch: 15, epochs: 2, optimizer: {name: sgd, lr: 0.05, momentum: 0.9}, schedule: constant, deadline_seconds: 60,
 checkpoint: {every_steps: 2}}
"""
#: the program, in which writes in the background do something else; NUMBER counts those of the process
PROGRAM = """
import os, runpy, signal, threading, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
original, calls = os.pwrite, []
def pwrite(*arguments):
    if threading.current_thread().name == "hpctrain-checkpoint":
        calls.append(1)
        NUMBER = len(calls)
        @FAULT@
    return original(*arguments)
os.pwrite = pwrite
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a configuration and 75 small images."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "train.h5", 75, shape=SHAPE)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def train(folder: Path, ranks: int, *more: str, fault: str = "pass") -> Outcome:
    (folder / "program.py").write_text(PROGRAM.replace("@FAULT@", fault))
    return run_job(ranks, ["program.py", "train", "tiny.yaml", *more], cwd=folder, timeout_seconds=240)


def newest(output: str) -> tuple[Path, CheckpointContent]:
    found = read_newest(newest_run(Path(), output).checkpoints)
    assert found is not None
    return found


def train_with_fault(ranks: int, fault: Callable[[int], None], *overrides: str) -> None:
    """Train on virtual ranks; the fault is called with the number of each write in the background, before it."""
    write, calls = os.pwrite, []

    def pwrite(*arguments: Any) -> int:
        if threading.current_thread().name == "hpctrain-checkpoint":
            calls.append(1)
            fault(len(calls))
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        train_virtual(ranks, Path("tiny.yaml"), *overrides)


def test_a_run_whose_directory_is_removed_can_be_resumed_all_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume recognises a run directory by its small files; the next checkpoint writes them again."""

    def remove(number: int) -> None:
        if number == 1:
            shutil.rmtree(newest_run(Path()).path)

    train_with_fault(1, remove, "checkpoint.every_steps=1")
    train_virtual(1, Path("tiny.yaml"), "epochs=3", resume="auto")
    assert re.search(r"resumed at .* step 10\b", capsys.readouterr().out)


@pytest.mark.job
@pytest.mark.slow
def test_ranks_killed_in_a_background_write_go_on_and_end_with_the_same_bits(folder: Path) -> None:
    """Two ranks write shards, one is killed in its second checkpoint; virtual ranks, which wait for single files, end alike."""
    killed = train(
        folder, 2, "checkpoint.layout=sharded", fault="if rank == 1 and NUMBER > 40: os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert killed.code != 0
    directory = newest_run(Path()).checkpoints
    assert checkpoint.checkpoints(directory), "one checkpoint was whole"
    resumed = train(folder, 2, "checkpoint.layout=sharded", "--resume", "auto")
    assert resumed.code == 0, resumed.output
    assert "resumed at" in resumed.stdout
    assert not list(directory.glob("*.partial"))
    assert all(path.suffix == ".shards" for _, path in checkpoint.checkpoints(directory))
    train_virtual(2, Path("tiny.yaml"), "output=others", "checkpoint.layout=single", "checkpoint.asynchronous=false")
    (path, expected), (_, state) = newest("others"), newest("runs")
    assert path.suffix == ".h5"
    assert_same(state, expected)


def test_a_full_disk_is_reported_and_the_run_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full(number: int) -> None:
        if number in (3, 4):
            raise OSError(28, "No space left on device")

    train_with_fault(2, full)
    said = capsys.readouterr().out
    assert "warning: The checkpoint" in said
    assert "No space left on device" in said
    warnings = [str(record["warning"]) for record in newest_run(Path()).metrics() if record["kind"] == "checkpoint"]
    assert any("The write is repeated while the run continues." in warning for warning in warnings)
    assert newest("runs")[1].meta["position"]["global_step"] == 10


@pytest.mark.job
@pytest.mark.slow
def test_a_disk_that_hangs_does_not_end_the_training_and_is_reported_at_its_end(folder: Path) -> None:
    more = ("deadline_seconds=3", "checkpoint.every_steps=0", "checkpoint.every_epochs=1")
    outcome = train(folder, 0, *more, fault="time.sleep(1000)")
    assert outcome.code == 2, outcome.output
    assert "epoch 2/2" in outcome.stdout
    assert "was skipped, because the checkpoint of step 5 was still being written" in whole_lines(outcome.output)


RANKS = (1, 2, 3, 6)
#: a single file that all ranks wait for is what the others are compared with
WAITED, BACKGROUND = ("single", "false"), (("single", "true"), ("sharded", "true"))
SPLIT = ("plan.stage*=domain", "plan.classifier.*=model", "plan.classifier.dropout2=batch")


@pytest.fixture
def frequent_folder(tmp_path: Path) -> Path:
    """A configuration that writes a checkpoint after every step, and 75 small images."""
    write_images(tmp_path / "train.h5", 75, shape=SHAPE)
    config = CONFIG.replace("train.h5", f"{tmp_path}/train.h5").replace("every_steps: 2", "every_steps: 1, keep: 9")
    (tmp_path / "tiny.yaml").write_text(config.replace("hidden: 5", "hidden: 5, dropout: 0.2"))
    return tmp_path


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every write in the background takes as long as some steps; for each, how many steps began meanwhile."""
    steps, writes, run, write = list[int](), list[int](), TrainingStep.run, BackgroundWriter._run

    def slow(self: BackgroundWriter, work: Callable[[], Any]) -> None:
        before = len(steps)
        time.sleep(0.03)
        write(self, work)
        writes.append(len(steps) - before)

    monkeypatch.setattr(TrainingStep, "run", lambda *arguments: (steps.append(1), run(*arguments))[1])
    monkeypatch.setattr(BackgroundWriter, "_run", slow)
    return writes


@dataclass(frozen=True)
class Way:
    """The runs of one layout and one manner of writing, in a directory of their own."""

    folder: Path
    layout: str
    asynchronous: str
    name: str

    def train(self, ranks: int, *overrides: str, resume: str | None = None, steps: int) -> None:
        keys = (f"checkpoint.layout={self.layout}", f"checkpoint.asynchronous={self.asynchronous}")
        train_virtual(ranks, self.folder / "tiny.yaml", f"output={self.output}", *keys, *overrides, resume=resume, steps=steps)

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}-{self.layout}-{self.asynchronous}"

    def path(self, step: int) -> Path:
        run = latest(self.output, "tiny")
        return checkpoint_path(run.checkpoints, step, sharded=self.layout == "sharded")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("readers", RANKS)
@pytest.mark.parametrize("writers", RANKS)
def test_any_ranks_go_on_from_what_any_others_wrote_in_the_background(
    frequent_folder: Path, overlap: list[int], writers: int, readers: int
) -> None:
    """Each goes on from the checkpoint before the newest, which was written while its run trained."""
    ways = [Way(frequent_folder, *how, "saved") for how in (WAITED, *BACKGROUND)]
    for way in ways:
        way.train(writers, steps=3)
        assert_same(read(way.path(2)), read(ways[0].path(2)))
    assert any(overlap), "steps began while a checkpoint was written"
    for way in ways:
        way.train(readers, resume=str(way.path(2)), steps=2)
        assert_same(read(way.path(4)), read(ways[0].path(4)))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("writers", "readers", "overrides"), [(2, 3, ()), (4, 3, ("grid.rows=2", *SPLIT))], ids=["2-3", "2x2-1x3"]
)
def test_real_ranks_go_on_with_the_same_bits(
    job: Callable[..., Outcome], frequent_folder: Path, writers: int, readers: int, overrides: tuple[str, ...]
) -> None:
    (frequent_folder / "program.py").write_text(PROGRAM.replace("@FAULT@", "time.sleep(0.002)"))
    ends = []
    for layout, asynchronous in (WAITED, BACKGROUND[1]):
        way = Way(frequent_folder, layout, asynchronous, "real")
        keys = (f"output={way.output}", f"checkpoint.layout={layout}", f"checkpoint.asynchronous={asynchronous}")
        outcome = job(writers, ["program.py", "train", "tiny.yaml", *keys, *overrides, "--steps", "3"], cwd=frequent_folder)
        assert outcome.code == 0, outcome.output
        resumed = ("--resume", str(way.path(2)), "--steps", "2")
        outcome = job(readers, ["program.py", "train", "tiny.yaml", *keys, *resumed], cwd=frequent_folder)
        assert outcome.code == 0, outcome.output
        ends.append(read(way.path(4)))
    assert_same(*ends)


ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Pacific/Kiritimati", "Asia/Kolkata", "America/St_Johns")
KEEP = 2
#: around the hour that comes twice in Berlin when summer time ends
DOUBLE_HOUR = 1761438600.0
YEAR = 365 * 86400.0


@contextlib.contextmanager
def clock(seconds: float, zone: str) -> Iterator[None]:
    """Hold the wall clock at this time in this time zone."""
    real = {name: getattr(time, name) for name in ("time", "time_ns", "gmtime", "localtime", "strftime")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        patch.setattr(time, "time", lambda: seconds)
        patch.setattr(time, "time_ns", lambda: int(seconds * 1e9))
        for name in ("gmtime", "localtime"):
            patch.setattr(time, name, lambda at=None, of=real[name]: of(seconds if at is None else at))
        patch.setattr(time, "strftime", lambda form, at=None: real["strftime"](form, time.localtime() if at is None else at))
        yield
    time.tzset()


class History:
    """Starts and resumes of one configuration, each with its own clock and time zone, and the runs that must result.

    Attributes:
        written: steps of the checkpoints that the newest run has written and that were not set aside, in this order.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.written: list[int] = []
        self.begun: list[Path] = []

    def train(self, source: str | None, steps: int) -> None:
        offset = self.draw.choice((0.0, 1800.0, 3600.0, -3600.0, self.draw.uniform(-YEAR, YEAR)))
        with clock(DOUBLE_HOUR + offset, self.draw.choice(ZONES)):
            train_virtual(1, self.folder / "tiny.yaml", f"output={self.folder / 'runs'}", resume=source, steps=steps)

    def start(self) -> None:
        there = self._directories()
        steps = self.draw.randint(1, 3)
        self.train(None, steps)
        (new,) = self._directories() - there
        self.begun.append(new)
        self.written = list(range(1, steps + 1))

    def resume(self, earlier: bool) -> None:
        """Resume the newest run: from its last checkpoint by `auto`, or from the checkpoint before it by its path."""
        run = self.begun[-1]
        if earlier and len(self.written) > 1:
            del self.written[-1]
            source = str(checkpoint.checkpoint_path(run / "checkpoints", self.written[-1]))
        else:
            source = "auto"
        last, steps, there = self.written[-1], self.draw.randint(1, 3), self._directories()
        self.train(source, steps)
        assert self._directories() == there, "a resume begins no new run"
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        resumed = [record["step"] for record in records if record["kind"] == "resume"]
        assert resumed[-1:] == [last], "the run goes on from what was written last"
        self.written += range(last + 1, last + steps + 1)

    def touch(self) -> None:
        """Set random file times, as copies, nodes with other clocks and people do."""
        for path in (self.folder / "runs").rglob("*"):
            seconds = self.draw.uniform(1e9, 2e9)
            os.utime(path, (seconds, seconds))

    def check(self) -> None:
        """Assert that the newest run is the one that began last, and that its newest checkpoints are those written last."""
        assert [run.path for run in runs(self.folder / "runs", "tiny")] == self.begun[::-1]
        there = checkpoint.by_age(self.begun[-1] / "checkpoints")
        assert [step for step, _ in there] == self.written[-KEEP:]

    def _directories(self) -> set[Path]:
        return {path.parent for path in (self.folder / "runs").glob("*/config.yaml")}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_the_history(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    write_images(tmp_path / "train.h5", 75, shape=SHAPE)
    text = CONFIG.replace("every_steps: 2", f"every_steps: 1, keep: {KEEP}").replace("epochs: 2", "epochs: 90")
    (tmp_path / "tiny.yaml").write_text(text.replace("train.h5", str(tmp_path / "train.h5")))
    history = History(tmp_path, draw)
    history.start()
    for _ in range(6):
        history.check()
        if draw.random() < 0.5:
            history.touch()
        history.check()
        act = draw.choice(("start", "resume", "resume", "rewind"))
        history.start() if act == "start" else history.resume(earlier=act == "rewind")
    history.check()


CHECKPOINT = "checkpoint-00000004.h5"
#: what other tools, or the user, may keep under names that runs have, too
FOREIGN = {
    "config.yaml": "# three days of comments\nname: tiny\nmodel: small\n",
    "config-00000004.yaml": "# another experiment\n",
    "config-00000099.yaml": "output: mine\n",
    "metrics.jsonl": '{"mine": true, "step": 99}\n{"kind": "epoch", "step": 99, "epoch": 9}\nno JSON\n{"torn": ',
    "hashes.jsonl": '{"step": 99, "hashes": "00"}\n',
    "versions.json": '{"python": "3.11"}\n',
    "git.json": "{}",
    MARKER: '{"run": 1}\n',
    "choice.json": "{}",
    "flight-directory": "somewhere\n",
    "schedule-all.json": "{}",
    "checkpoints/best.json": "{}",
    "checkpoints/checkpoint-00000099.h5": "another tool's",
    "checkpoints/checkpoint-00000099.h5.partial": "a download",
    "checkpoints/checkpoint-00000002-set-aside.h5": "another tool's",
    "logs/rank-0000.log": "mine\n",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a configuration and a run of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_images(folder / "train.h5", 75, shape=SHAPE)
    (folder / "tiny.yaml").write_text(CONFIG.replace("train.h5", str(folder / "train.h5")))
    train_virtual(1, folder / "tiny.yaml", f"output={folder / 'runs'}", steps=4)
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_checkpoint_from_elsewhere_begins_a_new_run(
    trained: Path, tmp_path: Path, seed: int, below: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, project = random.Random(seed), tmp_path / "project"
    names = ["config.yaml", "config-00000099.yaml", "metrics.jsonl", *draw.sample(sorted(FOREIGN), 8)]
    for name in FOREIGN if seed == 0 else names:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(FOREIGN[name])
    own = newest_run(trained)
    if seed % 2:  # with a copy of the run's own configuration it is no run yet
        shutil.copy(own.path / "config.yaml", project)
    start = project / below / CHECKPOINT
    start.parent.mkdir(exist_ok=True)
    shutil.copy(own.checkpoints / CHECKPOINT, start)
    before = _contents(project)
    monkeypatch.chdir(start.parent if seed % 3 else project)
    source = CHECKPOINT if seed % 3 else str(start)
    train_virtual(1, trained / "tiny.yaml", f"output={tmp_path / 'runs'}", resume=source, steps=2)
    assert _contents(project) == before
    new = newest_run(tmp_path)
    assert checkpoint.by_age(new.checkpoints)[-1][0] == 6
    (line,) = [line for line in whole_lines(capsys.readouterr().out).splitlines() if "a new run begins with its state" in line]
    assert line == f"{source} is outside its run's directory: a new run begins with its state"
    assert [record["step"] for record in new.metrics() if record["kind"] == "resume"] == [4]
    train_virtual(1, trained / "tiny.yaml", f"output={tmp_path / 'runs'}", resume="auto", steps=2)
    assert checkpoint.by_age(new.checkpoints)[-1][0] == 8, "the new run goes on as any other"


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_from_elsewhere(trained: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "other"):
        train_virtual(1, trained / "tiny.yaml", f"output={folder / 'runs'}", "seed=8", steps=2)
    mine, others = newest_run(tmp_path), newest_run(tmp_path / "other")
    shutil.copy(mine.checkpoints / "checkpoint-00000002.h5", others.checkpoints / "checkpoint-00000007.h5")
    before = _contents(others.path)
    source = others.checkpoints / "checkpoint-00000007.h5"
    train_virtual(1, trained / "tiny.yaml", f"output={tmp_path / 'runs'}", "seed=8", resume=str(source), steps=2)
    assert _contents(others.path) == before
    assert newest_run(tmp_path).path not in (mine.path, others.path)
    output = f"output={tmp_path / 'other' / 'runs'}"
    train_virtual(1, trained / "tiny.yaml", output, "seed=8", resume="auto", steps=2)
    assert newest_run(tmp_path / "other").path == others.path
    assert [record["step"] for record in others.metrics() if record["kind"] == "resume"] == [2], "its own checkpoint"


@pytest.mark.parametrize("through", ["", "link", "linked directory"])
def test_a_checkpoint_of_a_run_goes_on_in_it(trained: Path, tmp_path: Path, through: str) -> None:
    """A link may lead to the checkpoint."""
    run = Path(shutil.copytree(newest_run(trained).path, tmp_path / "runs" / newest_run(trained).path.name))
    source = run / "checkpoints" / CHECKPOINT
    if through == "link":
        (tmp_path / "latest.h5").symlink_to(source)
        source = tmp_path / "latest.h5"
    elif through:
        (run / "checkpoints").rename(tmp_path / "scratch")
        (run / "checkpoints").symlink_to(tmp_path / "scratch")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"mine": true, "step": 99}\n')
    (run / "config-00000099.yaml").write_text("# another experiment\n")
    overrides = (f"output={tmp_path / 'runs'}", "batch=5")
    train_virtual(1, trained / "tiny.yaml", *overrides, resume=str(source), steps=2)
    assert newest_run(tmp_path).path == run
    assert [step for step, _ in checkpoint.checkpoints(run / "checkpoints")][-1] == 6
    assert (run / "config-00000099.yaml").read_text() == "# another experiment\n", "no run wrote that"
    assert {"mine": True, "step": 99} in RunDirectory(run).metrics()


def test_commands_take_no_other_directory_for_a_run(trained: Path, tmp_path: Path) -> None:
    project = tmp_path / "tiny-20300101-000000"  # as if it were a run's
    for name, text in FOREIGN.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    (project / "checkpoints/best.json").unlink()
    before = _contents(project)
    assert not is_run(project)
    with pytest.raises(CheckpointError, match=r"lacks run\.json or config\.yaml"):
        RunDirectory.open(project)
    for words in (["report", str(project)], ["compare", str(project), str(project)], ["watch", str(project), "--once"]):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 2, words
        assert "is not a run directory, because it lacks run.json or config.yaml" in result.output
    result = CliRunner().invoke(cli, ["checkpoint", "prune", str(project), "--keep", "1"])
    assert (result.exit_code, result.output) == (0, "")
    assert latest(tmp_path, "tiny") is None
    train_virtual(1, trained / "tiny.yaml", f"output={tmp_path}", resume="auto", steps=1)
    assert _contents(project) == before


def test_a_checkpoint_of_a_program_says_so(trained: Path, tmp_path: Path) -> None:
    content = checkpoint.read(newest_run(trained).checkpoints / CHECKPOINT)
    own = CheckpointContent(content.tensors, {"notes": {}, "position": content.meta["position"]})
    checkpoint.write(tmp_path / "net.h5", own)
    with pytest.raises(CheckpointError, match="was written by a Python program with its own training loop"):
        train_virtual(1, trained / "tiny.yaml", f"output={tmp_path / 'runs'}", resume=str(tmp_path / "net.h5"), steps=1)
    assert json.loads((newest_run(trained).path / MARKER).read_text())["format"] == "hpctrain-run"


TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=6)
LOOP_RANKS = (1, 2, 3)
NAMES = ("net.h5", "net.shards")


def _made(comm: ThreadCommunicator) -> tuple[Replica, LoopCheckpoints]:
    progress = virtual_engine(comm)
    checkpoints = LoopCheckpoints(comm, progress.notes, 60.0)
    loop = LoopState(progress.notes, saver=checkpoints.saver)
    return replica_of(TASK, comm, progress, Sharded, loop=loop), checkpoints


def _tensors(replica: Replica) -> dict[str, bytes]:
    replica.settle()
    replica.drain()
    return {name: parameter.data.tobytes() for name, parameter in replica.network.parameters.items()}


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", LOOP_RANKS)
def test_what_is_saved_between_steps_goes_on_bit_by_bit(ranks: int, name: str, background: bool, tmp_path: Path) -> None:
    def whole(comm: ThreadCommunicator) -> dict[str, bytes]:
        replica, checkpoints = _made(comm)
        for batch in batches(TASK, comm.rank, comm.size):
            replica.step(batch, TASK.lr)
            if replica.global_step == 3:
                checkpoints.save(replica, tmp_path / name, {"seen": 3}, background=background)
        checkpoints.finish()
        return _tensors(replica)

    def resumed(comm: ThreadCommunicator) -> dict[str, bytes]:
        replica, checkpoints = _made(comm)
        assert checkpoints.load(replica, tmp_path / name) == {"seen": 3}
        assert replica.global_step == 3
        for batch in [*batches(TASK, comm.rank, comm.size)][3:]:
            replica.step(batch, TASK.lr)
        return _tensors(replica)

    assert run_virtual(ranks, whole, seed=1) == run_virtual(ranks, resumed, seed=2)


@pytest.mark.parametrize("name", NAMES)
def test_one_path_is_written_again_and_again(name: str, tmp_path: Path) -> None:
    def program(comm: ThreadCommunicator) -> None:
        replica, checkpoints = _made(comm)
        for batch in batches(TASK, comm.rank, comm.size):
            replica.step(batch, TASK.lr)
            checkpoints.save(replica, tmp_path / name, {"step": replica.global_step}, background=replica.global_step % 3 != 0)
        checkpoints.finish()

    run_virtual(2, program)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert checkpoint.read(tmp_path / name).meta["notes"] == {"step": TASK.steps}


@pytest.mark.parametrize("ranks", LOOP_RANKS)
def test_a_loop_goes_back_after_it_has_diverged(ranks: int, tmp_path: Path) -> None:
    """And ends with the bits of one that never came to what was not finite."""

    def program(comm: ThreadCommunicator, poisoned: bool) -> dict[str, bytes]:
        replica, checkpoints = _made(comm)
        steps = [*batches(TASK, comm.rank, comm.size)]
        for batch in steps[:3]:
            replica.step(batch, TASK.lr)
        checkpoints.save(replica, tmp_path / "good.h5", {}, background=True)
        if poisoned:
            bad = steps[3].x.copy()
            with pytest.raises(DivergedError):  # noqa: PT012
                steps[3].x[...] = np.nan
                for batch in steps[3:]:
                    replica.step(batch, TASK.lr)
            steps[3].x[...] = bad
            checkpoints.load(replica, tmp_path / "good.h5")
        for batch in steps[3:]:
            replica.step(batch, TASK.lr)
        checkpoints.finish()
        return _tensors(replica)

    assert run_virtual(ranks, partial(program, poisoned=True)) == run_virtual(ranks, partial(program, poisoned=False))


def test_a_load_drops_the_sums_of_steps_that_it_undoes(tmp_path: Path) -> None:
    def program(comm: ThreadCommunicator) -> dict[str, bytes]:
        replica, checkpoints = _made(comm)
        first, second, *_ = batches(TASK, comm.rank, comm.size)
        replica.step(first, TASK.lr)
        checkpoints.save(replica, tmp_path / "net.h5", {}, background=False)
        before = {name: view.tobytes() for name, view in replica.network.statistics.views.items()}
        replica.step(second, TASK.lr)
        checkpoints.load(replica, tmp_path / "net.h5")
        assert replica.settle() is None
        assert {name: view.tobytes() for name, view in replica.network.statistics.views.items()} == before
        return before

    run_virtual(3, program)


@pytest.mark.parametrize("ranks", LOOP_RANKS)
def test_one_that_cannot_be_written_is_an_error_at_once_or_at_the_end(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def program(comm: ThreadCommunicator) -> list[str]:
        replica, checkpoints = _made(comm)
        sentences = []
        for background in (False, True):
            with pytest.raises(CheckpointError) as caught:  # noqa: PT012
                checkpoints.save(replica, tmp_path / "file" / "net.h5", {}, background=background)
                checkpoints.finish()
            sentences.append(str(caught.value))
        return sentences

    for sentences in run_virtual(ranks, program):
        assert all("cannot be written" in sentence for sentence in sentences)


def test_steps_go_on_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, original = threading.Event(), os.pwrite

    def pwrite(*arguments: object) -> int:
        if threading.current_thread().name == "hpctrain-checkpoint":
            assert held.wait(50)
        return original(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)

    def program(comm: ThreadCommunicator) -> None:
        replica, checkpoints = _made(comm)
        for batch in batches(TASK, comm.rank, comm.size):
            replica.step(batch, TASK.lr)
            if replica.global_step == 2:
                checkpoints.save(replica, tmp_path / "net.h5", {}, background=True)
        assert not (tmp_path / "net.h5").exists()
        comm.allgather_object(None)
        held.set()
        checkpoints.finish()

    run_virtual(2, program)
    assert checkpoint.read(tmp_path / "net.h5").meta["position"]["global_step"] == 2
