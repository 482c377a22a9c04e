"""Standard streams that are closed before the program starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import clean_environment
from tests.support.signal_storm import prepare


@pytest.mark.job
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_run_with_closed_streams_trains_and_writes_into_no_file_of_its_own(tmp_path: Path, closed: str) -> None:
    prepare(tmp_path, images=64, epochs=1)
    command = f"exec {sys.executable} -m hpctrain train storm.yaml {closed}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert "Traceback" not in done.stderr
    assert list((run / "checkpoints").glob("*.h5"))


@pytest.mark.job
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_closed_descriptor_is_no_files(tmp_path: Path, stream: int) -> None:
    program = f"""
import os, sys
from hpctrain.launch.streams import open_closed_streams
open_closed_streams()
open_closed_streams()
with open({str(tmp_path / "file")!r}, "wb") as file:
    print("words", file=(sys.stderr, sys.stdout, sys.stderr)[{stream}])
    os.write(2, b"more")
    file.write(b"%d" % (file.fileno() > 2))
    sys.stdin.read()
"""
    way = "<&-" if stream == 0 else ">&-"
    done = subprocess.run(
        f'{sys.executable} -c "$PROGRAM" {stream}{way} </dev/null' if stream else f'{sys.executable} -c "$PROGRAM" 0<&-',
        shell=True,
        env=clean_environment({"PROGRAM": program}),
        timeout=60,
    )
    assert done.returncode == 0
    assert (tmp_path / "file").read_bytes() == b"1"
