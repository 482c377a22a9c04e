"""Run directories and their metrics."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpctrain.errors import CheckpointError, ConfigError, DataError
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, write
from hpctrain.storage.run_directory import (
    RunDirectory,
    git_state,
    latest,
    restore,
    resumable,
    runs,
    small_files,
    software_versions,
)
from tests.support.unmarked_run import make_unmarked

CONFIG = "model:\n  name: small\nname: quickstart\noutput: runs\n"


def create(output, name="quickstart"):
    return RunDirectory.create(output, name, config=CONFIG, versions=software_versions(kernels="numpy"), git={})


def at(output, name, *steps):
    """A run with that directory name and checkpoints."""
    recorded = re.sub(r"-\d{8}-\d{6}(-\d+)?$", "", name)
    path = make_unmarked(output / name, f"seed: 1\nname: '{recorded}'\nmodel:\n  name: small\n")
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
    with pytest.raises(CheckpointError, match="no run directory"):
        RunDirectory.open(tmp_path)


def test_directories_are_unique_however_many_start_at_once(tmp_path):
    with ThreadPoolExecutor(5) as pool:
        made = list(pool.map(lambda _: create(tmp_path / "runs"), range(9)))
    assert len({run.path for run in made}) == 9
    assert len(list(runs(tmp_path / "runs", "quickstart"))) == 9


@pytest.mark.parametrize(("name", "legal"), [("a/b", "a-b"), ("", "run"), ("-x", "x"), ("Größe 7", "Gr-e-7")])
def test_names_that_are_no_file_names(tmp_path, name, legal):
    with pytest.raises(ConfigError, match=f"as in '{legal}'"):
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
    restore(run, files)
    assert resumable(tmp_path, "quickstart")[0] == checkpoint_path(run.checkpoints, 3)
    assert small_files(run) == files
    (run.path / "config.yaml").write_text("name: changed\n")
    restore(run, files)
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


def test_resumable_is_the_newest_run_with_a_valid_checkpoint(tmp_path):
    assert resumable(tmp_path, "net") is None
    at(tmp_path, "net-20240101-000000", 7, 9)
    damaged = at(tmp_path, "net-20240102-000000", 25)
    checkpoint_path(damaged.checkpoints, 25).write_bytes(b"half")
    at(tmp_path, "net-20240103-000000")
    path, content = resumable(tmp_path, "net")
    assert path == checkpoint_path(tmp_path / "net-20240101-000000" / "checkpoints", 9)
    assert np.array_equal(content.tensors["parameters/a"], np.ones(3))


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


def test_a_run_that_goes_back_keeps_no_configuration_of_steps_that_it_takes_anew(tmp_path):
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
        "import os, signal, sys\nfrom pathlib import Path\nfrom hpctrain.storage.run_directory import RunDirectory\n"
        "run = RunDirectory.open(Path(sys.argv[1]))\n"
        "for step in range(225): run.append_metrics({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record["step"] for record in run.metrics()] == list(range(225))


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
