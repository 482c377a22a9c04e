"""Traces of an attempt: new checkpoints by name and time, the first finding of new flight records, and the node to blame."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.cli.run_traces import RunTraces
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import End, file_name, mark_end
from hpctrain.launch.supervisor import Traces
from hpctrain.storage.run_owner import SUPERVISOR, owned
from tests.support.unmarked_run import make_unmarked


def _run(output: Path, stamp: str, name: str = "a") -> Path:
    return make_unmarked(output / f"{name}-{stamp}", f"name: {name}\n")


def _checkpoint(run: Path, step: int, suffix: str = ".h5", written: int = 0) -> Path:
    path = run / "checkpoints" / f"checkpoint-{step:08d}{suffix}"
    path.touch()
    if written:
        os.utime(path, ns=(written, written))
    return path


def _record(run: Path, job: int, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...], killed: int | None = None) -> None:
    """Flight records of one rank for each host; one of them was killed in step 7."""
    for rank, host in enumerate(hosts):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        recorder = FlightRecorder()
        recorder.join(rank, len(hosts), job, 10.0)
        recorder.keep_in(run / "flight")
        recorder.step(1, 7)
        recorder.phase("a training step")
        if killed is None:
            recorder.ended(End.FINISHED)
        elif rank == killed:
            mark_end(run / "flight" / file_name(rank), 9)


def test_what_was_there_before_is_none_of_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path, "20260101-120000")
    _checkpoint(run, 5)
    _record(run, 1, monkeypatch, ("n1", "n2"), killed=1)
    traces = RunTraces(tmp_path, "a")
    assert traces.look() == Traces()


def test_the_newest_checkpoint_that_was_written_counts(tmp_path: Path) -> None:
    old = _run(tmp_path, "20260101-120000")
    _checkpoint(old, 50)
    traces = RunTraces(tmp_path, "a")
    run = _run(tmp_path, "20260102-120000")
    _checkpoint(run, 3, written=2_000_000_000)
    newest = _checkpoint(run, 6, written=3_000_000_000)
    _checkpoint(run, 9, suffix=".h5.partial")
    _checkpoint(run, 9, suffix="-set-aside.h5")
    _checkpoint(_run(tmp_path, "20260103-120000", name="other"), 70)
    assert traces.look() == Traces(run, newest, 6)
    assert traces.look() == Traces()
    shards = _checkpoint(run, 12, suffix=".shards", written=3_500_000_000)
    _checkpoint(run, 15, suffix=".shards.12ab34cd.partial")
    _checkpoint(run, 15, suffix="-set-aside.shards")
    assert traces.look() == Traces(run, shards, 12)
    again = _checkpoint(run, 3, written=4_000_000_000)  # a run that went on from before, and came by here once more
    assert traces.look() == Traces(run, again, 3)


def test_runs_of_other_jobs_are_none_of_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = RunTraces(tmp_path, "a", "here")
    runs = {who: _run(tmp_path, f"2026010{number}-120000") for number, who in enumerate(("here", "elsewhere"), 1)}
    for written, (who, run) in enumerate(runs.items(), 2):
        monkeypatch.setenv(SUPERVISOR, who)
        with owned(run, "hpctrain train"):
            newest = _checkpoint(run, 10 * written, written=written * 1_000_000_000)
    assert newest.parent.parent == runs["elsewhere"]
    assert traces.look().run == runs["here"]
    monkeypatch.delenv(SUPERVISOR)
    with owned(runs["here"], "hpctrain train"):
        _checkpoint(runs["here"], 50, written=9_000_000_000)
        assert traces.look() == Traces()  # of a job that lives, when the attempt is over


@pytest.mark.parametrize(("hosts", "node"), [(("n1.site.org", "n2.site.org", "n1.site.org"), "n2"), (("n2", "n2", "n2"), "")])
def test_the_first_finding_and_the_node_of_who_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...], node: str
) -> None:
    """Where all ranks are on one node there is no other to go to."""
    traces = RunTraces(tmp_path, "a")
    run = _run(tmp_path, "20260102-120000")
    _record(run, 5, monkeypatch, hosts, killed=1)
    assert traces.look() == Traces(None, None, 7, "Rank 1 was ended by SIGKILL (a training step, step 7).", node)
    assert traces.look() == Traces()
    _record(run, 6, monkeypatch, hosts)
    assert traces.look() == Traces(None, None, 7, "The job finished: ranks 0-2 ended in good order.", "")


def test_the_node_of_a_damaged_rank_is_to_blame_for_the_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, run = RunTraces(tmp_path, "a"), _run(tmp_path, "20260102-120000")
    for rank, host in enumerate(("n1", "n2", "n3")):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        recorder = FlightRecorder()
        recorder.join(rank, 3, 5, 10.0)
        recorder.keep_in(run / "flight")
        recorder.ended(End.FAILED, "Rank 2 holds other bits.", (2,))
    look = traces.look()
    assert look.node == "n3"
    assert look.finding == "Ranks 0-2 failed first, because of rank 2: Rank 2 holds other bits (its start)."


def test_records_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    traces = RunTraces(tmp_path, "a")
    run = _run(tmp_path, "20260102-120000")
    (run / "flight").mkdir()
    (run / "flight" / file_name(0)).write_text("torn")
    assert traces.look() == Traces()
