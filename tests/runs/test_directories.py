"""Run directories, their owners, and the record of the best checkpoint."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import CheckpointError, ConfigError, DataError, RunOwnedError
from hpctrain.launch import processes
from hpctrain.launch.processes import ProcessMark
from hpctrain.launch.scheduler import SchedulerJob
from hpctrain.runs import directory as best_record
from hpctrain.runs import owner as run_owner
from hpctrain.runs.directory import (
    BestRecord,
    RunDirectory,
    containing_run,
    git_state,
    latest,
    restore_files,
    runs,
    small_files,
    software_versions,
)
from hpctrain.runs.owner import Claim, Contender, Owner, Ownership, living_owner, owned, owners, was_owned_by_job
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, write
from tests.support.runs import make_run
from tests.support.users import as_nobody
from tests.support.users import place as place

CONFIG = "model:\n  name: small\nname: quickstart\noutput: runs\n"


def create(output, name="quickstart"):
    return RunDirectory.create(output, name, config=CONFIG, versions=software_versions(kernels="numpy"), git={})


def at(output, name, *steps):
    """A run with that directory name and checkpoints."""
    recorded = re.sub(r"-\d{8}-\d{6}(-\d+)?$", "", name)
    path = make_run(output / name, f"seed: 1\nname: '{recorded}'\nmodel:\n  name: small\n")
    for step in steps:
        write(checkpoint_path(path / "checkpoints", step), CheckpointContent({"parameters/a": np.ones(3)}, {}))
    return RunDirectory(path)


def test_create_and_open(tmp_path):
    run = RunDirectory.create(
        tmp_path / "runs",
        "quickstart",
        config=CONFIG,
        versions=software_versions(kernels="numpy", mpi="MPICH Version: 5.0"),
        git={"revision": "abc", "dirty": True},
    )
    assert run.path.parent == tmp_path / "runs"
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "git.json",
        "run.json",
        "versions.json",
    ]
    assert run.config() == CONFIG
    versions = json.loads((run.path / "versions.json").read_text())
    assert set(versions) == {"python", "hpctrain", "numpy", "mpi4py", "h5py", "kernels", "mpi"}
    assert versions["numpy"] == np.__version__
    assert json.loads((run.path / "git.json").read_text()) == {"revision": "abc", "dirty": True}
    assert RunDirectory.open(run.path) == run
    with pytest.raises(CheckpointError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_a_run_of_another_version_is_refused_and_never_passed_over(tmp_path):
    """A run of a later release must not be resumed, which would cut its records."""
    create(tmp_path)
    run = create(tmp_path)
    marker = run.path / "run.json"
    marker.write_text(marker.read_text().replace('"format_version": 1', '"format_version": 2'))
    for search in (lambda: RunDirectory.open(run.path), lambda: latest(tmp_path, "quickstart"), lambda: latest(tmp_path, None)):
        with pytest.raises(
            CheckpointError, match="has format version 2, but this hpctrain reads version 1; use the hpctrain that"
        ):
            search()
    assert latest(tmp_path, "another") is None


def test_a_missing_run_is_no_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no run directory .*/frist\.$"):
        RunDirectory.open(tmp_path / "frist")


def test_directories_are_unique_however_many_start_at_once(tmp_path):
    with ThreadPoolExecutor(5) as pool:
        made = list(pool.map(lambda _: create(tmp_path / "runs"), range(9)))
    assert (len({run.path for run in made}), len(list(runs(tmp_path / "runs", "quickstart")))) == (9, 9)


@pytest.mark.parametrize(("name", "legal"), [("a/b", "a-b"), ("", "run"), ("-x", "x"), ("Größe 7", "Gr-e-7")])
def test_names_that_are_no_file_names(tmp_path, name, legal):
    with pytest.raises(ConfigError, match=f"such as '{legal}'"):
        create(tmp_path, name)
    create(tmp_path, legal)


def test_output_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="choose another output"):
        create(tmp_path / "runs")
    with pytest.raises(ConfigError, match="choose another output"):
        create(tmp_path / "runs" / "below")


def test_small_files_come_back_where_the_directory_was_removed(tmp_path):
    run = create(tmp_path)
    run.append_metrics({"kind": "start"})
    (run.path / "choice.json").write_text("{}")
    files = small_files(run)
    assert {"choice.json", "config.yaml", "git.json", "versions.json"} <= set(files)
    assert "metrics.jsonl" not in files
    shutil.rmtree(run.path)
    write(checkpoint_path(run.checkpoints, 3), CheckpointContent({"parameters/a": np.ones(3)}, {}))
    restore_files(run, files)
    assert (latest(tmp_path, "quickstart"), small_files(run)) == (run, files)
    (run.path / "config.yaml").write_text("name: changed\n")
    restore_files(run, files)
    assert run.config() == "name: changed\n"


def test_latest_goes_by_time_and_name(tmp_path):
    assert latest(tmp_path / "absent", "net") is None
    for name in ("net-20240102-030405", "net-20240102-030405-2", "net-20240102-030405-10", "net-20231231-235959"):
        at(tmp_path, name)
    at(tmp_path, "net-wide-20300101-000000")  # another run's name that begins alike
    (tmp_path / "net-20290101-000000").mkdir()  # never finished: no configuration
    assert latest(tmp_path, "net").path.name == "net-20240102-030405-10"
    assert [run.path.name for run in runs(tmp_path, "net")][1:] == [
        "net-20240102-030405-2",
        "net-20240102-030405",
        "net-20231231-235959",
    ]
    assert latest(tmp_path, "net-wide").path.name == "net-wide-20300101-000000"


def test_a_run_is_known_by_the_name_in_its_configuration(tmp_path):
    """Not by how its directory's name begins: "a", "a-b" and a name that ends like a time are three runs."""
    names = ("a", "a-b", "a-20200101-000000", "a-20200101-000000-2")
    for number, name in enumerate(names):
        at(tmp_path, f"{name}-2026010{number + 1}-000000")
    for number, name in enumerate(names):
        assert [run.path.name for run in runs(tmp_path, name)] == [f"{name}-2026010{number + 1}-000000"]
    (tmp_path / "a-20260101-000000" / "config.yaml").write_text("name: 'b c'\n")  # renamed at a resume
    assert latest(tmp_path, "a") is None
    assert latest(tmp_path, "b c") is not None
    (tmp_path / "a-20260101-000000" / "config.yaml").write_bytes(b"name: [\xff\n")
    assert latest(tmp_path, "b c") is None
    assert list(runs(tmp_path, "[")) == []


