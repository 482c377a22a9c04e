"""Checkpoints in the background, on virtual ranks: all know alike how it goes on, whatever happens to whose part."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.base import Communicator, SingleCommunicator
from hpctrain.core.errors import CheckpointError, CheckpointRemovedError
from hpctrain.flight.recorder import FlightNotes
from hpctrain.storage.atomic_write import not_written
from hpctrain.training.saving import BackgroundWriter, Saver, Writing, shards
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.recorded import Heard

RANKS = 3


def saver_of(comm: Communicator, reporter: Heard, *, asynchronous: bool = True, deadline: float = 60.0) -> Saver:
    return Saver(comm, FlightNotes(None), reporter, asynchronous=asynchronous, deadline_seconds=deadline)


def begun(comm: Communicator, reporter: Heard, own: Callable[[], Any] | None, *, deadline: float = 60.0) -> Saver:
    """A saver that writes the checkpoint of step 5."""
    saver = saver_of(comm, reporter, deadline=deadline)
    assert saver.ready(5)
    saver.begin(Writing(5, Path("c"), own))
    return saver


def step(comm: ThreadCommunicator, saver: Saver) -> bool:
    """Hear the news as a training step does; whether ranks exchanged their states."""
    total = sum(comm.allgather_object(saver.status_flag()))
    if total >= saver.size:
        saver.exchange_status()
    return total >= saver.size


def steps_until(comm: ThreadCommunicator, saver: Saver, done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not comm.broadcast_object(done()):
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.002)
        step(comm, saver)


def on_each(work: Callable[[ThreadCommunicator, Heard], Any]) -> list[Any]:
    return run_virtual(RANKS, lambda comm: work(comm, Heard()), deadline_seconds=60)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_is_published_once_every_rank_has_written_its_part(asynchronous: bool) -> None:
    go, published = threading.Event(), []
    if not asynchronous:
        go.set()

    def work(comm: ThreadCommunicator, reporter: Heard) -> int:
        saver = saver_of(comm, reporter, asynchronous=asynchronous)
        own = (lambda: go.wait(30) and comm.rank) if comm.rank == 1 else (lambda: comm.rank)
        assert saver.ready(5)
        saver.begin(Writing(5, Path("c"), own, published.append))
        if asynchronous:
            for _ in range(5):
                assert not step(comm, saver)
            assert published == []
            comm.allgather_object(None)
            go.set()
            steps_until(comm, saver, lambda: bool(published))
        saver.finish()
        assert reporter.lines == []
        return saver.status_flag()

    assert on_each(work) == [0] * RANKS
    assert published == [[0, 1, 2]]


def test_copies_of_tensors_are_let_go_as_soon_as_they_are_written() -> None:
    """They are as large as the parameters with their optimizer's state."""
    copies = np.zeros(3)
    alive = weakref.ref(copies)
    saver = begun(SingleCommunicator(), Heard(), partial(np.sum, copies))
    del copies
    end = time.monotonic() + 30
    while saver.status_flag() == 0 and time.monotonic() < end:
        time.sleep(0.002)
    saver.exchange_status()
    assert alive() is None
    saver.finish()


