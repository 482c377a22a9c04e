"""Standard streams that are closed before the program starts, and what is said before it is ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.launch.streams import flush_to_reader
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


@pytest.mark.job
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_process_that_is_about_to_be_ended_waits_for_its_reader(stream: str) -> None:
    program = f"""
import os, sys
from hpctrain.launch.streams import flush_to_reader
sys.{stream}.write("words")
flush_to_reader(30.0)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-c", program], env=clean_environment(), **{stream: subprocess.PIPE}) as process:
        time.sleep(1.0)
        assert process.poll() is None  # nobody has read yet
        assert getattr(process, stream).read() == b"words"
        assert process.wait(timeout=20) == -9


def test_nobody_waits_longer_than_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    flush_to_reader(0.2)
    assert time.monotonic() - begin < 5.0


@pytest.mark.job
def test_characters_that_the_encoding_of_an_output_lacks_are_escapes() -> None:
    program = "from hpctrain.launch.streams import open_closed_streams as o; o(); print('caf\\xe9')"
    environ = clean_environment() | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "caf\\xe9\n"), done.stderr
