"""Standard output on a full disk: a run goes on, and says so once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.launch.output_file import ForgivingFile
from tests.support.jobs import clean_environment
from tests.support.signal_storm import prepare


def test_what_can_be_written_is(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    assert ForgivingFile(descriptor).write(b"words") == 5
    os.close(descriptor)
    assert (tmp_path / "out").read_bytes() == b"words"


def test_other_errors_stay_errors() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        ForgivingFile(writer).write(b"words")
    os.close(writer)


@pytest.mark.job
@pytest.mark.slow
def test_a_run_whose_output_finds_no_room_trains_on(tmp_path: Path) -> None:
    prepare(tmp_path, images=64, epochs=1)
    command = f"exec {sys.executable} -m hpctrain train storm.yaml >/dev/full"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the standard output cannot be written (No space left on device); the run goes on") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("runs/*/checkpoints/*.h5"))
