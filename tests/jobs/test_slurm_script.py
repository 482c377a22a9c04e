"""`jobs/slurm.sbatch` without Slurm: what it gives to srun, and how it ends. `make slurm` runs it on a real one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import format as data_format
from tests.support.jobs import clean_environment, find_mpiexec

pytestmark = pytest.mark.job

SCRIPT = Path(__file__).parents[2] / "jobs" / "slurm.sbatch"

CONFIG = """
name: tiny
seed: 7
backend: numpy
model: {name: small, channels: [4, 6], hidden: 9}
data: {train: train.h5}
batch: 12
epochs: 2
optimizer: {name: sgd, lr: 0.01}
schedule: constant
deadline_seconds: 30
"""

# Tells what it was given, then is replaced by what the test wants in its place.
_SRUN = """
#!/bin/bash
printf '%s\\n' "$@" > srun.arguments
echo "SRUN_CPUS_PER_TASK=$SRUN_CPUS_PER_TASK" >> srun.arguments
while [ "${1#-}" != "$1" ]; do shift; done
exec BEHAVIOUR "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with commands of its own, a configuration and 24 images: 2 steps per epoch."""
    (tmp_path / "bin").mkdir()
    _command(tmp_path, "python", f'#!/bin/bash\nexec {sys.executable} "$@"')
    _command(tmp_path, "scontrol", '#!/bin/bash\necho "$@" > scontrol.arguments')
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (24, 9, 8, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 24, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 24))])
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def _command(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(textwrap.dedent(text).lstrip())
    path.chmod(0o755)


def _submit(folder: Path, *arguments: str, srun: str, edits: dict[str, str] | None = None, **environ: str) -> tuple[int, str]:
    """Run the script as sbatch would; its exit code and what it printed.

    Args:
        srun: runs in its place, with the ranks' command behind it. edits: lines of the script and what they become.
    """
    text = SCRIPT.read_text()
    for line, edited in (edits or {}).items():
        assert text.count(line) == 1, line
        text = text.replace(line, edited)
    (folder / "script").write_text(text)
    _command(folder, "srun", _SRUN.replace("BEHAVIOUR", srun))
    environment = clean_environment({"SLURM_JOB_ID": "7", **environ})
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    command = ["bash", "script", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


def _given(folder: Path) -> list[str]:
    return (folder / "srun.arguments").read_text().splitlines()


def test_srun_gets_the_cores_of_a_rank_and_the_command(folder: Path) -> None:
    code, output = _submit(folder, "tiny.yaml", "batch=8", "name=a b", srun="true", SLURM_CPUS_PER_TASK="6")
    assert (code, output) == (0, "")
    assert _given(folder) == [
        "--cpu-bind=cores",
        *("python", "-m", "mpi4py", "-m", "hpctrain", "train", "tiny.yaml", "--resume", "auto", "batch=8", "name=a b"),
        "SRUN_CPUS_PER_TASK=6",
    ]


def test_the_mpi_is_one_edit(folder: Path) -> None:
    _submit(folder, "tiny.yaml", srun="true", edits={'MPI=""': "MPI=pmi2"})
    assert _given(folder)[:2] == ["--mpi=pmi2", "--cpu-bind=cores"]
    assert _given(folder)[-1] == "SRUN_CPUS_PER_TASK=1"


def test_a_configuration_must_be_given(folder: Path) -> None:
    code, output = _submit(folder, srun="true")
    assert code != 0
    assert "usage: sbatch jobs/slurm.sbatch CONFIG [OVERRIDE ...]" in output
    assert not (folder / "srun.arguments").exists()


@pytest.mark.parametrize("status", [0, 1, 2, 85, 124, 137])
@pytest.mark.parametrize("requeue", ["no", "yes"])
def test_the_job_ends_as_the_ranks_do_and_only_a_stopped_one_is_queued_again(folder: Path, status: int, requeue: str) -> None:
    edits = {"REQUEUE=no": f"REQUEUE={requeue}"}
    code, _ = _submit(folder, "tiny.yaml", srun=f"bash -c 'exit {status}'", edits=edits)
    assert code == status
    asked = folder / "scontrol.arguments"
    assert asked.exists() == (status == 85 and requeue == "yes")
    assert not asked.exists() or asked.read_text() == "requeue 7\n"


@pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec, neither beside this Python nor on PATH")
def test_a_second_submission_goes_on_where_the_first_one_ended(folder: Path) -> None:
    """Beside a run whose name only begins like this one's, and with an output of its own."""
    srun = f"{find_mpiexec()} -n 2"
    code, output = _submit(folder, "tiny.yaml", "name=tiny-other", "epochs=3", "output=elsewhere", srun=srun)
    assert code == 0, output
    first, second = (_submit(folder, "tiny.yaml", "output=elsewhere", *more, srun=srun) for more in (["--steps", "1"], []))
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert "resumed" not in first[1]
    assert "resumed" in second[1]
    runs = sorted(path.name for path in (folder / "elsewhere").iterdir())
    assert [name.rsplit("-", 2)[0] for name in runs] == ["tiny", "tiny-other"]


def test_the_script_is_sound() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.R_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