def test_the_configuration_follows_and_the_earlier_ones_are_kept(tmp_path):
    run = create(tmp_path)
    run.follow_config(CONFIG, 5, CONFIG)
    assert not list(run.path.glob("config-*"))
    run.follow_config("name: b\n", 5, CONFIG)
    run.follow_config("name: c\n", 5, CONFIG)  # nothing was trained with b
    run.follow_config("name: d\n", 70, "name: c\n")
    assert _configurations(run) == {"": "name: d\n", "-00000005": CONFIG, "-00000070": "name: c\n"}
    assert not list(run.path.glob("*.partial"))


def test_a_run_that_goes_back_keeps_no_configuration_of_steps_that_it_repeats(tmp_path):
    run = create(tmp_path)
    (run.path / "config-mine.yaml").write_text("no run's")
    run.follow_config("name: b\n", 20, CONFIG)
    run.follow_config("name: c\n", 10, CONFIG)  # from an older checkpoint: b has never made a step before the tenth
    assert _configurations(run) == {"": "name: c\n", "-00000010": CONFIG, "-mine": "no run's"}
    run.follow_config(CONFIG, 10, CONFIG)
    assert _configurations(run) == {"": CONFIG, "-mine": "no run's"}


def _configurations(run):
    return {path.stem.removeprefix("config"): path.read_text() for path in run.path.glob("config*.yaml")}


def test_metrics_round_trip(tmp_path):
    run = create(tmp_path)
    assert run.metrics() == []
    records = [{"step": i, "loss": 1 / (i + 3), "top": [0.5, float("nan")], "rate": float("inf")} for i in range(9)]
    for record in records:
        run.append_metrics(record)
    assert run.metrics() == [{**record, "top": [0.5, None], "rate": None} for record in records]
    text = run.metrics_path.read_text()
    assert text.count("\n") == 9
    assert "NaN" not in text


def test_every_torn_tail_is_left_out_and_repaired(tmp_path):
    run = create(tmp_path)
    for step in range(3):
        run.append_metrics({"step": step, "text": "x" * 5000})  # longer than a block of the repair
    whole = run.metrics_path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in [0, 1, first - 1, first, first + 1, 2 * first - 1, len(whole) - 4097, len(whole) - 1, len(whole)]:
        run.metrics_path.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n")
        assert [record["step"] for record in run.metrics()] == list(range(complete))
        run.append_metrics({"step": 225})
        assert [record["step"] for record in run.metrics()] == [*range(complete), 225]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    run = create(tmp_path)
    for bad in (b'{"step": 1', b"[1]", b""):
        run.metrics_path.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
        with pytest.raises(DataError, match="Line 2 of"):
            run.metrics()


