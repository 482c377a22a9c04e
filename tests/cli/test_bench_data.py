"""`hpctrain bench data`: a table of 80 columns, the same figures as JSON, and a sentence for each number of threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.bench import data as measurement
from hpctrain.bench.data import AUGMENT, NORMALISE, READ, WHOLE, DataRates, StageRate
from hpctrain.cli.bench_data import table
from hpctrain.cli.main import cli

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
FEW = ["data=synthetic", "data.synthetic.samples=40", "batch=8", "data.augment=[flip]", "--threads", "1,2"]


def _rates(*threads: int) -> DataRates:
    stages = [StageRate(READ, 1, 1234567.0, 0.0)]
    stages += [StageRate(stage, count, 1000.0 * count, 0.0) for stage in (AUGMENT, NORMALISE, WHOLE) for count in threads]
    return DataRates(64, (256, 256, 3), True, tuple(stages), "resnet50", None, 1)


def test_numbers_of_threads_that_find_no_room_stand_below() -> None:
    lines = table(_rates(1, 2, 4, 8, 16, 32, 128))
    assert max(map(len, lines)) <= 80
    assert lines[:3] == [
        "images/s, in batches of 64 images of 256 x 256 x 3",
        "stage               1 thread   2 threads   4 threads   8 threads  16 threads",
        "read, decode       1,234,567   1,234,567   1,234,567   1,234,567   1,234,567",
    ]
    assert lines[6:8] == ["stage             32 threads 128 threads", "read, decode       1,234,567   1,234,567"]
    assert len(lines) == 11


def test_figures_are_printed_written_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_LEAST_SECONDS", 1e-4)
    out = tmp_path / "data.json"
    done = CliRunner().invoke(cli, ["bench", "data", CONFIG, *FEW, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[0] for line in lines[1:6]] == ["stage", "read", "augment", "normalise", "whole batches"]
    written = json.loads(out.read_text())
    assert (written["images"], written["model"], len(written["stages"])) == (8, "small", 7)
    assert written["needed"] > 0
    assert " ".join(line.strip() for line in lines[6:]) == " ".join(written["sentences"])


def test_json_alone_is_printed_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_LEAST_SECONDS", 1e-4)
    done = CliRunner().invoke(cli, ["bench", "data", CONFIG, *FEW, "--no-step", "--json"], catch_exceptions=False)
    content = json.loads(done.output)
    assert content["needed"] is None
    assert [sentence.split(":")[0].endswith("takes longest") for sentence in content["sentences"]] == [True, True]
