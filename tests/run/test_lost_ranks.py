"""What a process keeps of its run while its world shrinks, and refusals where a job cannot continue without lost ranks."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.base import SingleCommunicator
from hpctrain.config.schema import Config, LostRankConfig
from hpctrain.core.errors import ConfigError
from hpctrain.job.ownership import ShrinkState, check_offered
from hpctrain.launch.launcher import Launcher
from hpctrain.runs.directory import RunDirectory
from hpctrain.training.snapshot import Position
from hpctrain_testing.run import Outcome
from tests.support.recorded import Heard
from tests.support.signal_storm import prepare

Job = Callable[..., Outcome]


class Gathering(SingleCommunicator):
    """Rank 0 of several, of which the others' values are known."""

    def __init__(self, others: Sequence[Any]) -> None:
        super().__init__()
        self._others = others

    def allgather_object(self, value: Any) -> list[Any]:
        return [value, *self._others]


@given(st.data())
def test_losses_keep_the_numbers_that_the_user_knows_until_they_are_reported(data: st.DataObject) -> None:
    memory, reporter = ShrinkState(), Heard()
    known = list(range(data.draw(st.integers(2, 9))))  # the numbers, as the user knows them, of the ranks that are left
    untold: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        if len(known) == 1:
            break
        lost = data.draw(st.sets(st.integers(0, len(known) - 1), min_size=1, max_size=len(known) - 1))
        memory.loses(len(known), sorted(lost), step=4)
        untold += [known[rank] for rank in lost]
        known = [number for rank, number in enumerate(known) if rank not in lost]
        assert memory.lost == tuple(sorted(untold))
        if data.draw(st.booleans()):
            memory.tell(reporter, Position(global_step=3), len(known))
            assert (reporter.records[-1][1]["lost"], reporter.records[-1][1]["ranks"]) == (sorted(untold), len(known))
            known, untold = list(range(len(known))), []
            assert memory.lost == ()


def test_a_loss_is_reported_once() -> None:
    memory, reporter = ShrinkState(), Heard()
    memory.loses(4, [2], 812)
    for _ in range(2):
        memory.tell(reporter, Position(global_step=800, epoch=1), 3)
    assert reporter.lines == ["rank 2 was lost in step 812; continuing with 3 ranks from step 800"]
    assert reporter.records == [("shrink", {"epoch": 2, "step": 800, "from_step": 812, "lost": [2], "ranks": 3})]
    memory.loses(3, [0, 1], 0)
    memory.tell(reporter, Position(), 1)
    assert reporter.lines[1:] == ["ranks 0-1 were lost before the first step; continuing with 1 rank from the beginning"]


def test_ranks_agree_on_what_some_of_them_know(tmp_path: Path) -> None:
    """One learns of the loss before it hears of the directory; another one is a step further."""
    memory = ShrinkState()
    memory.loses(4, [3], 5)
    memory.agree(Gathering([(None, None, 4), (tmp_path, 2, 6)]))
    assert (memory.directory, memory.step) == (tmp_path, 6)
    assert memory.steps_left(10, Position(global_step=4)) == 8


@given(first=st.integers(0, 50), steps=st.integers(1, 50), done=st.integers(0, 60))
def test_all_attempts_together_do_the_steps_that_were_asked_for(first: int, steps: int, done: int) -> None:
    memory = ShrinkState()
    memory.begins(RunDirectory(Path("run")), Position(global_step=first))
    left = memory.steps_left(steps, Position(global_step=first + done))
    assert left == steps - done if done < steps else left == -1
    assert memory.steps_left(0, Position(global_step=first + done)) == 0


def test_a_run_goes_on_from_itself_once_it_has_a_checkpoint(tmp_path: Path) -> None:
    memory = ShrinkState()
    assert memory.resume("auto") == "auto"
    run = RunDirectory.create(tmp_path, "tiny", config="name: tiny\n", versions={}, git={})
    memory.begins(run, Position())
    assert memory.resume(None) is None
    (run.checkpoints / "checkpoint-00000003.h5").touch()
    assert memory.resume("auto") == str(run.path)


def test_it_is_refused_in_one_process() -> None:
    shrinks = Config.model_construct(on_lost_rank=LostRankConfig(action="shrink"))
    with pytest.raises(ConfigError, match="this is one process without MPI; the nearest legal value is stop"):
        check_offered(shrinks, Launcher("none"))
    check_offered(Config.model_construct(on_lost_rank=LostRankConfig()), Launcher("none"))


@pytest.mark.mpi_differs
def test_it_is_refused_by_an_mpi_that_ends_a_job_with_its_rank(job: Job, tmp_path: Path) -> None:
    """Whichever it is: also by Open MPI without --with-ft ulfm."""
    prepare(tmp_path)
    (name,) = (path.name for path in tmp_path.glob("*.yaml"))
    outcome = job(2, ["-m", "hpctrain", "train", name, "on_lost_rank=shrink"], cwd=tmp_path)
    assert outcome.code == 2, outcome.output
    assert outcome.stderr.count("needs Open MPI 5 started as `mpiexec --with-ft ulfm ...`, but this is") == 1
    assert "Traceback" not in outcome.stderr
    assert not os.path.exists(tmp_path / "runs")
