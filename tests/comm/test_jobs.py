"""Jobs that fail end soon, with a code that is not zero, and say why once; and memory that ranks of a node share."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm import shared_memory
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.shared_memory import share
from hpctrain.core.text import place
from hpctrain_testing.run import Outcome, run_job
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, wait

Job = Callable[..., Outcome]

#: a job that hangs is ended by its test, which fails; no start of MPI on a busy machine takes as long
_HANGS_SECONDS, _LONG_DEADLINE = 150, 300

_WORLD = f"""
from hpctrain.comm import mpi
from hpctrain.comm.progress import ProgressEngine
import numpy as np, sys, time
world = mpi.world({_LONG_DEADLINE})
"""


def _run(job: Job, ranks: int, program: str) -> Outcome:
    return job(ranks, ["-c", _WORLD + textwrap.dedent(program)], timeout_seconds=_HANGS_SECONDS)


@pytest.mark.mpi_differs
def test_a_job_that_ends_well_returns_zero(job: Job) -> None:
    outcome = _run(job, 3, "import os; os.write(1, f'sum {sum(world.allgather_object(world.rank))}\\n'.encode())")
    assert outcome.code == 0, outcome.output
    assert outcome.stdout.count("sum 3") == 3


@pytest.mark.mpi_differs
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ranks", "end"),
    [
        (2, "if world.rank == 0: raise ZeroDivisionError('no such luck')"),
        (2, "if world.rank == 1: raise ZeroDivisionError('no such luck')"),
        (2, "if world.rank == 1: sys.exit(3)"),
        (3, "part = world.split(world.rank % 2, 0, 'part')\nif world.rank == 1: part.abort(7)"),
    ],
    ids=["the root raises", "another raises", "exits", "aborts"],
)
def test_one_rank_that_ends_badly_ends_the_job(job: Job, ranks: int, end: str) -> None:
    outcome = _run(job, ranks, f"{end}\nworld.allgather_object(None)")
    assert outcome.code != 0
    if "raise" in end:
        assert outcome.output.count("ZeroDivisionError: no such luck") == 1
        assert outcome.output.count("Traceback") == 1


@pytest.mark.mpi_differs
def test_a_missed_deadline_names_rank_operation_parameter_and_stacks(job: Job) -> None:
    outcome = _run(
        job,
        2,
        """
        from hpctrain.launch.signals import hold
        hold()  # as a run does
        engine = ProgressEngine(rank=world.rank, deadline_seconds=1.5, abort=world.abort)
        queue = engine.queue(world)
        done = queue.post(lambda: world.iallreduce(np.ones(3)), "features.0.weight")
        engine.wait(done)
        if world.rank == 0:
            time.sleep(600)  # never comes to the next one

        def step_of_the_victim():
            lost = queue.post(lambda: world.iallreduce(np.ones(225, np.float32)), "features.3.weight")
            later = queue.post(lambda: world.ibarrier(), "classifier.bias", after=[lost])
            engine.wait(later)

        step_of_the_victim()
        """,
    )
    assert outcome.code != 0
    text, lost = outcome.stderr, "classifier.bias: queue world, sequence number 2, not started"
    assert f"{place(1, 2)}no completion within the deadline of 1.5 s: {lost}" in text
    assert "features.3.weight: queue world, sequence number 1, operation allreduce of 225 float32 elements, in flight" in text
    assert "step_of_the_victim" in text
    assert "features.0.weight" not in text


@pytest.mark.mpi_differs
def test_object_operations_have_the_deadline_too_and_are_explained(job: Job, tmp_path: Path) -> None:
    program = f"""
    import pathlib, time
    from hpctrain.comm import mpi
    from hpctrain.flight.recorder import FlightRecorder
    world = mpi.world(5, flight := FlightRecorder())
    flight.join(world.rank, world.size, 1, 5.0, 1)
    flight.keep_in(pathlib.Path({str(tmp_path)!r}))
    if world.rank == 0:
        time.sleep(600)
    world.split(0, 0, "column")
    """
    outcome = job(2, ["-c", textwrap.dedent(program)], timeout_seconds=_HANGS_SECONDS)
    assert outcome.code != 0
    lost = "split into column (communicator world of ranks 0-1)"
    assert f"{place(1, 2)}no completion within the deadline of 5 s: {lost}" in outcome.stderr
    assert re.search(r"autopsy: .*split into column", outcome.stderr), outcome.stderr


@pytest.mark.mpi_differs
def test_ranks_that_are_jobs_of_their_own_are_refused(job: Job) -> None:
    """As when another MPI's launcher started them: it asked for 4, and each finds itself alone."""
    program = """
    import os
    from hpctrain.comm import mpi
    from hpctrain.launch import launcher
    print("started", flush=True)
    launcher.check_world(launcher.detect(os.environ), mpi.world(30).size)
    print("trained", flush=True)
    """
    foreign = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
    outcome = job(0, ["-c", textwrap.dedent(program)], env=foreign)
    assert outcome.code != 0
    assert "trained" not in outcome.stdout
    assert "LaunchError: Open MPI mpiexec was asked for 4 ranks, but MPI's world has 1" in outcome.stderr