@pytest.mark.job
def test_what_was_appended_survives_a_kill(tmp_path):
    run = create(tmp_path)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom hpctrain.runs.directory import RunDirectory\n"
        "run = RunDirectory.open(Path(sys.argv[1]))\n"
        "for step in range(225): run.append_metrics({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], timeout=60, check=False)
    assert (done.returncode, [record["step"] for record in run.metrics()]) == (-signal.SIGKILL, list(range(225)))


def git(directory, *words):
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *identity, *words]
    return subprocess.run(
        command, cwd=directory, env={**os.environ, **settings}, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.job
def test_git_state(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    try:
        git(tmp_path, "init", "-q")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    assert git_state(tmp_path) == {}  # a repository without a commit
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    revision = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("data")
    below = tmp_path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    assert git_state() == {"revision": revision, "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {"revision": revision, "dirty": True}


@pytest.mark.job
def test_no_git_and_no_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    assert git_state(tmp_path / "plain") == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {}


HERE = processes.own_mark()
#: its number is this process's, which has another start: the number has come again
DEAD = replace(HERE, begun="1")
ELSEWHERE = ProcessMark(7, "5", "other-12345678")
JOB = SchedulerJob("Slurm", "41", "c", "41", 1)


class Clock:
    """A clock that advances by a fixed step at each call."""

    def __init__(self, step: float = 0.5) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def put(run: Path, mark: ProcessMark, number: int = 1, **facts: object) -> Path:
    """Write the record of an owner without signs of life, and return its path."""
    (run / run_owner.FOLDER).mkdir(parents=True, exist_ok=True)
    owner = Owner(number, f"t{number}", str(mark), "n1", "2026-01-01 00:00:00 UTC", "hpctrain train", **facts)
    assert run_owner._make(run, owner)
    return run_owner._path(run, number)


def beat(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + run_owner._last_line({"beat": number}))


def last(contender: Contender, looks: int) -> Ownership | None:
    """Return the ownership if one of this number of attempts succeeds, else None."""
    for _ in range(looks):
        if (ownership := contender.attempt()) is not None:
            return ownership
    return None


def test_one_of_many_takes_over_from_a_dead_owner(tmp_path: Path) -> None:
    put(tmp_path, DEAD)

    def contend(number: int) -> Ownership | None:
        try:
            return Contender(tmp_path, f"command {number}").attempt()
        except RunOwnedError:
            return None

    for taken in range(2, 6):
        with ThreadPoolExecutor(8) as pool:
            [ownership] = [each for each in pool.map(contend, range(8)) if each is not None]
        assert [owner.number for owner in owners(tmp_path)] == list(range(1, taken + 1))
        with pytest.raises(RunOwnedError, match=f"process {os.getpid()} on "):
            Contender(tmp_path, "another").attempt()
        ownership.release()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["dead", "released", "silent", "damaged"]), max_size=4), st.booleans())
def test_whatever_came_before_a_run_has_one_owner(tmp_path_factory: pytest.TempPathFactory, past: list[str], lives: bool) -> None:
    run = tmp_path_factory.mktemp("run")
    for number, kind in enumerate(past, 1):
        path = put(run, ELSEWHERE if kind == "silent" else DEAD, number)
        if kind == "released":
            path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + run_owner._last_line({"released": 3}))
        elif kind == "damaged":
            path.write_bytes(b"\xff{")
    if lives:
        put(run, HERE, len(past) + 1)
        with pytest.raises(RunOwnedError, match=r"being written to by hpctrain train, process \d+ on n1, since 2026-01-01"):
            Contender(run, "another").attempt()
        return
    waits = bool(past) and past[-1] in ("silent", "damaged")
    contender = Contender(run, "another", clock=Clock())
    first = contender.attempt()
    assert (first is None) == waits
    ownership = first or last(contender, 200)
    assert ownership.owner.number == len(past) + 1
    with pytest.raises(RunOwnedError):
        Contender(run, "third").attempt()
    ownership.release()
    with owned(run, "fourth"):
        assert owners(run)[-1].command == "fourth"


