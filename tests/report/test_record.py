"""A run's directory as a report reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import CheckpointError, DataError
from hpctrain.report.record import read_runs
from hpctrain.storage import best_record
from hpctrain.storage.best_record import BestRecord
from tests.support.written_runs import write_checkpoint, write_run, write_trace


def test_all_that_a_run_has_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path, config="batch: 8\ndata: {augment: [{name: flip}], sizes: [1, 2]}\ntest: null\n")
    write_checkpoint(run, 10, w=[1.0])
    best = write_checkpoint(run, 20, w=[2.0])
    best_record.write(run.checkpoints, BestRecord(best.name, 20, 2, "top1", 0.5))
    write_trace(run, ranks=3)
    (record,) = read_runs([run.path])
    assert record.name == run.path.name
    assert record.settings == {"batch": "8", "data.augment.0.name": "flip", "data.sizes": "[1, 2]", "test": "null"}
    assert record.versions == {"numpy": "2.4", "mpi": "MPICH", "revision": "abc"}
    assert [(stored.step, bool(stored.best)) for stored in record.checkpoints] == [(10, False), (20, True)]
    assert record.checkpoints[0].megabytes > 0.0
    assert len(record.tables) == 4
    assert record.trace == run.path / "trace.json"


def test_a_run_that_has_only_begun_is_one(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for name in ("metrics.jsonl", "versions.json", "git.json"):
        (run.path / name).unlink()
    (run.path / "time_table.json").write_text('{"table": ')
    (record,) = read_runs([run.path])
    assert (record.state.records, record.versions, record.checkpoints, record.tables, record.trace) == ((), {}, (), (), None)


def test_changes_of_the_source_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run.path / "git.json").write_text('{"revision": "abc", "dirty": true}')
    assert read_runs([run.path])[0].versions["revision"] == "abc with changes"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no run directory"):
        read_runs([tmp_path])
    run = write_run(tmp_path)
    with pytest.raises(DataError, match="is given twice"):
        read_runs([run.path, run.path / ".." / run.path.name])
    (run.path / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml cannot be read"):
        read_runs([run.path])
