"""A run directory without room in the middle of a run: the training goes on, and says what is missing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import Fault, prepare, run_fault

pytestmark = [pytest.mark.job, pytest.mark.slow]

# Rank 0 fills the disk before step 2 of 4, and maybe makes room again before step 4.
_FILL = """
def fill(run, self, *rest):
    import glob
    with open(glob.glob("runs/*/metrics.jsonl")[0], "ab") as metrics:  # up to the end of its page, where there would be room
        metrics.write(b'{"kind": "page"}'.ljust(-metrics.tell() % 4096 + 4096 - 1) + b"\\n")
    with open("runs/filler", "wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return run(self, *rest)
once(TrainingStep, "run", fill, in_step_2)
"""
_EMPTY = """
def empty(run, self, *rest):
    os.unlink("runs/filler")
    return run(self, *rest)
once(TrainingStep, "run", empty, lambda self, batch, step, lr: step == 3)
"""
_OVERRIDES = ("checkpoint.every_epochs=0", "metrics.interval_seconds=0.0001", "trace=true", "deadline_seconds=100")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder whose `runs` is a disk of 2 MB; skips where this user may mount none."""
    prepare(tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "hpctrain-test", runs], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", runs], check=True)


def metrics(folder: Path) -> list[dict]:
    [path] = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_a_run_without_room_trains_to_its_end(small_disk: Path) -> None:
    with_tensorboard = () if not _has_tensorboard() else ("metrics.tensorboard=true",)
    outcome = run_fault(Fault("full", _FILL, (), ranks=(0,), overrides=(*_OVERRIDES, *with_tensorboard)), small_disk)
    assert outcome.code == 0, outcome.output
    errors = outcome.stderr
    assert "Traceback" not in errors
    assert errors.count("The metrics cannot be written (No space left on device); the run goes on and will try again.") == 1
    assert "lines of the metrics could not be written (No space left on device) and are lost." in errors
    assert "was not kept (No space left on device)" in outcome.stdout  # the trace
    assert "test accuracy" in outcome.stdout
    assert "epoch 2/2: train loss" in outcome.stdout
    assert not list(small_disk.glob("runs/*/trace.json"))
    os.unlink(small_disk / "runs" / "filler")
    assert {record["kind"] for record in metrics(small_disk)} == {"progress", "start", "page"}  # what was written before


def test_what_finds_room_later_is_complete(small_disk: Path) -> None:
    outcome = run_fault(Fault("full", _FILL + _EMPTY, (), ranks=(0,), overrides=_OVERRIDES), small_disk)
    assert outcome.code == 0, outcome.output
    assert "The metrics can be written again." in outcome.stderr
    assert "lost" not in outcome.stderr
    assert [record["step"] for record in metrics(small_disk) if record["kind"] == "interval"] == [1, 2, 3, 4]
    assert list(small_disk.glob("runs/*/trace.json"))


def test_no_room_for_flight_records_is_told(small_disk: Path) -> None:
    """Room for them is taken at the start, so that a full disk is no SIGBUS later."""
    directory, flight, heard = _directory(small_disk / "runs"), FlightRecorder(), Heard()
    with open(small_disk / "runs" / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    keep(_session(flight, "run"), directory, heard)
    assert flight.directory is None
    assert heard.lines[0].startswith("no flight records: ")
    assert "cannot be written (No space left on device)" in heard.lines[0]


def _has_tensorboard() -> bool:
    try:
        import tensorboardX  # noqa: F401
    except ImportError:
        return False
    return True
