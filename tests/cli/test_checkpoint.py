"""`hpctrain checkpoint`: list, verify, show and prune; and no more checkpoints are kept than configured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.runs import directory
from hpctrain.runs.directory import BestRecord
from hpctrain.runs.owner import owned
from hpctrain.storage.checkpoint import SEQUENCE, CheckpointContent, checkpoint_path, parameter_key, read, write
from tests.support.runs import make_run


def _call(*words: str) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *words])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints after 1, 2 and 3 steps, written in this order."""
    for step in (1, 2, 3):
        tensors = {parameter_key("fc.weight"): np.full((3, 2), step, np.float32)}
        meta = {"global_step": step, "epoch": 0, "seed": 5, "config": "name: long\n" * 50, SEQUENCE: step}
        path = checkpoint_path(tmp_path / "checkpoints", step)
        write(path, CheckpointContent(tensors, meta))
        os.utime(path, (2e9 - step, 2e9 - step))  # clocks decide nothing
    return make_run(tmp_path, "name: long\n")


def _damage(run: Path, step: int) -> Path:
    path = checkpoint_path(run / "checkpoints", step)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def test_a_list_has_a_line_for_each(run: Path) -> None:
    for path in (run, run / "checkpoints"):
        lines = _call("list", str(path)).output.splitlines()
        assert [line.split()[1] for line in lines] == ["1", "2", "3"]
        assert lines[2].endswith("checkpoint-00000003.h5")
    assert len(_call("list", str(checkpoint_path(run / "checkpoints", 2))).output.splitlines()) == 1


def test_whole_ones_are_verified_and_damaged_ones_are_named(run: Path) -> None:
    result = _call("verify", str(run))
    assert (result.exit_code, result.output.count("all checksums of 1 tensor agree")) == (0, 3)
    damaged = _damage(run, 3)
    result = _call("verify", str(run))
    assert result.exit_code == 2
    assert str(damaged) in result.output
    whole = checkpoint_path(run / "checkpoints", 2)
    assert f"hpctrain: 1 of 3 checkpoints cannot be used; the newest complete one is {whole}." in result.output
    assert "no other checkpoint is left to resume from" in _call("verify", str(damaged)).output


def test_a_file_of_weights_is_not_called_damaged(tmp_path: Path) -> None:
    """Would find advice to distrust a good file."""
    file = tmp_path / "first.safetensors"
    file.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert f"{file} has weights only, but must be a checkpoint; give a run" in _call("show", str(file)).output.replace("\n", " ")


def test_position_and_tensors_are_shown(run: Path) -> None:
    text = _call("show", str(run)).output
    assert "checkpoint-00000003.h5" in text
    assert "global_step: 3\n" in text
    assert "  parameters/fc.weight  [3, 2] float32\n" in text
    assert text.endswith("1 tensor, 24 bytes\n")
    assert "name: long" not in text
    values = json.loads(_call("show", str(checkpoint_path(run / "checkpoints", 1)), "--json").output)
    assert values["meta"]["global_step"] == 1
    assert values["tensors"] == {"parameters/fc.weight": {"shape": [3, 2], "dtype": "float32"}}


def test_all_but_the_last_are_pruned(run: Path) -> None:
    result = _call("prune", str(run), "--keep", "1")
    assert (result.exit_code, result.output.count("deleted ")) == (0, 2)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-00000003.h5"]
    assert _call("prune", str(run), "--keep", "1").output == ""
    assert _call("prune", str(run)).exit_code == 2


@pytest.fixture
def best(run: Path) -> Path:
    """The checkpoint after 1 step, which the run says is the best."""
    directory.write_best(run / "checkpoints", BestRecord("checkpoint-00000001.h5", 1, 1, "top1", 0.5))
    return checkpoint_path(run / "checkpoints", 1)


def test_the_best_is_marked(run: Path, best: Path) -> None:
    for path in (run, best):
        (line,) = [line for line in _call("list", str(path)).output.splitlines() if "  best: " in line]
        assert line.endswith(f"  best: top1 50.00% after epoch 1  {best}")
    lines = _call("list", str(run)).output.splitlines()
    assert len({line.index(str(run)) for line in lines}) == 1, "the paths stand below each other"
    best.unlink()
    listed = _call("list", str(run))
    assert all(line.startswith("step ") for line in listed.stdout.splitlines()), "scripts read the table"
    assert listed.stderr.rstrip() == "the best checkpoint, checkpoint-00000001.h5 (top1 50.00% after epoch 1), no longer exists"


def test_the_best_is_pruned_on_request_only(run: Path, best: Path) -> None:
    result = _call("prune", str(run), "--keep", "1")
    assert (result.exit_code, result.output.count("deleted ")) == (0, 1)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        directory.BEST_RECORD,
        best.name,
        "checkpoint-00000003.h5",
    ]
    assert _call("prune", str(run), "--keep", "1", "--drop-best").output == f"deleted {best}\n"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-00000003.h5"]


def test_the_best_among_the_latest_is_pruned_by_no_request(run: Path, best: Path) -> None:
    content = read(best)
    write(best, CheckpointContent(content.tensors, {**content.meta, SEQUENCE: 4}))  # a run went back to before it
    assert _call("prune", str(run), "--keep", "1", "--drop-best").exit_code == 0
    assert directory.read_best(run / "checkpoints") is not None
    assert best.exists()


def test_a_run_that_is_written_to_is_not_pruned(run: Path) -> None:
    make_run(run, "name: a\n")
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    with owned(run, "hpctrain train"):
        refused = _call("prune", str(run), "--keep", "1")
        assert refused.exit_code == 2
        assert f"The run {run} is being written to by hpctrain train, process {os.getpid()} on " in refused.output
        assert _call("verify", str(run)).exit_code == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    assert _call("prune", str(run), "--keep", "1").exit_code == 0
