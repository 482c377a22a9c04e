"""Stale shared memory: what dead ranks have left goes, what anybody may still use stays."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.launch.shared_segments import Removed, _folder, forget, remember, remove_stale
from tests.cli.test_starting import folder as folder
from tests.support.jobs import Outcome

# A process that has mapped segments and written that down, then ends as is said.
_PROGRAM = """
import mmap, os, signal, sys
from pathlib import Path
from hpctrain.launch.shared_segments import announce, remember
memory = Path(sys.argv[1])
maps = []
announce(memory)
for name in sys.argv[3:]:
    with open(memory / name, "w+b") as file:
        file.truncate(8192)
        maps.append(mmap.mmap(file.fileno(), 8192))
if sys.argv[2] in ("stay", "kill"):
    remember(memory)
print("ready", flush=True)
if sys.argv[2] in ("kill", "kill in start"):
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def _process(memory: Path, end: str, *names: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(memory), end, *names]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate("", timeout=30)


@pytest.mark.job
def test_what_a_killed_process_has_left_goes_once(tmp_path: Path) -> None:
    (tmp_path / "somebody-elses").write_bytes(b"x")
    _end(_process(tmp_path, "kill", "a", "b"))
    assert remove_stale(tmp_path) == Removed(2, 16384)
    assert sorted(path.name for path in tmp_path.iterdir()) == [_folder(tmp_path).name, "somebody-elses"]
    assert remove_stale(tmp_path) == Removed()


@pytest.mark.job
def test_what_a_living_process_uses_stays(tmp_path: Path) -> None:
    living = _process(tmp_path, "stay", "shared", "own")
    _end(_process(tmp_path, "kill", "shared", "left"))
    assert remove_stale(tmp_path) == Removed(1, 8192)
    assert (tmp_path / "shared").exists()
    assert (tmp_path / "own").exists()
    living.kill()
    _end(living)
    assert living.returncode == -signal.SIGKILL
    assert remove_stale(tmp_path) == Removed(2, 16384)


@pytest.mark.job
def test_what_a_process_that_was_killed_while_mpi_started_has_left_goes(tmp_path: Path) -> None:
    """Nobody has written its segments down: what MPIs call so goes, if nobody has mapped it and it is of that time."""
    (tmp_path / "mpich_shm_older").write_bytes(b"x")
    _end(_process(tmp_path, "kill in start", "mpich_shm_left", "sm_segment.left", "data.npy"))
    assert remove_stale(tmp_path) == Removed(2, 16384)
    kept = ["data.npy", "mpich_shm_older", _folder(tmp_path).name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    assert list(_folder(tmp_path).iterdir()) == []


@pytest.mark.job
def test_files_that_a_start_under_way_may_have_made_stay_until_it_is_over(tmp_path: Path) -> None:
    first = _process(tmp_path, "start", "mpich_shm_first")
    living = _process(tmp_path, "start", "mpich_shm_mapped")
    (tmp_path / "mpich_shm_not_mapped_yet").write_bytes(b"x")
    _end(_process(tmp_path, "kill in start", "mpich_shm_left"))
    assert remove_stale(tmp_path) == Removed()
    for process in (first, living):
        process.kill()
        _end(process)
    assert remove_stale(tmp_path) == Removed(4, 3 * 8192 + 1)
    assert list(_folder(tmp_path).iterdir()) == []


def test_a_process_that_ends_in_order_is_forgotten(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            remember(tmp_path)
    (entry,) = _folder(tmp_path).iterdir()
    assert str(tmp_path / "a") in entry.read_text()
    forget(tmp_path)
    assert list(_folder(tmp_path).iterdir()) == []


def test_entries_of_another_namespace_or_machine_are_left_alone(tmp_path: Path) -> None:
    _folder(tmp_path).mkdir(mode=0o700)
    (tmp_path / "a").write_bytes(b"x")
    entry = _folder(tmp_path) / "1-99"
    entry.write_text(f"another-boot pid:[1]\n{tmp_path / 'a'}\n")
    assert remove_stale(tmp_path) == Removed()
    assert entry.exists()
    assert (tmp_path / "a").exists()


@pytest.mark.job
@pytest.mark.parametrize("where", ["outside", "link"])
def test_nothing_but_files_in_the_memory_is_removed(tmp_path: Path, where: str) -> None:
    memory, victim = tmp_path / "memory", tmp_path / "victim"
    victim.write_text("kept")
    _folder(memory).mkdir(mode=0o700, parents=True)
    (memory / "link").symlink_to(victim)
    named = memory / "link" if where == "link" else victim
    _end(_process(memory, "kill", "a"))
    (entry,) = _folder(memory).iterdir()
    entry.write_text(f"{entry.read_text()}{named}\n")
    assert remove_stale(memory) == Removed(1, 8192)
    assert victim.read_text() == "kept"
    assert (memory / "link").is_symlink()


@pytest.mark.job
def test_a_folder_that_others_can_write_in_is_not_trusted(tmp_path: Path) -> None:
    _end(_process(tmp_path, "kill", "a"))
    _folder(tmp_path).chmod(0o777)
    assert remove_stale(tmp_path) == Removed()
    assert (tmp_path / "a").exists()


def test_words() -> None:
    assert str(Removed(1, 2_118_784)) == "removed 1 segment of shared memory (2.1 MB) that killed jobs of yours have left here"
    assert "removed 2 segments" in str(Removed(2, 1))


@pytest.mark.job
def test_a_job_removes_what_the_one_before_has_left(job: Callable[..., Outcome], folder: Path) -> None:
    """All ranks are killed at once, and their launcher with them. Jobs of other tests may be the ones that remove it."""
    killed = """
    import os, signal, sys, time
    from hpctrain.train.step import TrainingStep
    from tests.support.kills import shared_memory_of
    def end(self, *rest):
        with open(f"mapped-{os.getpid()}", "w") as file:
            file.write("\\n".join(map(str, shared_memory_of([os.getpid()]))))
        time.sleep(1)
        os.killpg(0, signal.SIGKILL)
    TrainingStep.run = end
    from hpctrain.__main__ import main
    sys.argv = ["hpctrain", "train", "tiny.yaml"]
    main()
    """
    outcome = job(2, ["-c", textwrap.dedent(killed)], cwd=folder, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert outcome.code != 0
    mapped = {Path(line) for file in folder.glob("mapped-*") for line in file.read_text().splitlines()}
    left = {path for path in mapped if path.exists()}
    outcome = job(2, ["-m", "hpctrain", "train", "tiny.yaml"], cwd=folder)
    assert outcome.code == 0, outcome.output
    assert not any(path.exists() for path in left)
