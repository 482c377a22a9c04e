"""A process of a job that loses ranks: when it continues, in which world, and what it reports. Its MPI is scripted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpctrain.cli import job_process, start
from hpctrain.cli.job_process import ConfiguredProcess
from hpctrain.comm import mpi
from hpctrain.comm.base import SingleCommunicator
from hpctrain.config.load import parse
from hpctrain.config.schema import Config
from hpctrain.core.errors import RankLostError, ShapeError
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.process_end import End
from hpctrain.run import messages

if TYPE_CHECKING:
    from hpctrain.cli.start import ReadConfig

TEXT = """
model: small
data: {train: train.h5}
batch: 12
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""
LOST = RankLostError("Rank 1 of 3 was lost.")


class World(SingleCommunicator):
    """Rank 0 of several that remember the same."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def allgather_object(self, value: Any) -> list[Any]:
        return [value] * self.size


class Started(ConfiguredProcess):
    """A job whose sessions need neither files nor MPI; its worlds are 3 ranks, then 2, then 1."""

    def __init__(self, *overrides: str, outcomes: list[Exception | None]) -> None:
        super().__init__()
        self.launcher = Launcher("Open MPI mpiexec")
        self.overrides, self.outcomes = overrides, outcomes
        self.sizes: list[int] = []
        self.asked: list[tuple[str | None, str | None]] = []

    def _session(self, resume: str | None, repeated: str | None, *, continues: bool = False) -> Any:
        assert continues
        self.sizes.append(self._joined.size)
        self.asked.append((resume, repeated))
        return None

    def run(self) -> bool:
        def work(session: object, resume: str | None, repeated: str | None, complete: Callable[[], None]) -> bool:
            outcome = self.outcomes.pop(0)
            if outcome is not None:
                raise outcome
            complete()
            return True

        return self.train(lambda: parse(TEXT), work, "auto", "earlier")


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is lost each time."""

    def start_job(process: Started, read: ReadConfig, *, trains: bool = False) -> None:
        process._config, process.world = parse(TEXT, "f.yaml", process.overrides)[0], World(3)

    monkeypatch.setattr(job_process, "start_job", start_job)
    monkeypatch.setattr(mpi, "goes_on_without_lost_ranks", lambda: True)
    monkeypatch.setattr(mpi, "all_done", lambda world, done: done)
    monkeypatch.setattr(mpi, "shrunk", lambda world, flight: (World(world.size - 1), (1,)))


def test_it_goes_on_in_smaller_and_smaller_worlds() -> None:
    job = Started("on_lost_rank=shrink", outcomes=[LOST, LOST, None])
    first = job.flight
    assert job.run()
    assert job.sizes == [3, 2, 1]
    assert job.asked == [("auto", "earlier"), ("auto", None), ("auto", None)]
    assert job.shrink_state.lost == (1, 2)
    assert job.flight is not first


def test_ranks_agree_once_in_each_world_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next one or at the end of the run: agreements match by their order, and ranks may be at different places."""
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(mpi, "all_done", lambda world, done: asked.append((world.size, done)) or world.size == 1)
    Started("on_lost_rank=shrink", outcomes=[LOST, None, None]).run()
    assert asked == [(3, False), (2, True), (1, True)]


def test_the_record_of_the_world_that_was_says_that_the_process_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[End] = []
    monkeypatch.setattr(FlightRecorder, "ended", lambda self, end, sentence="", ranks=(): ends.append(end))
    Started("on_lost_rank=shrink", outcomes=[LOST, None]).run()
    assert ends == [End.CONTINUED]


def test_a_rank_that_is_lost_at_the_very_end_starts_the_last_attempt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, True]  # this rank is done, another one is not, and has said so; then both are done
    monkeypatch.setattr(mpi, "all_done", lambda world, done: answers.pop(0))
    job = Started("on_lost_rank=shrink", outcomes=[None, None])
    assert job.run()
    assert job.sizes == [3, 2]
    assert not answers


@pytest.mark.parametrize("offered", [True, False])
def test_it_does_not_go_on_unasked_or_where_mpi_does_not(monkeypatch: pytest.MonkeyPatch, offered: bool) -> None:
    monkeypatch.setattr(mpi, "goes_on_without_lost_ranks", lambda: offered)
    job = Started(f"on_lost_rank={'stop' if offered else 'shrink'}", outcomes=[LOST])
    with pytest.raises(RankLostError, match=r"^Rank 1 of 3 was lost\.$"):
        job.run()
    assert job.sizes == [3]


def test_it_ends_where_fewer_are_left_than_it_may_go_on_with() -> None:
    job = Started("on_lost_rank.action=shrink", "on_lost_rank.least=2", outcomes=[LOST, LOST])
    with pytest.raises(RankLostError, match=r"^Ranks 1-2 were lost before the first step, which leaves 1, but .*least is 2;"):
        job.run()
    assert job.sizes == [3, 2]


def test_a_smaller_world_that_fits_no_grid_is_reported_with_the_loss() -> None:
    job = Started("on_lost_rank=shrink", outcomes=[LOST, ShapeError("A grid of 3 x 1 does not fit.")])
    with pytest.raises(RankLostError, match=r"^Rank 1 was lost .* cannot continue\.\nA grid of 3 x 1 does not fit\.$"):
        job.run()


def test_another_error_is_what_it_was() -> None:
    with pytest.raises(ShapeError, match=r"^A grid\.$"):
        Started("on_lost_rank=shrink", outcomes=[ShapeError("A grid.")]).run()


def test_the_configuration_that_is_read_first_is_kept() -> None:
    job = Started(outcomes=[None])
    job.run()
    assert isinstance(job._config, Config)


@pytest.mark.job
def test_what_a_trial_of_mpi_has_found_reaches_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once the configuration is read, and before MPI starts."""
    seen: list[Any] = []

    def tried(config: Config | None, launcher: Launcher) -> str:
        seen.append((config is not None and config.transport, job.world))
        return "aware"

    monkeypatch.setattr(job_process, "start_job", start.start_job)
    monkeypatch.setattr(messages, "try_transport", tried)
    file = tmp_path / "f.yaml"
    file.write_text(TEXT)
    job = ConfiguredProcess()
    try:
        session = job.start(file, ("transport=auto",))
    finally:
        job.exits.close()
    assert seen == [("auto", None)]
    assert session.device_messages == "aware"