def test_one_whose_parts_are_written_at_once_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fast disk work is done before anybody asks how it goes on."""
    published, start = [], BackgroundWriter.start

    def start_and_end(writer: BackgroundWriter, work: Callable[[], Any]) -> None:
        start(writer, work)
        assert writer.wait(30)

    monkeypatch.setattr(BackgroundWriter, "start", start_and_end)

    def work(comm: ThreadCommunicator, reporter: Heard) -> list[str]:
        saver = saver_of(comm, reporter)
        for number in (5, 6):
            assert saver.ready(number)
            saver.begin(Writing(number, Path("c"), lambda: comm.rank, lambda results: published.append(results)))
        saver.finish()
        return reporter.lines

    assert on_each(work) == [[]] * RANKS
    assert published == [[0, 1, 2]] * 2


def test_a_failure_is_reported_once_on_all_ranks_and_tried_again() -> None:
    tries: list[int] = []

    def full() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise CheckpointError("There is no room.")

    def work(comm: ThreadCommunicator, reporter: Heard) -> list[str]:
        saver = begun(comm, reporter, full if comm.rank == 2 else None)
        steps_until(comm, saver, lambda: len(tries) == 3)
        saver.finish()
        [(kind, record)] = reporter.records
        assert (kind, record["step"]) == ("checkpoint", 5)
        return reporter.lines

    first, *others = on_each(work)
    assert first == ["warning: There is no room. (on rank 2 of 3) The write is repeated while the run continues."]
    assert others == [first, first]


def test_the_next_one_takes_the_place_of_one_that_cannot_be_written() -> None:
    written: list[int] = []

    def refuse() -> None:
        raise CheckpointError("There is no room.")

    def work(comm: ThreadCommunicator, reporter: Heard) -> list[str]:
        saver = begun(comm, reporter, refuse if comm.rank == 0 else None)
        assert saver.ready(6)
        saver.begin(Writing(6, Path("d"), (lambda: written.append(6)) if comm.rank == 0 else None))
        saver.finish()
        return reporter.lines

    for lines in on_each(work):
        assert lines[1] == "warning: The checkpoint of step 5 is abandoned for the checkpoint of step 6."
    assert written == [6]


def test_the_end_of_a_run_without_its_last_checkpoint_is_an_error_on_all_ranks() -> None:
    tries: list[int] = []

    def refuse() -> None:
        tries.append(1)
        raise CheckpointError("There is no room.")

    def work(comm: ThreadCommunicator, reporter: Heard) -> str:
        saver = begun(comm, reporter, refuse if comm.rank == 1 else None)
        with pytest.raises(CheckpointError) as caught:
            saver.finish()
        return str(caught.value)

    assert on_each(work) == ["There is no room."] * RANKS
    assert len(tries) == 2


def test_a_disk_that_hangs_is_reported_once_leaves_checkpoints_out_and_is_given_up_at_the_end() -> None:
    release = threading.Event()

    def work(comm: ThreadCommunicator, reporter: Heard) -> list[str]:
        saver = begun(comm, reporter, (lambda: release.wait(60)) if comm.rank == 1 else None, deadline=0.3)
        steps_until(comm, saver, lambda: bool(reporter.lines))
        for _ in range(20):
            assert not step(comm, saver)
        begin = time.monotonic()
        assert not saver.ready(6)
        assert time.monotonic() - begin < 5
        with pytest.raises(CheckpointError, match=r"deadline of 0.3 s at the end of the run \(on rank 1 of 3\)") as caught:
            saver.finish()
        assert caught.value.reported_by == 0
        return reporter.lines

    for lines in on_each(work):
        assert len(lines) == 2
        assert "step 5 is not written after 0 s (on rank 1 of 3); the run continues" in lines[0]
        assert lines[1].startswith("warning: The checkpoint of step 6 was skipped, because the checkpoint of step 5")
    release.set()


def test_a_last_checkpoint_that_was_left_out_is_an_error_too() -> None:
    release = threading.Event()

    def work(comm: ThreadCommunicator, reporter: Heard) -> None:
        saver = begun(comm, reporter, (lambda: release.wait(60)) if comm.rank == 0 else None, deadline=0.2)
        assert not saver.ready(6)
        comm.allgather_object(None)
        release.set()
        with pytest.raises(CheckpointError, match=r"checkpoint of step 6 was skipped, because .* was still") as caught:
            saver.finish()
        assert caught.value.reported_by == 0

    on_each(work)


def test_an_error_that_is_a_bug_is_raised_in_the_program() -> None:
    def work(comm: ThreadCommunicator, reporter: Heard) -> None:
        saver = begun(comm, reporter, lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            steps_until(comm, saver, lambda: False)

    run_virtual(1, lambda comm: work(comm, Heard()))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("times", [2, 1000])
def test_files_that_another_process_removes_end_no_run(asynchronous: bool, times: int) -> None:
    """The checkpoint is tried again. If it still fails, it is reported and left out, and the next one is written."""

    def work(comm: ThreadCommunicator, reporter: Heard) -> list[str]:
        saver, failures = saver_of(comm, reporter, asynchronous=asynchronous, deadline=1.0), iter(range(times))

        def own() -> int:
            if comm.rank == 1 and next(failures, None) is not None:
                raise CheckpointRemovedError("The shard s was removed.")
            return comm.rank

        assert saver.ready(5)
        saver.begin(Writing(5, Path("c"), own, published.append if comm.rank == 0 else lambda results: None))
        saver.finish()
        assert saver.ready(6)
        saver.begin(Writing(6, Path("d"), lambda: comm.rank, published.append))
        saver.finish()
        return reporter.lines

    published: list[Any] = []
    lines = on_each(work)[0]
    written = 1 if times == 1000 or asynchronous else 2
    assert len(published) >= written
    if times == 1000:
        assert any("without the checkpoint of step 5" in line for line in lines)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_checkpoint_that_is_given_up_leaves_no_shards(tmp_path: Path, asynchronous: bool, last: bool) -> None:
    """A full disk would otherwise stay full: shards that were written are useless without the one that failed."""
    full = [True] * RANKS

    def work(comm: ThreadCommunicator, reporter: Heard) -> None:
        saver = saver_of(comm, reporter, asynchronous=asynchronous)

        def prepare() -> None:
            if comm.rank == 1 and full[comm.rank]:
                raise CheckpointError("The disk is full.")

        def write(number: int, *, waits: bool = True) -> None:
            assert saver.ready(number)
            saver.begin(shards(comm, {}, {}, number, tmp_path / f"checkpoint-{number:08d}.shards", prepare=prepare))
            if waits:
                saver.finish()

        if last or not asynchronous:
            with pytest.raises(CheckpointError, match="The disk is full"):
                write(5)
            comm.allgather_object(None)  # until all ranks have discarded their shards
            assert comm.allgather_object(list(tmp_path.iterdir())) == [[]] * RANKS
        else:
            write(5, waits=False)
            steps_until(comm, saver, lambda: bool(reporter.lines))
            full[comm.rank] = False
            write(6)
            assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000006.shards"]

    on_each(work)


def test_a_removed_directory_is_distinguished_from_a_disk_that_fails(tmp_path: Path) -> None:
    assert isinstance(not_written("x", FileNotFoundError(2, "gone")), CheckpointRemovedError)
    assert not isinstance(not_written("x", OSError(28, "No space left on device")), CheckpointRemovedError)
