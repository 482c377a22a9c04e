"""Curves of fine-tuning: what is collected from directories, and how trainers are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import finetune
from benchmarks.finetune import OURS, PEER, RANDOM
from tests.support.unmarked_run import make_unmarked


def write(directory: Path, accuracies: list[float]) -> None:
    make_unmarked(directory, "name: some\n")
    records = [{"kind": "evaluation", "epoch": epoch + 1, "top1": value} for epoch, value in enumerate(accuracies)]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def test_only_trainings_that_are_through_are_collected_and_pairs_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "work" / f"{OURS}-1" / "some-20260101-000000", [0.5, 0.75])
    write(tmp_path / "work" / f"{OURS}-2" / "some-20260101-000000", [0.5, 0.8])
    write(tmp_path / "work" / f"{PEER}-1", [0.25, 0.5])
    write(tmp_path / "work" / f"{PEER}-2", [0.25])
    write(tmp_path / "work" / f"{RANDOM}-1" / "some-20260101-000000", [0.125, 0.25])
    out = tmp_path / "finetune.json"
    assert finetune.main(["--work", str(tmp_path / "work"), "--out", str(out), "--note", "a test"]) == 0
    stored = json.loads(out.read_text())
    assert stored["conditions"] == "a test"
    assert stored["test_accuracy_by_epoch"] == {
        OURS: {"1": [0.5, 0.75], "2": [0.5, 0.8]},
        PEER: {"1": [0.25, 0.5]},
        RANDOM: {"1": [0.125, 0.25]},
    }
    assert finetune.differences(stored["test_accuracy_by_epoch"]) == [0.25]
    assert "in 1 pair, mean: +25.00 points" in capsys.readouterr().out


@pytest.mark.parametrize("who", [OURS, PEER, RANDOM])
def test_all_trainers_get_the_same_configuration(who: str) -> None:
    words = finetune.command(who, "file.yaml", ["batch=8"], 3, Path("there"))
    assert {"file.yaml", "batch=8", "seed=3"} <= set(words)
    assert ("init={}" in words) == (who == RANDOM)
