"""`hpctrain compare` as users call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.compare import compare
from hpctrain.storage.hash_file import HashFile
from tests.support.written_runs import write_checkpoint, write_run


def test_two_runs_are_compared_on_80_columns(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, config=f"batch: {batch}\n") for batch in (8, 16)]
    for run in runs:
        write_checkpoint(run, 5, a=[1.0])
    done = CliRunner().invoke(compare, [str(run.path) for run in runs])
    assert done.exit_code == 0, done.output
    assert "batch  8" in done.output
    assert "the same bits as" in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def test_programs_get_json(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path).path) for _ in range(3)]
    done = CliRunner().invoke(compare, [*runs, "--json"])
    assert len(json.loads(done.output)["runs"]) == 3


def test_the_step_at_which_hashes_part_is_told_to_people_and_programs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path) for _ in range(2)]
    for run, last in zip(runs, "12", strict=True):
        file = HashFile(run.hashes_path)
        for step, digit in ((0, "0"), (10, "1"), (20, last)):
            file.append({"step": step, "epoch": 1, "all": digit * 16, "hashes": {"parameters/layer2.0.conv1.weight": digit * 16}})
    paths = [str(run.path) for run in runs]
    done = CliRunner().invoke(compare, paths)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert f"the same bits as {runs[0].path.name} up to step 10; first difference by step 20 in layer2.0.conv1.weight" in text
    assert max(map(len, done.output.splitlines())) <= 80
    (bits,) = json.loads(CliRunner().invoke(compare, [*paths, "--json"]).output)["bits"]
    assert (bits["step"], bits["same_step"], bits["by"]) == (20, 10, "hashes")
    assert bits["different"] == ["parameters/layer2.0.conv1.weight"]


def test_a_page_of_both_is_written_on_request(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")
    runs = [str(write_run(tmp_path).path) for _ in range(2)]
    done = CliRunner().invoke(compare, [*runs, "--out", str(tmp_path / "both.html")])
    assert done.exit_code == 0, done.output
    assert "both.html: 0." in done.output
    assert (tmp_path / "both.html").read_text().startswith("<!DOCTYPE html>")
