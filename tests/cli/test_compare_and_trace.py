"""`hpctrain compare` and `trace`, and what a supervisor reads from the files of an attempt."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.cli.runs import compare
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import file_name, mark_end
from hpctrain.launch.process_end import End
from hpctrain.launch.supervisor import AttemptOutcome
from hpctrain.runs.attempts import RunTraces
from hpctrain.runs.owner import SUPERVISOR, owned
from hpctrain.runs.records import HashFile
from hpctrain.trace.time_table import Late, Row, TimeTable, from_json
from hpctrain.trace.time_table_text import lines
from tests.support.runs import make_run, write_checkpoint, write_run, write_trace


def test_two_runs_are_compared_on_80_columns(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, config=f"batch: {batch}\n") for batch in (8, 16)]
    for run in runs:
        write_checkpoint(run, 5, a=[1.0])
    done = CliRunner().invoke(compare, [str(run.path) for run in runs])
    assert done.exit_code == 0, done.output
    assert "  batch  1: 8; 2: 16" in done.output
    assert "the same bits as" in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def test_commands_that_read_a_run_take_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # other processes start and end meanwhile
    runs = [write_run(tmp_path / "runs") for _ in range(3)]
    older, old, new = (run.path.name for run in runs)
    file = write_checkpoint(runs[2], 5, a=[1.0])
    write_trace(runs[2])
    _record(runs[2].path, 1, monkeypatch, ("n1",))
    calls = [
        *(("checkpoint", command) for command in ("list", "show", "verify")),
        *(("watch", "--once"), ("report",), ("compare",), ("trace",), ("autopsy",)),
    ]
    for call in calls:
        done = CliRunner().invoke(cli, call)
        assert done.exit_code == 0, done.output
        assert new in done.output, call
        assert older not in done.output.replace(old, "").replace(new, ""), call
    assert f"1: {old}\n2: {new}\n" in CliRunner().invoke(cli, ["compare"]).output
    write_run(tmp_path / "runs")  # without a checkpoint
    assert file.name in CliRunner().invoke(cli, ["checkpoint", "list"]).output


def test_the_step_at_which_hashes_part_is_reported_to_people_and_programs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path) for _ in range(2)]
    for run, last in zip(runs, "12", strict=True):
        file = HashFile(run.hashes_path)
        for step, digit in ((0, "0"), (10, "1"), (20, last)):
            file.append({"step": step, "epoch": 1, "all": digit * 16, "hashes": {"parameters/layer2.0.conv1.weight": digit * 16}})
    paths = [str(run.path) for run in runs]
    done = CliRunner().invoke(compare, paths)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "other bits than run 1 at step 20 in 1 tensor, layer2.0.conv1.weight first, and the same up to step 10" in text
    assert max(map(len, done.output.splitlines())) <= 80
    (bits,) = json.loads(CliRunner().invoke(compare, [*paths, "--json"]).output)["bits"]
    assert (bits["step"], bits["same_step"], bits["by"]) == (20, 10, "hashes")
    assert bits["different"] == ["parameters/layer2.0.conv1.weight"]


ROWS = tuple(Row(f"layer{k}", "layer", compute_seconds=1e-3 * (k + 1), late=Late(1, 0.5, 2e-3)) for k in range(150))

WHOLE = sum(row.compute_seconds for row in ROWS)

TABLE = TimeTable(ROWS, Row("total", "total", compute_seconds=WHOLE), 0.0, WHOLE, WHOLE, 5, 10.0)


def _trace(run: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["trace", str(run), *words])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    content = {"ranks": 2, "clock_error_seconds": 1e-6, "table": asdict(TABLE)}
    (tmp_path / "time_table.json").write_text(json.dumps(content))
    return tmp_path


def test_a_table_is_the_same_after_it_was_a_file() -> None:
    assert from_json(json.loads(json.dumps(asdict(TABLE)))) == TABLE


def test_trace_prints_a_screen_or_all(run: Path) -> None:
    assert _trace(run).output.splitlines() == lines(TABLE, 1e-6, 2)
    assert "and 1" in _trace(run).output
    whole = _trace(run, "--all").output.splitlines()
    assert whole == lines(TABLE, 1e-6, 2, most=None)
    assert sum(line.startswith("layer") for line in whole) == 151


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"table": {"rows": [{"name": 1}]}, "ranks": 1, "clock_error_seconds": 0}'])
def test_a_file_that_is_no_table_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "time_table.json").write_text(text)
    result = _trace(tmp_path)
    assert (result.exit_code, "is not a time table of this version" in result.stderr) == (2, True)


def test_a_table_that_cannot_be_read_is_not_called_another_version(run: Path) -> None:
    os.truncate(run / "time_table.json", (1 << 31) + 1)
    assert "time_table.json cannot be used: it has more than 2,147,483,648 bytes" in _trace(run).stderr


def _run(output: Path, stamp: str, name: str = "a") -> Path:
    return make_run(output / f"{name}-{stamp}", f"name: {name}\n")


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
    assert traces.look() == AttemptOutcome()


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
    assert traces.look() == AttemptOutcome(run, newest, 6)
    assert traces.look() == AttemptOutcome()
    shards = _checkpoint(run, 12, suffix=".shards", written=3_500_000_000)
    _checkpoint(run, 15, suffix=".shards.12ab34cd.partial")
    _checkpoint(run, 15, suffix="-set-aside.shards")
    assert traces.look() == AttemptOutcome(run, shards, 12)
    again = _checkpoint(run, 3, written=4_000_000_000)  # a run that went on from before, and came by here once more
    assert traces.look() == AttemptOutcome(run, again, 3)


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
        assert traces.look() == AttemptOutcome()  # of a job that lives, when the attempt is over


@pytest.mark.parametrize(("hosts", "node"), [(("n1.site.org", "n2.site.org", "n1.site.org"), "n2"), (("n2", "n2", "n2"), "")])
def test_the_first_finding_and_the_node_of_who_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...], node: str
) -> None:
    """Where all ranks are on one node there is no other to go to."""
    traces = RunTraces(tmp_path, "a")
    run = _run(tmp_path, "20260102-120000")
    _record(run, 5, monkeypatch, hosts, killed=1)
    assert traces.look() == AttemptOutcome(None, None, 7, "Rank 1 was ended by SIGKILL (a training step, step 7).", node)
    assert traces.look() == AttemptOutcome()
    _record(run, 6, monkeypatch, hosts)
    assert traces.look() == AttemptOutcome(None, None, 7, "The job finished: ranks 0-2 ended normally.", "")


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
    assert traces.look() == AttemptOutcome()
