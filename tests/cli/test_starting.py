"""How `train` starts: with the ranks that were asked for, and without starting processes of its own beside MPI's."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import Outcome
from tests.support.tiny_runs import prepare

pytestmark = pytest.mark.slow
Job = Callable[..., Outcome]

CONFIG = """
name: tiny
seed: 7
model: {name: small, channels: [4, 6], hidden: 9}
data: {train: FOLDER/train.h5, test: FOLDER/train.h5}
batch: 12
epochs: 1
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
schedule: constant
deadline_seconds: 30
output: FOLDER/runs
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and 24 small images: 2 steps per epoch."""
    return prepare(tmp_path, CONFIG, 24, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [["train"], ["train", "--compute-only"], ["eval"]])
def test_a_process_that_is_alone_is_refused_where_more_ranks_are_expected(job: Job, folder: Path, command: list[str]) -> None:
    outcome = job(0, ["-m", "hpctrain", *command, "tiny.yaml"], cwd=folder, env={"HPCTRAIN_EXPECT_RANKS": "2"})
    assert outcome.code == 2, outcome.output
    assert "hpctrain: HPCTRAIN_EXPECT_RANKS asks for 2 ranks, but" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not (folder / "runs").exists()


def test_a_process_that_is_alone_trains_where_one_rank_is_expected(job: Job, folder: Path) -> None:
    outcome = job(0, ["-m", "hpctrain", "train", "tiny.yaml"], cwd=folder, env={"HPCTRAIN_EXPECT_RANKS": "1"})
    assert outcome.code == 0, outcome.output


@pytest.mark.parametrize("local_rank", [0, 1])
def test_ranks_that_are_alone_say_so_once_a_node(job: Job, folder: Path, local_rank: int) -> None:
    """As under a launcher of another MPI: each of a thousand ranks has a world of its own."""
    names = {"WORLD_SIZE": 4, "WORLD_RANK": 2 + local_rank, "WORLD_LOCAL_SIZE": 2, "WORLD_LOCAL_RANK": local_rank}
    environ = {f"OMPI_COMM_{name}": str(value) for name, value in names.items()}
    outcome = job(0, ["-m", "hpctrain", "train", "tiny.yaml"], cwd=folder, env=environ)
    assert outcome.code == 2, outcome.output
    assert outcome.stderr.count("was asked for 4 ranks, but MPI's world has 1") == (local_rank == 0)


# Tells of every process that Python code of a rank starts, and whether MPI had started then.
_WATCHED = """
import sys

STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system", "os.exec", "os.spawn"}

def tell(event, arguments):
    if event in STARTS:
        mpi = sys.modules.get("mpi4py.MPI")
        when = "before" if mpi is None or not mpi.Is_initialized() else "after"
        sys.stderr.write(f"a process {when} MPI: {event} {arguments[:2]}\\n")

sys.addaudithook(tell)
from hpctrain.__main__ import main
main()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [["trace=true", "metrics.tensorboard=true"], ["backend=numpy", "progress=thread"]])
def test_no_rank_starts_a_process_once_mpi_runs(job: Job, folder: Path, more: list[str]) -> None:
    """MPI's memory and connections do not survive a fork on every network, and a thousand ranks have one file system."""
    (folder / "watched.py").write_text(textwrap.dedent(_WATCHED))
    outcome = job(2, ["watched.py", "train", "tiny.yaml", *more], cwd=folder)
    assert outcome.code == 0, outcome.output
    told = [line for line in outcome.stderr.splitlines() if line.startswith("a process")]
    assert not [line for line in told if "after" in line]
    assert any("git" in line for line in told)  # the watch works: rank 0 asks for the revision before MPI starts
    assert not [line for line in told if "gcc" in line]
    looks = [line for line in told if "ldconfig" in line]
    assert len(looks) <= 1  # PyTorch's, which tensorboardX loads where it is installed


def test_tensorboard_that_is_missing_is_told_before_the_run_begins(job: Job, folder: Path) -> None:
    """By rank 0, which alone writes its files: the others must not wait for it."""
    (folder / "without.py").write_text(
        "import sys\nsys.modules['tensorboardX'] = None\nfrom hpctrain.__main__ import main\nmain()\n"
    )
    outcome = job(2, ["without.py", "train", "tiny.yaml", "metrics.tensorboard=true"], cwd=folder)
    assert outcome.code != 0, outcome.output
    assert outcome.stderr.count("tensorboardX is not installed; install hpctrain[export]") == 1
    assert not (folder / "runs").exists()


_COUNTED = """
import atexit, os, sys

opened = []

def count(event, arguments):
    if event == "open" and not str(arguments[0]).startswith(("/proc/", "/sys/")):
        opened.append(arguments[0])

def tell():
    packages = {"PIL", "cv2", "jinja2", "matplotlib", "onnx", "psutil", "pytest", "rich", "tensorboardX", "torch"}
    own = {f"hpctrain.{name}" for name in ("bench", "doctor", "planner", "report", "site", "testing", "virtual")}
    late = sorted((packages | own) & sys.modules.keys())
    entries = [str(path) for path in opened if str(path).endswith("entry_points.txt")]
    sys.stderr.write(f"files {len(opened)} late {late} {len(entries) - len(set(entries))}\\n")

sys.addaudithook(count)
atexit.register(tell)
from hpctrain.__main__ import main
main()
"""


def test_a_rank_opens_few_files_and_loads_nothing_that_it_does_not_need(job: Job, folder: Path) -> None:
    """A thousand ranks that start at once open them all from one file system."""
    (folder / "counted.py").write_text(textwrap.dedent(_COUNTED))
    outcome = job(2, ["counted.py", "train", "tiny.yaml"], cwd=folder)
    assert outcome.code == 0, outcome.output
    told = [line.split(maxsplit=3) for line in outcome.stderr.splitlines() if line.startswith("files ")]
    assert len(told) == 2, outcome.stderr
    least, most = sorted(int(files) for _, files, _, _ in told)
    assert least < 800, least
    assert most < 1400, most  # the first rank of a node reads the files of hpctrain once more, to compare them
    assert {late for *_, late in told} == {"[] 0"}, told  # 0: each package's entry points are read once
