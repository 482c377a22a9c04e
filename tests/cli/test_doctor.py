"""`hpctrain doctor` as users start it: no finding in a sound environment, and the fix for each broken one.

Nodes with unlike files are made up in tests/doctor; all else is staged for real processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpctrain.process.ends import USER_ERROR
from hpctrain_testing.run import Outcome, clean_environment, find_mpiexec
from tests.cli.test_starting import folder as folder
from tests.support.doctored import python_path
from tests.support.tiny_runs import sentence

pytestmark = [pytest.mark.job, pytest.mark.slow]

Job = Callable[..., Outcome]
DOCTOR = ("-m", "hpctrain", "doctor")

# As where MPI_Init of Cray's MPICH finds no GTL: it ends the process when mpi4py.MPI is imported.
_NO_GTL = """
import os, sys

class Crash:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI" and "--mpi-lib-version" not in sys.argv:
            os.write(2, b"MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked\\n")
            os._exit(255)

sys.meta_path.insert(0, Crash())
"""
_SLOW = "import time\ntime.sleep(6)\n"


def findings(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """The findings that are not well, by kind, from `--json`."""
    content = json.loads(outcome.stdout)
    assert content["exit_code"] == outcome.code
    return {finding["key"]: finding for finding in content["findings"] if finding["key"]}


def examined(job: Job, folder: Path, *words: str, ranks: int = 0, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The findings of a job that ends by itself, with code 0 or 2 and no traceback."""
    outcome = job(ranks, [*DOCTOR, *words, "--json"], cwd=folder, env=env, timeout_seconds=150)
    assert outcome.code in (0, USER_ERROR), outcome.output
    assert "Traceback" not in outcome.output
    return findings(outcome)


def test_a_job_without_faults_fits_one_screen(job: Job, folder: Path) -> None:
    outcome = job(2, [*DOCTOR, "tiny.yaml"], cwd=folder, timeout_seconds=150)
    assert outcome.code == 0, outcome.output
    lines = outcome.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.split()[:1] != ["fix"] for line in lines) <= 24, "on a busy machine there are lines that fix a slow start"
    words = " ".join(outcome.stdout.split())
    assert "launcher ok 2 ranks on 1 node" in words
    assert "training ok Grid 1 x 2; 2 data files, the same on all ranks." in words
    assert "A training would run" in words
    assert "fault " not in words
    assert not (folder / "runs").exists(), "nothing is left"
    assert not list(folder.glob(".hpctrain*"))


def test_one_process_says_that_it_is_alone(job: Job, folder: Path) -> None:
    found = examined(job, folder)
    assert found["alone"]["severity"] == "remark"
    assert "mpiexec" in found["alone"]["fix"]


@dataclass(frozen=True)
class Broken:
    """An environment that is broken: a file of the folder, words of the command, ranks, variables; and what is found."""

    key: str
    fix: str
    sentence: str = ""
    severity: str = ""
    file: tuple[str, str] = ("", "")
    words: tuple[str, ...] = ()
    ranks: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


#: FOLDER stands for the folder
BROKEN = {
    each.key: each
    for each in (
        Broken("threads-refused", "Set OMP_NUM_THREADS to ", env={"OMP_NUM_THREADS": "1024"}),
        Broken("no-scratch", "export TMPDIR=", env={"TMPDIR": "/nowhere/scratch"}),
        Broken("no-mpi-library", "pip install mpich", env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}),
        Broken("world-size", "mpiexec -n 3", env={"HPCTRAIN_EXPECT_RANKS": "3"}),
        Broken(
            "refused",
            "grid.rows * grid.cols must be 2.",
            "A grid of 3 x 1 has 3 places, but the number of ranks is 2",
            words=("tiny.yaml", "grid.rows=3", "grid.cols=1"),
            ranks=2,
        ),
        Broken(
            "no-gtl",
            "export MPICH_GPU_SUPPORT_ENABLED=0",
            "the GTL library is not linked",
            file=("sitecustomize.py", _NO_GTL),
            env={"PYTHONPATH": python_path(Path("FOLDER")), "MPICH_GPU_SUPPORT_ENABLED": "1"},
        ),
        Broken(
            "too-few-gpus",
            "at most 2 ranks on a node",
            "has 2 GPUs for 3 ranks",
            words=("tiny.yaml", "backend=cuda"),
            ranks=3,
            env={"CUDA_VISIBLE_DEVICES": "0,1"},
        ),
        Broken(
            "slow-import",
            "local disks",
            severity="warning",
            file=("sitecustomize.py", _SLOW),
            env={"PYTHONPATH": python_path(Path("FOLDER"))},
        ),
    )
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("key", BROKEN)
def test_what_is_broken_is_named_with_its_cure(job: Job, folder: Path, key: str) -> None:
    broken = BROKEN[key]
    if broken.file[0]:
        file = folder / broken.file[0]
        file.parent.mkdir(exist_ok=True)
        file.write_text(broken.file[1])
        file.chmod(0o755)
    env = {name: value.replace("FOLDER", str(folder)) for name, value in broken.env.items()}
    found = examined(job, folder, *broken.words, ranks=broken.ranks, env=env)
    assert key in found, found
    assert broken.fix in found[key]["fix"]
    assert broken.sentence.replace("FOLDER", str(folder)) in found[key]["sentence"]
    assert broken.severity in found[key]["severity"]


