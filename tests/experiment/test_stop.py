"""What a run says of the signal that ended it: alike on every rank, with the ranks that had it."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.experiment.stop import StopReason, kept_clause, stop_reason
from hpctrain.storage.run_directory import RunDirectory
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual


@pytest.mark.parametrize(
    ("ranks", "signals", "sentence"),
    [
        (3, {}, None),
        (3, {0: signal.SIGTERM, 1: signal.SIGTERM, 2: signal.SIGTERM}, "SIGTERM"),
        (3, {1: signal.SIGINT}, "SIGINT on rank 1"),
        (
            8,
            {0: signal.SIGTERM, 1: signal.SIGTERM, 2: signal.SIGTERM, 5: signal.SIGTERM, 6: signal.SIGINT},
            "SIGTERM on ranks 0-2, 5",
        ),
    ],
)
def test_the_lowest_rank_names_the_signal(ranks: int, signals: dict[int, signal.Signals], sentence: str | None) -> None:
    def reason(comm: ThreadCommunicator) -> StopReason | None:
        return stop_reason(comm, SimpleNamespace(request=signals.get(comm.rank)))  # type: ignore[arg-type]

    assert {None if said is None else str(said) for said in run_virtual(ranks, reason)} == {sentence}


def test_a_limit_is_a_reason_where_no_rank_had_a_signal() -> None:
    def reasons(comm: ThreadCommunicator) -> tuple[str, str]:
        limit = "max_time, 60 s" if comm.rank == 1 else None
        asked = SimpleNamespace(request=signal.SIGTERM if comm.rank == 2 else None)
        quiet = SimpleNamespace(request=None)
        return str(stop_reason(comm, quiet, limit)), str(stop_reason(comm, asked, limit))  # type: ignore[arg-type]

    assert set(run_virtual(3, reasons)) == {("max_time, 60 s", "SIGTERM on rank 2")}


def test_the_newest_checkpoint_is_named_where_a_run_ends_at_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert kept_clause(directory) == "; there is none of this run on the disk"
    directory.checkpoints.mkdir()
    for step in (5, 12):
        (directory.checkpoints / f"checkpoint-{step:08d}.h5").touch()
    assert kept_clause(directory) == f"; the newest one on the disk is {directory.checkpoints}/checkpoint-00000012.h5"