_TOP = Path(__file__).parents[2]
_CONFTEST = (_TOP / "tests" / "conftest.py").read_text()


def _pytest(job: Job, ranks: int, tests: str, folder: Path) -> Outcome:
    """Run a test module on several ranks as the suite itself is run."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_inner.py").write_text("import pytest, time\n" + textwrap.dedent(tests))
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {_TOP}\n")
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-m", f"parallel[{ranks}]", "test_inner.py"]
    return job(ranks, arguments, cwd=folder, timeout_seconds=_HANGS_SECONDS)


@pytest.mark.mpi_differs
@pytest.mark.sample(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_fails_the_suite_and_later_tests_still_run(job: Job, tmp_path: Path, failing: int) -> None:
    outcome = _pytest(
        job,
        2,
        f"""
        @pytest.mark.parallel(2)
        def test_uneven(world):
            assert world.rank != {failing}, "only this rank"

        @pytest.mark.parallel(2)
        def test_after(world, progress):
            progress.wait_handle(world.ibarrier(), "barrier")
        """,
        tmp_path,
    )
    assert outcome.code != 0
    assert "1 failed, 1 passed" in outcome.stdout, outcome.output
    assert outcome.output.count("E       AssertionError: only this rank") == 1
    if failing:
        assert "failed on rank 1 of 2" in outcome.stdout


# The second holds the interpreter lock without end: PyDLL does not let go of it during a call.
_HANGS = {"time.sleep(60)": 124, "ctypes.PyDLL(None).sleep(60)": 1}


@pytest.mark.job
@pytest.mark.parametrize(("hang", "code"), _HANGS.items())
def test_a_phase_that_hangs_ends_the_process_with_its_stacks(hang: str, code: int) -> None:
    program = f"""
    import ctypes, time
    from hpctrain.comm.waiting import guard

    def the_culprit():
        {hang}

    from hpctrain.launch.signals import hold
    hold()  # as a run does
    with guard("The start of MPI", 0.3, rank=4):
        the_culprit()
    """
    outcome = run_job(0, ["-c", textwrap.dedent(program)])
    assert outcome.code == code
    assert "in the_culprit" in outcome.stderr
    if code == 124:
        assert f"{place(4)}The start of MPI did not end within the deadline of 0.3 s" in outcome.stderr


@pytest.mark.job
def test_a_phase_that_ends_is_left_alone() -> None:
    program = """
    import time
    from hpctrain.comm.waiting import guard
    with guard("quick", 0.2):
        pass
    try:
        with guard("failing", 0.2):
            raise ValueError
    except ValueError:
        pass
    time.sleep(2.6)
    print("alive")
    """
    outcome = run_job(0, ["-c", textwrap.dedent(program)])
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "alive\n", "")


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


def test_the_last_view_returns_it() -> None:
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


@pytest.mark.parametrize("fault", ["memfd_create", "_mapped", "_mapped on the second"])
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


@pytest.mark.parametrize(("name", "denied"), [("other", "they open different files"), ("missing", "No such file or directory")])
def test_the_descriptor_of_another_process_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, denied: str
) -> None:
    """In a container of its own, the number of a process may be that of another one."""
    (tmp_path / "other").write_bytes(bytes(100))
    plain = os.open

    def opened(path: str, *arguments: int) -> int:
        return plain(tmp_path / name if str(path).startswith("/proc/") else path, *arguments)

    monkeypatch.setattr(os, "open", opened)
    before = len(os.listdir("/proc/self/fd"))
    assert run_virtual(2, lambda comm: share(comm, 100).denied) == [denied] * 2
    assert len(os.listdir("/proc/self/fd")) == before


_SHARING = """
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


@pytest.mark.mpi_differs
@pytest.mark.sample(1)
@pytest.mark.job
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_real_ranks_hold_it_once(job: Callable[..., Outcome], tmp_path: Path, ranks: int) -> None:
    """200 MB: the ranks' shares of all their pages add up to less than two copies of it."""
    outcome = job(ranks, ["-c", textwrap.dedent(_SHARING)], cwd=tmp_path)
    assert (outcome.code, outcome.stdout.count("shared")) == (0, ranks), outcome.output
    taken = sum(1024 * int((tmp_path / f"pss-{rank}").read_text()) for rank in range(ranks))
    assert 200e6 < taken < 300e6 + ranks * 60e6


@pytest.mark.mpi_differs
@pytest.mark.job
@pytest.mark.slow
def test_killed_ranks_leave_no_shared_memory(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """It has no name in any file system; what the MPI has left of its own is another matter."""
    before = {name for name in os.listdir("/dev/shm") if name.startswith("hpctrain-samples")}
    outcome = job(2, ["-c", textwrap.dedent(_SHARING), "kill"], cwd=tmp_path)
    assert outcome.code != 0
    assert outcome.stdout.count("shared") == 2, outcome.output
    assert {name for name in os.listdir("/dev/shm") if name.startswith("hpctrain-samples")} == before == set()
    sizes = [entry.stat().st_blocks * 512 for entry in os.scandir("/dev/shm") if entry.is_file()]
    assert max(sizes, default=0) < 200e6
