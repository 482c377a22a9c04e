"""hpctrain writes only to directories that are proven to be runs; other directories stay as they are."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.data import format as data_format
from hpctrain.errors import CheckpointError
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory, latest
from hpctrain.storage.run_marker import MARKER, is_run, marker_of
from tests.experiment.test_checkpoints import CONFIG
from tests.support.virtual_runs import train_virtual

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
    images = np.random.default_rng(0).integers(0, 256, (75, 7, 6, 1), dtype=np.uint8)
    data_format.write(folder / "train.h5", 75, (7, 6, 1), ["a", "b", "c"], [(images, np.arange(75) % 3)])
    (folder / "tiny.yaml").write_text(CONFIG.replace("train.h5", str(folder / "train.h5")))
    train_virtual(1, folder / "tiny.yaml", f"output={folder / 'runs'}", steps=4)
    return folder


def _run(folder: Path) -> RunDirectory:
    run = latest(folder / "runs", "tiny")
    assert run is not None
    return run


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.sample(3)
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
    own = _run(trained)
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
    new = _run(tmp_path)
    assert checkpoint.by_age(new.checkpoints)[-1][0] == 6
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "a new run begins with its state" in line]
    assert line == f"{source} lies outside of the run that it is of: a new run begins with its state"
    assert [record["step"] for record in new.metrics() if record["kind"] == "resume"] == [4]
    train_virtual(1, trained / "tiny.yaml", f"output={tmp_path / 'runs'}", resume="auto", steps=2)
    assert checkpoint.by_age(new.checkpoints)[-1][0] == 8, "the new run goes on as any other"


def test_a_checkpoint_of_another_run_is_from_elsewhere(trained: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "other"):
        train_virtual(1, trained / "tiny.yaml", f"output={folder / 'runs'}", "seed=8", steps=2)
    mine, others = _run(tmp_path), _run(tmp_path / "other")
    shutil.copy(mine.checkpoints / "checkpoint-00000002.h5", others.checkpoints / "checkpoint-00000007.h5")
    before = _contents(others.path)
    source = others.checkpoints / "checkpoint-00000007.h5"
    train_virtual(1, trained / "tiny.yaml", f"output={tmp_path / 'runs'}", "seed=8", resume=str(source), steps=2)
    assert _contents(others.path) == before
    assert _run(tmp_path).path not in (mine.path, others.path)
    output = f"output={tmp_path / 'other' / 'runs'}"
    train_virtual(1, trained / "tiny.yaml", output, "seed=8", resume="auto", steps=2)
    assert _run(tmp_path / "other").path == others.path
    assert [record["step"] for record in others.metrics() if record["kind"] == "resume"] == [2], "its own checkpoint"


@pytest.mark.parametrize("through", ["", "link", "linked directory"])
def test_a_checkpoint_of_a_run_goes_on_in_it(trained: Path, tmp_path: Path, through: str) -> None:
    """A link may lead to the checkpoint. A run of an earlier version may hold it, and receives a marker."""
    run = Path(shutil.copytree(_run(trained).path, tmp_path / "runs" / _run(trained).path.name))
    source = run / "checkpoints" / CHECKPOINT
    if through == "link":
        (tmp_path / "latest.h5").symlink_to(source)
        source = tmp_path / "latest.h5"
    elif through:
        (run / "checkpoints").rename(tmp_path / "scratch")
        (run / "checkpoints").symlink_to(tmp_path / "scratch")
    else:
        (run / MARKER).unlink()
        for _, path in checkpoint.checkpoints(run / "checkpoints"):
            content = checkpoint.read(path)
            checkpoint.write(path, CheckpointContent(content.tensors, {k: v for k, v in content.meta.items() if k != "run"}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"mine": true, "step": 99}\n')
    (run / "config-00000099.yaml").write_text("# another experiment\n")
    overrides = (f"output={tmp_path / 'runs'}", "batch=5")
    train_virtual(1, trained / "tiny.yaml", *overrides, resume=str(source), steps=2)
    assert _run(tmp_path).path == run
    assert marker_of(run) is not None
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
    with pytest.raises(CheckpointError, match=r"has a config.yaml, but not the run.json"):
        RunDirectory.open(project)
    for words in (["report", str(project)], ["compare", str(project), str(project)], ["watch", str(project), "--once"]):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 2, words
        assert "is no run directory: it has a config.yaml, but not the run.json" in result.output
    result = CliRunner().invoke(cli, ["checkpoint", "prune", str(project), "--keep", "1"])
    assert (result.exit_code, result.output) == (0, "")
    assert latest(tmp_path, "tiny") is None
    train_virtual(1, trained / "tiny.yaml", f"output={tmp_path}", resume="auto", steps=1)
    assert _contents(project) == before


def test_a_checkpoint_of_a_program_says_so(trained: Path, tmp_path: Path) -> None:
    content = checkpoint.read(_run(trained).checkpoints / CHECKPOINT)
    own = CheckpointContent(content.tensors, {"notes": {}, "position": content.meta["position"]})
    checkpoint.write(tmp_path / "net.h5", own)
    with pytest.raises(CheckpointError, match="was written by a program with a loop of its own"):
        train_virtual(1, trained / "tiny.yaml", f"output={tmp_path / 'runs'}", resume=str(tmp_path / "net.h5"), steps=1)
    assert json.loads((_run(trained).path / MARKER).read_text())["format"] == "hpctrain-run"
