"""`hpctrain watch`: follows a run until it ends, however it does, and writes nothing to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.storage.run_directory import RunDirectory, runs
from tests.support.jobs import clean_environment

_CONFIG = """
name: tiny
backend: numpy
progress: test
threads: 1
model: {name: small, channels: [4, 6], hidden: 9}
data: {train: synthetic, test: synthetic, synthetic: {height: 9, width: 9, samples: 64, test_samples: 16, classes: 3}}
batch: 8
epochs: EPOCHS
optimizer: {name: sgd, lr: 0.01}
schedule: constant
checkpoint: {every_epochs: 1}
metrics: {interval_seconds: 0.1}
deadline_seconds: 60
"""


_ANY_TIME = re.compile(r"[\d.:]+( s)? ago")


@pytest.fixture
def training(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A training of one rank below the test's directory, which has begun."""
    (tmp_path / "tiny.yaml").write_text(_CONFIG.replace("EPOCHS", str(request.param)))
    command = [sys.executable, "-m", "hpctrain", "train", "tiny.yaml"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            begun = list(runs(tmp_path / "runs", None))
            if begun and any((begun[0].path / "flight").glob("*.flight")) and begun[0].metrics_path.exists():
                break
            time.sleep(0.05)
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _run(folder: Path) -> RunDirectory:
    return next(iter(runs(folder / "runs", None)))


def _watch(folder: Path, *words: str) -> str:
    result = CliRunner().invoke(cli, ["watch", "--runs", str(folder / "runs"), "--interval", "0.1", *words])
    assert result.exit_code == 0, result.output
    return result.output


def _files(run: RunDirectory) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}


@pytest.mark.job
@pytest.mark.parametrize("training", [3], indirect=True)
def test_it_follows_until_the_run_has_finished_and_writes_nothing(training, tmp_path: Path) -> None:
    output = _watch(tmp_path)
    assert "training begins" in output
    assert "epoch 3  step 24  test loss" in output
    assert "  finished\n" in output
    assert training.wait(30) == 0
    before = _files(_run(tmp_path))
    once = _watch(tmp_path, "--once")
    assert _ANY_TIME.sub("", once).strip() in _ANY_TIME.sub("", output)
    assert max(map(len, once.splitlines())) <= 80
    assert _files(_run(tmp_path)) == before


@pytest.mark.job
@pytest.mark.parametrize("training", [100_000], indirect=True)
@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGTERM, "stopped by SIGTERM after step "), (signal.SIGKILL, "was ended by SIGKILL")]
)
def test_it_ends_where_the_run_is_stopped_or_killed(training, tmp_path: Path, number: int, end: str) -> None:
    assert "running (" in _watch(tmp_path, "--once")
    _signal_rank(training.pid, number)
    assert end in " ".join(_watch(tmp_path).split())
    training.wait(30)


def _signal_rank(process: int, number: int) -> None:
    """Signal the rank: the only child of its keeper, or the process itself where it has none."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    os.kill(int(children[0]) if children and number == signal.SIGKILL else process, number)