def test_a_mistake_is_a_sentence(job: Job, folder: Path) -> None:
    outcome = job(0, [*DOCTOR, "tiny.yaml", "optimizer=adagrad"], cwd=folder)
    assert outcome.code == USER_ERROR
    assert 'override "optimizer=adagrad": There is no optimizer "adagrad"' in sentence(outcome)
    assert "Traceback" not in outcome.output


def test_ranks_of_a_wrong_launcher_are_named_once(folder: Path) -> None:
    """Each has a world of its own: the first one of the launcher speaks, and the others leave in silence."""
    processes = [alone(folder, of_open_mpi(rank)) for rank in (0, 1)]
    first, second = [(process.communicate(timeout=150)[0], process.returncode) for process in processes]
    assert (second[0], second[1], first[1]) == ("", 0, USER_ERROR)
    [found] = [one for one in json.loads(first[0])["findings"] if one["key"] == "singletons"]
    assert found["sentence"].startswith("Open MPI mpiexec has started 2 processes, but each is rank 0 of 1")
    assert "mpiexec -n 2" in found["fix"] or "mpi-lib-version" in found["fix"]


def of_open_mpi(rank: int) -> dict[str, str]:
    names = {"WORLD_SIZE": 2, "WORLD_RANK": rank, "WORLD_LOCAL_SIZE": 2, "WORLD_LOCAL_RANK": rank}
    return {f"OMPI_COMM_{name}": str(value) for name, value in names.items()}


def alone(folder: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mpi4py", *DOCTOR, "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=clean_environment(env), cwd=folder, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


def test_an_mpi_that_ends_the_ranks_of_another_ones_launcher_is_named(job: Job, folder: Path) -> None:
    """MPICH 5 refuses Open MPI's PMIx by ending the process, here by a library that does so at its start."""
    crash = folder / "crash"
    crash.mkdir()
    (crash / "sitecustomize.py").write_text(_NO_GTL.replace("GTL library is not linked", "unsupported PMI version"))
    outcome = job(0, [*DOCTOR, "--json"], cwd=folder, env={"PYTHONPATH": python_path(crash), **of_open_mpi(0)})
    found = findings(outcome)
    if "Open MPI" in found.get("wrong-launcher", {"sentence": ""})["sentence"]:
        assert "mpi4py loads MPICH" in found["wrong-launcher"]["sentence"]
    else:  # this Python's MPI is Open MPI itself: no launcher is wrong then, but the process has ended
        assert "unsupported PMI version" in found["ended"]["sentence"]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts small disks with options; skips where this user may mount none."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk-{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "hpctrain-test", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("disk", ["size=1m,ro", "size=64k"])
def test_a_run_directory_that_takes_nothing_is_named(job: Job, folder: Path, mounted: Callable[[str], Path], disk: str) -> None:
    place = mounted(disk)
    found = examined(job, folder, "tiny.yaml", f"output={place / 'runs'}")
    if "ro" in disk:
        assert found["run-directory"]["sentence"] == f"{place} cannot be written: Read-only file system."
        assert "output=DIR" in found["run-directory"]["fix"]
    else:
        assert "No space left on device" in found["run-directory"]["sentence"]
        assert found["run-directory"]["fix"].startswith("Free space")
    assert not list(place.iterdir()), "the probe is gone"


def of_several_programs(folder: Path, programs: Sequence[Sequence[str]]) -> Outcome:
    """One rank of each command, in one job."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip("there is no mpiexec, neither next to this Python nor on PATH")
    words = [word for number, program in enumerate(programs) for word in ([":"] * bool(number) + ["-n", "1", *program])]
    begin = time.monotonic()
    done = subprocess.run(
        [mpiexec, *words], env=clean_environment(), cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)


def test_mismatched_versions_are_named_with_rank_and_host(folder: Path) -> None:
    other = folder / "other" / "numpy-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    program = [sys.executable, "-m", "mpi4py", *DOCTOR, "--json"]
    outcome = of_several_programs(folder, [program, ["env", f"PYTHONPATH={python_path(folder / 'other')}", *program]])
    found = findings(outcome)["refused"]
    assert "Rank 1 has other packages than rank 0: numpy is 0.0.1, not " in found["sentence"]
    assert found["fix"] == "Give all nodes the same environment."


def test_a_start_that_hangs_is_named_within_the_limit(folder: Path) -> None:
    """The other rank never starts MPI. On a busy machine, this rank may reach the start of MPI only within a longer limit."""
    for seconds in (10, 30, 90):
        program = [sys.executable, "-m", "mpi4py", *DOCTOR, "--seconds", str(seconds)]
        outcome = of_several_programs(folder, [program, ["sleep", "200"]])
        words = " ".join(outcome.stdout.split())
        if "while starting MPI" in words:
            break
    assert outcome.code != 0
    assert outcome.seconds < 140
    assert "did not end while starting MPI." in words, outcome.output
    assert "directory ok" in words, "what the rank has found by itself is reported"
