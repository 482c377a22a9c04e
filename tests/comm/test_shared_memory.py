"""Memory that ranks of a node have in common: one copy, nothing in any file system, and each rank's own where that is denied."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm import shared_memory
from hpctrain.comm.shared_memory import share
from hpctrain.comm.single import SingleCommunicator
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait
from tests.support.jobs import Outcome


@pytest.mark.parametrize("seed", [None, 3])
def test_what_one_rank_of_a_node_writes_all_of_them_read(seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> tuple[list[int], str]:
        node = comm.split_shared_memory("node")
        memory = share(node, 10_000)
        memory.array[1000 * node.rank] = 1 + comm.rank
        memory.fence()
        wait(node.ibarrier())
        memory.fence()
        return memory.array[:3000:1000].tolist(), memory.denied

    assert run_virtual(5, program, ranks_per_node=3, seed=seed) == [([1, 2, 3], "")] * 3 + [([4, 5, 0], "")] * 2


def test_one_process_has_it_to_itself() -> None:
    memory = share(SingleCommunicator(), 5)
    assert (memory.array.tolist(), memory.denied) == ([0] * 5, "")


def test_the_last_view_gives_it_back() -> None:
    descriptors, maps = Path("/proc/self/fd"), Path("/proc/self/maps")
    before = len(os.listdir(descriptors))
    memory = share(SingleCommunicator(), 1 << 20)
    part = memory.array[5:7]
    del memory
    part[...] = 9
    assert len(os.listdir(descriptors)) <= before + 1  # that of Python's map
    assert "hpctrain-samples" in maps.read_text()
    del part
    assert "hpctrain-samples" not in maps.read_text()
    assert len(os.listdir(descriptors)) == before


@pytest.mark.parametrize("fault", ["memfd_create", "_open", "_mapped", "_mapped on the second"])
def test_where_one_rank_is_denied_it_each_has_its_own(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """All of them learn the reason; none waits for another."""
    mapped, calls = shared_memory._mapped, []

    def second_fails(descriptor: int, size_bytes: int) -> np.ndarray:
        calls.append(descriptor)
        return _denied() if len(calls) == 2 else mapped(descriptor, size_bytes)

    name = fault.split()[0]
    monkeypatch.setattr(os if name == "memfd_create" else shared_memory, name, second_fails if name != fault else _denied)

    def program(comm: ThreadCommunicator) -> tuple[int, bool]:
        memory = share(comm, 100)
        memory.array[0] += 1
        wait(comm.ibarrier())
        return int(memory.array[0]), "Operation not permitted" in memory.denied

    assert run_virtual(2, program) == [(1, True)] * 2


def _denied(*arguments: object) -> np.ndarray:
    raise PermissionError(1, "Operation not permitted")


def test_the_descriptor_of_another_process_is_known_for_what_it_is(tmp_path: Path) -> None:
    """In a container of its own, the number of a process may be that of another one."""
    descriptor, token = shared_memory._create(100)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.truncate(other, os.fstat(descriptor).st_size)
    for number, known in ((other, token), (descriptor, bytes(16)), (12345, token)):
        with pytest.raises(OSError, match=r"do not see each other|No such file"):
            shared_memory._open((os.getpid(), number, known), 100)
    opened = shared_memory._open((os.getpid(), descriptor, token), 100)
    assert os.fstat(opened).st_ino == os.fstat(descriptor).st_ino
    for number in (descriptor, other, opened):
        os.close(number)


_JOB = """
import os, signal, sys
import numpy as np
from hpctrain.comm import mpi
from hpctrain.comm.shared_memory import share
world = mpi.world(60)
node = world.split_shared_memory("node")
memory = share(node, 200_000_000)
assert not memory.denied, memory.denied
parts = np.array_split(memory.array, node.size)
parts[node.rank][...] = 1 + node.rank
memory.fence()
node.wait(node.ibarrier(), "all have written")
memory.fence()
values = [set(part[::999].tolist()) for part in parts]
assert values == [{1 + rank} for rank in range(node.size)], values
print("shared", flush=True)
own = [line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:")]
with open(f"pss-{node.rank}", "w") as file:
    file.write(own[0])
node.wait(node.ibarrier(), "all have measured")
if sys.argv[1:] == ["kill"]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_real_ranks_hold_it_once(job: Callable[..., Outcome], tmp_path: Path, ranks: int) -> None:
    """200 MB: the ranks' shares of all their pages add up to less than two copies of it."""
    outcome = job(ranks, ["-c", textwrap.dedent(_JOB)], cwd=tmp_path)
    assert (outcome.code, outcome.stdout.count("shared")) == (0, ranks), outcome.output
    taken = sum(1024 * int((tmp_path / f"pss-{rank}").read_text()) for rank in range(ranks))
    assert 200e6 < taken < 300e6 + ranks * 60e6


@pytest.mark.job
@pytest.mark.slow
def test_killed_ranks_leave_nothing_of_it(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """It has no name in any file system; what the MPI has left of its own is another matter."""
    before = {name for name in os.listdir("/dev/shm") if name.startswith("hpctrain-samples")}
    outcome = job(2, ["-c", textwrap.dedent(_JOB), "kill"], cwd=tmp_path)
    assert outcome.code != 0
    assert outcome.stdout.count("shared") == 2, outcome.output
    assert {name for name in os.listdir("/dev/shm") if name.startswith("hpctrain-samples")} == before == set()
    sizes = [entry.stat().st_blocks * 512 for entry in os.scandir("/dev/shm") if entry.is_file()]
    assert max(sizes, default=0) < 200e6
