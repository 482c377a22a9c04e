"""`hpctrain submit`: with stand-ins for schedulers, and on this machine for real: trained, stopped, submitted again, finished."""

from __future__ import annotations

import os
import re
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.data.writer import write_data_file
from hpctrain_testing.run import clean_environment, find_mpiexec, wait_until
from tests.support import stand_ins
from tests.support.signal_storm import final_tensors, prepare, same_bits

pytestmark = pytest.mark.job

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with stand-ins for schedulers."""
    for name, value in stand_ins.install(tmp_path).items():
        if name in ("PATH", "CALLS", "HOME"):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data" / "fashion-mnist"
    data.mkdir(parents=True)
    for split in ("train", "test"):
        (data / f"{split}.h5").touch()
    monkeypatch.setattr("hpctrain.site.job._is_installed", lambda name: False)
    return tmp_path


def _submit(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["submit", *arguments])


def test_a_job_is_submitted_and_its_number_reported(folder: Path) -> None:
    result = _submit(CONFIG, "batch=32", "--auto", "--site=slurm", "--nodes=2", "--ranks-per-node", "4", "--account", "mine")
    assert result.exit_code == 0, result.output
    (call,) = stand_ins.calls(folder)
    script = Path(call[2])
    assert script.parent == Path("runs/jobs")
    first, second, *others = result.output.splitlines()
    assert (first, second) == ("job 12345 on slurm: 2 nodes with 4 ranks each", f"script: {script}")
    assert [line for line in others if line[0] != " "] == ["follow it:", "stop it with a checkpoint, without a restart:"]
    assert all(len(line) <= 80 for line in result.output.splitlines())
    text = script.read_text()
    assert f"TRAIN=({CONFIG} batch=32 --auto)\n" in text
    assert f"ENVIRONMENT={sys.prefix} " in text
    for line in ("--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=16", "--account=mine", "--time=06:00:00"):
        assert re.search(rf"^#SBATCH {line}( |$)", text, re.MULTILINE), line


def test_what_would_fail_after_the_queue_is_noted_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _submit(CONFIG, "--site", "slurm", "--dry-run").stderr == ""
    (folder / "data" / "fashion-mnist" / "test.h5").unlink()
    monkeypatch.setattr("hpctrain.site.job._is_installed", lambda name: True)
    missing, launcher = _submit(CONFIG, "--site", "slurm", "--dry-run").stderr.splitlines()
    assert missing.startswith("note: data/fashion-mnist/test.h5 does not exist on this host")
    assert "which srun starts only with --mpi=pmi2" in launcher
    assert (
        len(_submit(CONFIG, "--site", "perlmutter-cpu", "data.test=null", "--account", "m", "--dry-run").stderr.splitlines()) <= 1
    )
    assert _submit(CONFIG, "--site", "slurm", "data.train=synthetic", "data.test=null", "--dry-run").stderr.count("note:") == 1
    weights = _submit(CONFIG, "--site", "slurm", "data.test=null", "init.weights=w.safetensors", "--dry-run").stderr
    assert weights.startswith("note: w.safetensors does not exist on this host; the job fails unless it exists on the nodes")


def test_data_that_do_not_fit_each_other_are_refused_before_the_queue(folder: Path) -> None:
    """The job waited in the queue, and then ended at once."""
    for split, names in (("train", ["a", "b"]), ("test", ["a", "b", "c"])):
        content = [(np.zeros((2, 8, 8, 1), np.uint8), np.arange(2))]
        write_data_file(folder / f"{split}.h5", 2, (8, 8, 1), names, content)
    refused = _submit(CONFIG, "data.train=train.h5", "data.test=test.h5", "--site", "slurm")
    assert refused.exit_code == 2
    assert "test.h5 has other classes than train.h5" in refused.stderr
    assert not stand_ins.calls(folder)


def test_a_dry_run_prints_the_same_script_and_does_nothing(folder: Path) -> None:
    arguments = [CONFIG, "--site", "polaris", "--nodes", "10", "--account", "mine", "--queue", "prod", "--time", "2h"]
    printed = _submit(*arguments, "--dry-run")
    assert printed.exit_code == 0, printed.output
    assert not stand_ins.calls(folder)
    assert not Path("runs").exists()
    assert _submit(*arguments).exit_code == 0
    (written,) = Path("runs/jobs").glob("*.pbs")
    without_time = [re.sub(r"\d{8}-\d{6}", "", text) for text in (printed.output, written.read_text())]
    assert without_time[0] == without_time[1]


def test_a_max_time_of_the_configuration_is_kept(folder: Path) -> None:
    arguments = [CONFIG, "--site", "local", "--time", "1h", "--dry-run"]
    assert "max_time=$((" in _submit(*arguments).output
    assert "max_time=$((" not in _submit(*arguments, "max_time=30m").output


def test_restarts_doctor_and_stage_reach_the_script(folder: Path) -> None:
    Path("environment.tar").touch()
    text = _submit(CONFIG, "--site", "slurm", "--restarts", "3", "--no-doctor", "--stage", "environment.tar", "--dry-run").output
    for line in ("MOST_RESTARTS=3 ", "DOCTOR_SECONDS=0 ", "STAGE=environment.tar "):
        assert f"\n{line}" in text


def _wait(reached: Callable[[], bool], log: Path) -> None:
    wait_until(reached, 300, log.read_text)


def _started(*arguments: str) -> tuple[int, Path]:
    """Submit on this machine; the process and its log."""
    result = _submit("storm.yaml", *arguments, "--site", "local", "--ranks-per-node", "2", "--no-doctor")
    return _job_of(result)


def _job_of(result: Result) -> tuple[int, Path]:
    assert result.exit_code == 0, result.output
    match = re.search(r"job (\d+) on \w+.*\nscript: (\S+)\.sh", result.output)
    assert match is not None
    return int(match[1]), Path(f"{match[2]}.log")


@pytest.mark.slow
@pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec, neither next to this Python nor on PATH")
def test_a_training_on_this_machine_is_stopped_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    prepare(tmp_path, images=160, epochs=100)
    process, log = _started("output=whole")
    _wait(lambda: not Path(f"/proc/{process}").exists(), log)
    assert "stopped" not in log.read_text()
    process, log = _started("output=parts", "metrics.interval_seconds=0.1")
    _wait(lambda: log.exists() and "epoch 2/" in log.read_text(), log)
    os.kill(process, signal.SIGUSR1)
    _wait(lambda: not Path(f"/proc/{process}").exists(), log)
    assert "job script: stopped with a checkpoint; start it again to continue" in log.read_text()
    process, log = _started("output=parts", "metrics.interval_seconds=0.1")
    _wait(lambda: not Path(f"/proc/{process}").exists(), log)
    assert "resumed" in log.read_text()
    assert not list(Path("parts/jobs").glob(".stopped*"))
    assert same_bits(final_tensors(tmp_path, "whole"), final_tensors(tmp_path, "parts"))


@pytest.mark.slow
@pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec, neither next to this Python nor on PATH")
def test_a_training_on_hosts_of_a_file_uses_the_environment_that_is_unpacked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "disk"))
    prepare(tmp_path, images=160, epochs=1)
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\necho "unpacked in $(dirname "$0")"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with tarfile.open("environment.tar", "w") as tar:
        tar.add("environment", ".")
    Path("hosts").write_text("localhost\n")
    arguments = ["--site", "hostfile", "--hostfile", "hosts", "--ranks-per-node", "2", "--stage", "environment.tar"]
    process, log = _job_of(_submit("storm.yaml", *arguments, "--no-doctor"))
    _wait(lambda: not Path(f"/proc/{process}").exists(), log)
    text = log.read_text()
    assert text.count(f"unpacked in {tmp_path}/disk/hpctrain-{process}/bin") == 2
    assert not (tmp_path / "disk" / f"hpctrain-{process}").exists()
    final_tensors(tmp_path, "runs")
