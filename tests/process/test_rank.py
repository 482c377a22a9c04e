"""A process of a job: its state at any point, the errors that it keeps, and what it undoes."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm import mpi
from hpctrain.comm.base import SingleCommunicator
from hpctrain.config.schema import Config
from hpctrain.core import log
from hpctrain.flight.ring import file_name, read
from hpctrain.job.flight_records import watched
from hpctrain.launch import shared_segments
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.process_end import End
from hpctrain.launch.shared_segments import Removed
from hpctrain.process.rank import RankProcess
from hpctrain.process.start import load_config
from hpctrain.run import messages

TEXT = "{model: small, data: {train: train.h5}, batch: 12, epochs: 1, optimizer: {name: sgd, lr: 0.1}, schedule: constant}"


def test_before_the_world_its_launcher_knows_the_rank() -> None:
    assert RankProcess(Launcher("none")).rank() == 0
    process = RankProcess(Launcher("some", rank=3))
    assert process.rank() == 3
    process.abort(1)  # there is no job to end


def test_a_process_alone_ends_well(tmp_path: Path) -> None:
    process = RankProcess(Launcher("none"))
    world = process.start_world(30.0)
    assert (process.rank(), world.size) == (0, 1)
    process.exits.enter_context(watched(process.flight, world, 30.0))
    process.flight.keep_in(tmp_path)
    process.finish()
    process.finish()
    assert read(tmp_path / file_name(0)).end is End.FINISHED
    with pytest.raises(SystemExit) as left:
        process.leave(85)
    assert left.value.code == 85


def test_the_first_error_stays_in_the_record(tmp_path: Path) -> None:
    process = RankProcess(Launcher("none"))
    process.exits.enter_context(watched(process.flight, process.start_world(30.0), 30.0))
    process.flight.keep_in(tmp_path)
    process.failed("mine alone")
    process.finish()
    record = read(tmp_path / file_name(0))
    assert (record.end, record.sentence) == (End.FAILED, "mine alone")


@pytest.mark.parametrize("left", [Removed(), Removed(2, 8192)])
@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_a_node_removes_what_dead_jobs_left_and_says_so_once(
    left: Removed, local_rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []
    monkeypatch.setattr(shared_segments, "announce", lambda: calls.append("announce"))
    monkeypatch.setattr(shared_segments, "remove_stale", lambda: calls.append("remove") or left)
    monkeypatch.setattr(mpi, "world", lambda *_: calls.append("start") or SingleCommunicator())
    monkeypatch.setattr(mpi, "describe", lambda: "an MPI")
    monkeypatch.setattr(shared_segments, "remember", lambda: calls.append("remember"))
    monkeypatch.setattr(shared_segments, "forget", lambda: calls.append("forget"))
    monkeypatch.setattr(log, "configure", lambda rank, size: None)
    monkeypatch.setattr(logging.getLogger("hpctrain"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", False)
    process = RankProcess(Launcher("some", rank=local_rank, local_rank=local_rank))
    with caplog.at_level(logging.DEBUG, logger="hpctrain"):
        process.start_world(30.0)
    process.finish()
    first = ["announce"] if local_rank else ["announce", "remove"]
    assert calls == [*first, "start", "remember", "forget"]
    assert caplog.messages == ([str(left)] if left.count and not local_rank else [])


@pytest.mark.job
def test_the_outcome_of_a_trial_of_mpi_reaches_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once the configuration is read, and before MPI starts."""
    seen: list[Any] = []

    def tried(config: Config | None, launcher: Launcher) -> str:
        seen.append((config is not None and config.transport, job.world))
        return "aware"

    monkeypatch.setattr(messages, "try_transport", tried)
    file = tmp_path / "f.yaml"
    file.write_text(TEXT)
    job = RankProcess()
    try:
        session = job.session(partial(load_config, file, ("transport=auto",)))
    finally:
        job.exits.close()
    assert seen == [("auto", None)]
    assert session.device_messages == "aware"
