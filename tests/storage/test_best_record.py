"""The record of the best checkpoint: there and back, found by the name of a run, and sentences where it names nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import CheckpointError
from hpctrain.launch import process_mark
from hpctrain.storage import best_record
from hpctrain.storage.best_record import BestRecord
from hpctrain.storage.run_directory import RunDirectory

BEST = BestRecord("checkpoint-00000035.h5", 35, 7, "top1", 0.9193)


@given(
    epoch=st.integers(0, 10**6), measure=st.sampled_from(["top1", "top5", "loss"]), value=st.floats(allow_nan=False, min_value=0)
)
def test_it_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, epoch: int, measure: str, value: float
) -> None:
    directory = tmp_path_factory.mktemp("best")
    best = BestRecord("checkpoint-00000035.h5", 35, epoch, measure, value)
    best_record.write(directory, best)
    assert best_record.read(directory) == best
    best_record.write(directory, None)
    assert best_record.read(directory) is None
    assert list(directory.iterdir()) == []


def test_it_is_told_in_a_few_words() -> None:
    assert str(BEST) == "top1 91.93% after epoch 7"
    assert str(BestRecord("checkpoint-00000035.h5", 35, 7, "loss", 0.25)) == "loss 0.2500 after epoch 7"


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    best_record.write(tmp_path, BEST)
    before = os.stat(tmp_path / best_record.NAME).st_ino
    dead = replace(process_mark.own(), begun="1")
    (tmp_path / f"{best_record.NAME}.1.{dead}.partial").write_text("as a kill leaves it")
    best_record.write(tmp_path, BestRecord(**vars(BEST)))
    assert [path.name for path in tmp_path.iterdir()] == [best_record.NAME]
    assert os.stat(tmp_path / best_record.NAME).st_ino == before


@pytest.mark.parametrize("text", ["", "[1]", '{"step": 3}', "\udcff"])
def test_another_file_of_that_name_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / best_record.NAME).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"best\.json is no record of a best checkpoint"):
        best_record.read(tmp_path)
    best_record.write(tmp_path, BEST)
    assert best_record.read(tmp_path) == BEST


def _run(output: Path) -> RunDirectory:
    return RunDirectory.create(output, "tiny", config="name: tiny\n", versions={}, git={})


def test_the_newest_run_that_has_one_counts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No run of 'tiny' in .* has a best checkpoint"):
        best_record.find(tmp_path, "tiny")
    older = _run(tmp_path)
    _run(tmp_path)
    with pytest.raises(CheckpointError, match="No run of 'tiny'"):
        best_record.find(tmp_path, "tiny")
    best_record.write(older.checkpoints, BEST)
    with pytest.raises(CheckpointError, match=r"checkpoint-00000035\.h5 \(top1 91\.93% after epoch 7\), is not there any more"):
        best_record.find(tmp_path, "tiny")
    path = older.checkpoints / BEST.checkpoint
    path.write_bytes(b"")
    assert best_record.find(tmp_path, "tiny") == path