def test_an_owner_on_another_machine_is_judged_by_change_and_by_no_clock_of_its_own(tmp_path: Path) -> None:
    path = put(tmp_path, ELSEWHERE)
    os.utime(path, (4e9, 4e9))  # its clock is years ahead
    contender = Contender(tmp_path, "another", clock=Clock())
    assert last(contender, 100) is None  # 50 s
    beat(path, 1)
    with pytest.raises(RunOwnedError):
        contender.attempt()
    contender = Contender(tmp_path, "another", clock=Clock())
    assert last(contender, 60) is None
    ownership = last(contender, 120)
    ownership.release()


def test_a_process_that_was_stopped_has_not_watched_meanwhile(tmp_path: Path) -> None:
    put(tmp_path, ELSEWHERE)
    contender = Contender(tmp_path, "another", clock=Clock(3600.0))
    assert last(contender, 20) is None


@pytest.mark.parametrize(("restart", "at_once"), [(2, True), (1, False), (0, False)])
def test_a_job_that_is_queued_again_is_not_kept_waiting(tmp_path: Path, monkeypatch, restart: int, at_once: bool) -> None:
    """A higher count of restarts takes over at once. The same count is another step of the allocation, and waits."""
    put(tmp_path, ELSEWHERE, job=JOB)
    environment = {"SLURM_JOB_ID": "41", "SLURM_CLUSTER_NAME": "c", "SLURM_RESTART_COUNT": str(restart)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ownership = Contender(tmp_path, "hpctrain train").attempt()
    assert (ownership is not None) == at_once
    if ownership is not None:
        ownership.release()
    assert was_owned_by_job(tmp_path, replace(JOB, restart=restart))
    assert not was_owned_by_job(tmp_path, replace(JOB, chain="42"))
    assert not was_owned_by_job(tmp_path, SchedulerJob())


@pytest.mark.parametrize(("answer", "taken"), [(False, True), (None, False)])
def test_the_scheduler_is_asked_about_a_job_on_another_machine(tmp_path, monkeypatch, answer: bool | None, taken: bool) -> None:
    put(tmp_path, ELSEWHERE, job=JOB)
    monkeypatch.setattr(SchedulerJob, "lives", lambda self: answer if self == JOB else None)
    ownership = Contender(tmp_path, "hpctrain train").attempt()
    assert (ownership is not None) == taken
    if ownership is not None:
        ownership.release()
    monkeypatch.setattr(SchedulerJob, "lives", lambda self: True)  # suspended
    if not taken:
        with pytest.raises(RunOwnedError, match="of Slurm job 41, since"):
            Contender(tmp_path, "hpctrain train").attempt()


def test_a_copy_of_a_run_has_no_owner(tmp_path: Path) -> None:
    put(tmp_path / "run", HERE)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(RunOwnedError):
        Contender(tmp_path / "run", "another").attempt()
    ownership = last(Contender(tmp_path / "copy", "another", clock=Clock()), 200)
    ownership.release()


def test_a_file_system_without_links_has_one_owner_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    ownership = Contender(tmp_path, "first").attempt()
    with pytest.raises(RunOwnedError, match="written to by first"):
        Contender(tmp_path, "second").attempt()
    assert living_owner(tmp_path) == ownership.owner
    ownership.release()
    assert living_owner(tmp_path) is None


def test_an_owner_shows_signs_of_life_and_writes_nothing_once_it_is_taken_for_dead(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_owner, "BEAT_SECONDS", 0.01)
    ownership = Contender(tmp_path, "first").attempt()
    path = run_owner._path(tmp_path, 1)
    before = path.read_bytes()
    while path.read_bytes() == before:
        pass
    assert list(json.loads(path.read_bytes().splitlines()[1])) == ["beat"]
    ownership.require()
    put(tmp_path, ELSEWHERE, 2)
    with pytest.raises(RunOwnedError, match="was taken over by hpctrain train, process 7 on n1"):
        ownership.require()
    ownership.release()


@pytest.mark.parametrize("hidden", ["owners/owner-00001.jsonl", "owners"])
def test_an_owner_that_cannot_be_seen_is_not_taken_for_dead(place: Path, hidden: str) -> None:
    """The record of a colleague may be unreadable; the job is refused at once, and the owner keeps the run."""
    put(place, ELSEWHERE)
    for path in (place, place / "owners"):
        path.chmod(0o777)
    (place / hidden).chmod(0)
    with as_nobody(), pytest.raises((RunOwnedError, PermissionError)) as caught:
        last(Contender(place, "another", clock=Clock()), 200)
    assert hidden in f"{caught.value}"
    assert os.listdir(place / "owners") == ["owner-00001.jsonl"]


def test_a_sign_of_life_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch, caplog) -> None:
    """Otherwise the next job would take over the run, and no message would explain it."""
    monkeypatch.setattr(run_owner, "BEAT_SECONDS", 0.01)
    ownership = Contender(tmp_path, "first").attempt()
    path = run_owner._path(tmp_path, 1)
    path.unlink()
    path.mkdir()
    ownership._thread.join(0.1)
    ownership.release()
    assert "Cannot write the sign of life of the owner (Is a directory)" in caplog.text


