"""Jobs that fail must end: soon, with a non-zero exit code, and saying why, once."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.speaker import place
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]

_SOON_SECONDS = 25  # starting MPI on a busy machine takes seconds; a hang would take the deadline, far longer
_LONG_DEADLINE = 300

_WORLD = f"""
from hpctrain.comm import mpi
from hpctrain.comm.progress import ProgressEngine
import numpy as np
world = mpi.world({_LONG_DEADLINE})
"""


def _run(job: Job, ranks: int, program: str, **options: object) -> Outcome:
    return job(ranks, ["-c", _WORLD + textwrap.dedent(program)], **options)


def test_a_job_that_ends_well_gives_zero(job: Job) -> None:
    outcome = _run(job, 3, "import os; os.write(1, f'sum {sum(world.allgather_object(world.rank))}\\n'.encode())")
    assert outcome.code == 0, outcome.output
    assert outcome.stdout.count("sum 3") == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_raises_ends_the_job(job: Job, failing: int) -> None:
    outcome = _run(
        job,
        2,
        f"""
        if world.rank == {failing}:
            raise ZeroDivisionError("no such luck")
        world.allgather_object(None)
        """,
    )
    assert outcome.code != 0
    assert outcome.seconds < _SOON_SECONDS
    assert outcome.output.count("ZeroDivisionError: no such luck") == 1
    assert outcome.output.count("Traceback") == 1


def test_one_rank_that_exits_ends_the_job(job: Job) -> None:
    outcome = _run(
        job,
        2,
        """
        import sys
        if world.rank == 1:
            sys.exit(3)
        world.allgather_object(None)
        """,
    )
    assert outcome.code != 0
    assert outcome.seconds < _SOON_SECONDS


def test_abort_ends_the_job_from_any_communicator(job: Job) -> None:
    outcome = _run(
        job,
        3,
        """
        part = world.split(world.rank % 2, 0, "part")
        if world.rank == 1:
            part.abort(7)
        world.allgather_object(None)
        """,
    )
    assert outcome.code != 0
    assert outcome.seconds < _SOON_SECONDS


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
            import time
            time.sleep(60)  # never comes to the next one

        def step_of_the_victim():
            lost = queue.post(lambda: world.iallreduce(np.ones(225, np.float32)), "features.3.weight")
            later = queue.post(lambda: world.ibarrier(), "classifier.bias", after=[lost])
            engine.wait(later)

        step_of_the_victim()
        """,
    )
    assert outcome.code != 0
    assert outcome.seconds < _SOON_SECONDS
    text = outcome.stderr
    assert (
        f"{place(1, 2)}no completion within the deadline of 1.5 s: classifier.bias: queue world, sequence number 2, not started"
        in text
    )
    assert "features.3.weight: queue world, sequence number 1, operation allreduce of 225 float32 elements, in flight" in text
    assert "step_of_the_victim" in text
    assert "features.0.weight" not in text


def test_object_operations_have_the_deadline_too(job: Job) -> None:
    program = """
    from hpctrain.comm import mpi
    world = mpi.world(5)
    if world.rank == 0:
        import time
        time.sleep(60)
    world.split(0, 0, "column")
    """
    outcome = job(2, ["-c", textwrap.dedent(program)])
    assert outcome.code != 0
    assert outcome.seconds < _SOON_SECONDS
    assert (
        f"{place(1, 2)}no completion within the deadline of 5 s: split into column (communicator world of ranks 0-1)"
        in outcome.stderr
    )


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
    return job(ranks, arguments, cwd=folder)


def test_a_passing_suite_of_ranks_reports_once(job: Job, tmp_path: Path) -> None:
    outcome = _pytest(
        job,
        3,
        """
        @pytest.mark.parallel([2, 3])
        def test_fine(world):
            assert world.size == 3
        """,
        tmp_path,
    )
    assert outcome.code == 0, outcome.output
    assert outcome.stdout.count("1 passed") == 1


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


def test_a_failure_while_others_wait_ends_the_suite(job: Job, tmp_path: Path) -> None:
    outcome = _pytest(
        job,
        2,
        """
        @pytest.mark.parallel(2)
        def test_stuck(world, progress):
            assert world.rank != 1, "before the barrier"
            progress.wait_handle(world.ibarrier(), "barrier")
            progress.wait_handle(world.ibarrier(), "another")
        """,
        tmp_path,
    )
    assert outcome.code != 0
    assert outcome.seconds < _SOON_SECONDS
    assert "AssertionError: before the barrier" in outcome.output


def test_a_fixture_that_fails_on_one_rank_fails_the_test_on_all(job: Job, tmp_path: Path) -> None:
    outcome = _pytest(
        job,
        2,
        """
        @pytest.fixture
        def half(world):
            assert world.rank == 0, "no fixture here"

        @pytest.mark.parallel(2)
        def test_fixture(world, progress, half):
            progress.wait_handle(world.ibarrier(), "barrier")
        """,
        tmp_path,
    )
    assert outcome.code != 0
    assert outcome.seconds < _SOON_SECONDS
    assert "1 error" in outcome.stdout, outcome.output
    assert "no fixture here" in outcome.output