def test_every_rank_knows_that_the_run_was_taken_over(tmp_path: Path) -> None:
    """A rank other than 0 writes its shard only while its job owns the run."""
    ownership = Contender(tmp_path, "first").attempt()
    claim = Claim(tmp_path, ownership.owner)
    claim.require()
    put(tmp_path, ELSEWHERE, 2)
    with pytest.raises(RunOwnedError, match="was taken over by hpctrain train, process 7 on n1"):
        claim.require()
    ownership.release()


def test_the_record_comes_back_where_the_directory_was_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    ownership = Contender(run, "first").attempt()
    shutil.rmtree(run)
    ownership.require()
    ownership.restore()
    with pytest.raises(RunOwnedError):
        Contender(run, "second").attempt()
    ownership.release()


def test_the_run_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    assert containing_run(tmp_path / "run" / "checkpoints") is None
    make_run(tmp_path / "run", "name: a\n")
    assert containing_run(tmp_path / "run" / "checkpoints") == containing_run(tmp_path / "run") == tmp_path / "run"
    assert containing_run(tmp_path) is None


BEST = BestRecord("checkpoint-00000035.h5", 35, 7, "top1", 0.9193)


@given(
    epoch=st.integers(0, 10**6), measure=st.sampled_from(["top1", "top5", "loss"]), value=st.floats(allow_nan=False, min_value=0)
)
def test_a_best_record_comes_back_as_it_was_written(tmp_path_factory, epoch: int, measure: str, value: float) -> None:
    directory = tmp_path_factory.mktemp("best")
    best = BestRecord("checkpoint-00000035.h5", 35, epoch, measure, value)
    best_record.write_best(directory, best)
    assert best_record.read_best(directory) == best
    best_record.write_best(directory, None)
    assert best_record.read_best(directory) is None
    assert list(directory.iterdir()) == []


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    best_record.write_best(tmp_path, BEST)
    before = os.stat(tmp_path / best_record.BEST_RECORD).st_ino
    dead = replace(processes.own_mark(), begun="1")
    (tmp_path / f"{best_record.BEST_RECORD}.1.{dead}.partial").write_text("as a kill leaves it")
    best_record.write_best(tmp_path, BestRecord(**vars(BEST)))
    assert [path.name for path in tmp_path.iterdir()] == [best_record.BEST_RECORD]
    assert os.stat(tmp_path / best_record.BEST_RECORD).st_ino == before


WRONG_VALUE = json.dumps({**vars(BEST), "value": "0.9193"})


@pytest.mark.parametrize("text", ["", "[1]", '{"step": 3}', WRONG_VALUE, "\udcff"])
def test_another_file_of_that_name_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / best_record.BEST_RECORD).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"best\.json is not a record of a best checkpoint"):
        best_record.read_best(tmp_path)
    best_record.write_best(tmp_path, BEST)
    assert best_record.read_best(tmp_path) == BEST


def test_a_record_of_the_best_checkpoint_that_cannot_be_read_is_not_called_another_file(tmp_path: Path) -> None:
    (tmp_path / best_record.BEST_RECORD).mkdir()
    with pytest.raises(CheckpointError, match=r"best\.json cannot be read \(Is a directory\); restore it"):
        best_record.read_best(tmp_path)


def _run(output: Path) -> RunDirectory:
    return RunDirectory.create(output, "tiny", config="name: tiny\n", versions={}, git={})


def test_the_newest_run_that_has_one_counts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No run of 'tiny' in .* has a best checkpoint"):
        best_record.find_best(tmp_path, "tiny")
    older = _run(tmp_path)
    _run(tmp_path)
    with pytest.raises(CheckpointError, match="No run of 'tiny'"):
        best_record.find_best(tmp_path, "tiny")
    best_record.write_best(older.checkpoints, BEST)
    with pytest.raises(CheckpointError, match=r"checkpoint-00000035\.h5 \(top1 91\.93% after epoch 7\), no longer exists"):
        best_record.find_best(tmp_path, "tiny")
    path = older.checkpoints / BEST.checkpoint
    path.write_bytes(b"")
    assert best_record.find_best(tmp_path, "tiny") == path
