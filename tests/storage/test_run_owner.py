"""A run has at most one living owner, however many processes contend for it, and a dead owner blocks none of them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import RunOwnedError
from hpctrain.launch import process_mark
from hpctrain.launch.process_mark import ProcessMark
from hpctrain.launch.scheduler import SchedulerJob
from hpctrain.storage import run_owner
from hpctrain.storage.run_owner import Contender, Owner, Ownership, living_owner, owned, owners, run_of, was_owned_by_job
from tests.support.unmarked_run import make_unmarked

HERE = process_mark.own()
#: its number is this process's, which has another start: the number has come again
DEAD = replace(HERE, begun="1")
ELSEWHERE = ProcessMark(7, "5", "other-12345678")
JOB = SchedulerJob("Slurm", "41", "c", "41", 1)


class Clock:
    """A clock that advances by a fixed step at each call."""

    def __init__(self, step: float = 0.5) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def put(run: Path, mark: ProcessMark, number: int = 1, **facts: object) -> Path:
    """Write the record of an owner without signs of life, and return its path."""
    (run / run_owner.FOLDER).mkdir(parents=True, exist_ok=True)
    owner = Owner(number, f"t{number}", str(mark), "n1", "2026-01-01 00:00:00 UTC", "hpctrain train", **facts)
    assert run_owner._make(run, owner)
    return run_owner._path(run, number)


def beat(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + run_owner._last_line({"beat": number}))


def last(contender: Contender, looks: int) -> Ownership | None:
    """Return the ownership if one of this number of attempts succeeds, else None."""
    for _ in range(looks):
        if (ownership := contender.attempt()) is not None:
            return ownership
    return None


def test_one_of_many_takes_over_from_a_dead_owner(tmp_path: Path) -> None:
    put(tmp_path, DEAD)

    def contend(number: int) -> Ownership | None:
        try:
            return Contender(tmp_path, f"command {number}").attempt()
        except RunOwnedError:
            return None

    for taken in range(2, 6):
        with ThreadPoolExecutor(8) as pool:
            [ownership] = [each for each in pool.map(contend, range(8)) if each is not None]
        assert [owner.number for owner in owners(tmp_path)] == list(range(1, taken + 1))
        with pytest.raises(RunOwnedError, match=f"process {os.getpid()} on "):
            Contender(tmp_path, "another").attempt()
        ownership.release()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["dead", "released", "silent", "damaged"]), max_size=4), st.booleans())
def test_whatever_came_before_a_run_has_one_owner(tmp_path_factory: pytest.TempPathFactory, past: list[str], lives: bool) -> None:
    run = tmp_path_factory.mktemp("run")
    for number, kind in enumerate(past, 1):
        path = put(run, ELSEWHERE if kind == "silent" else DEAD, number)
        if kind == "released":
            path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + run_owner._last_line({"released": 3}))
        elif kind == "damaged":
            path.write_bytes(b"\xff{")
    if lives:
        put(run, HERE, len(past) + 1)
        with pytest.raises(RunOwnedError, match=r"being written to by hpctrain train, process \d+ on n1, since 2026-01-01"):
            Contender(run, "another").attempt()
        return
    waits = bool(past) and past[-1] in ("silent", "damaged")
    contender = Contender(run, "another", clock=Clock())
    first = contender.attempt()
    assert (first is None) == waits
    ownership = first or last(contender, 200)
    assert ownership is not None
    assert ownership.owner.number == len(past) + 1
    with pytest.raises(RunOwnedError):
        Contender(run, "third").attempt()
    ownership.release()
    with owned(run, "fourth"):
        assert owners(run)[-1].command == "fourth"


def test_an_owner_on_another_machine_is_judged_by_change_and_by_no_clock_of_its_own(tmp_path: Path) -> None:
    path = put(tmp_path, ELSEWHERE)
    os.utime(path, (4e9, 4e9))  # its clock is years ahead
    contender = Contender(tmp_path, "another", clock=Clock())
    assert last(contender, 100) is None  # 50 s
    beat(path, 1)
    with pytest.raises(RunOwnedError):
        contender.attempt()
    contender = Contender(tmp_path, "another", clock=Clock())
    assert last(contender, 60) is None
    ownership = last(contender, 120)
    assert ownership is not None
    ownership.release()


def test_a_process_that_was_stopped_has_not_watched_meanwhile(tmp_path: Path) -> None:
    put(tmp_path, ELSEWHERE)
    contender = Contender(tmp_path, "another", clock=Clock(3600.0))
    assert last(contender, 20) is None


@pytest.mark.parametrize(("restart", "at_once"), [(2, True), (1, False), (0, False)])
def test_a_job_that_is_queued_again_is_not_kept_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: int, at_once: bool
) -> None:
    """A higher count of restarts takes over at once. The same count is another step of the allocation, and waits."""
    put(tmp_path, ELSEWHERE, job=JOB)
    environment = {"SLURM_JOB_ID": "41", "SLURM_CLUSTER_NAME": "c", "SLURM_RESTART_COUNT": str(restart)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ownership = Contender(tmp_path, "hpctrain train").attempt()
    assert (ownership is not None) == at_once
    if ownership is not None:
        ownership.release()
    assert was_owned_by_job(tmp_path, replace(JOB, restart=restart))
    assert not was_owned_by_job(tmp_path, replace(JOB, chain="42"))
    assert not was_owned_by_job(tmp_path, SchedulerJob())


@pytest.mark.parametrize(("answer", "taken"), [(False, True), (None, False)])
def test_the_scheduler_is_asked_about_a_job_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bool | None, taken: bool
) -> None:
    put(tmp_path, ELSEWHERE, job=JOB)
    monkeypatch.setattr(SchedulerJob, "lives", lambda self: answer if self == JOB else None)
    ownership = Contender(tmp_path, "hpctrain train").attempt()
    assert (ownership is not None) == taken
    if ownership is not None:
        ownership.release()
    monkeypatch.setattr(SchedulerJob, "lives", lambda self: True)  # suspended
    if not taken:
        with pytest.raises(RunOwnedError, match="of Slurm job 41, since"):
            Contender(tmp_path, "hpctrain train").attempt()


def test_ranks_that_are_left_take_over_from_the_one_that_is_lost(tmp_path: Path) -> None:
    put(tmp_path, DEAD, outlives=True)
    assert Contender(tmp_path, "another job").attempt() is None
    ownership = Contender(tmp_path, "hpctrain train", predecessor="t1").attempt()
    assert ownership is not None
    ownership.release()


def test_a_copy_of_a_run_is_owned_by_nobody(tmp_path: Path) -> None:
    put(tmp_path / "run", HERE)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(RunOwnedError):
        Contender(tmp_path / "run", "another").attempt()
    ownership = last(Contender(tmp_path / "copy", "another", clock=Clock()), 200)
    assert ownership is not None
    ownership.release()


def test_a_file_system_without_links_has_one_owner_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    ownership = Contender(tmp_path, "first").attempt()
    assert ownership is not None
    with pytest.raises(RunOwnedError, match="written to by first"):
        Contender(tmp_path, "second").attempt()
    assert living_owner(tmp_path) == ownership.owner
    ownership.release()
    assert living_owner(tmp_path) is None


def test_an_owner_shows_signs_of_life_and_writes_nothing_once_it_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_owner, "BEAT_SECONDS", 0.01)
    ownership = Contender(tmp_path, "first").attempt()
    assert ownership is not None
    path = run_owner._path(tmp_path, 1)
    before = path.read_bytes()
    while path.read_bytes() == before:
        pass
    assert list(json.loads(path.read_bytes().splitlines()[1])) == ["beat"]
    ownership.require()
    put(tmp_path, ELSEWHERE, 2)
    with pytest.raises(RunOwnedError, match="was taken over by hpctrain train, process 7 on n1"):
        ownership.require()
    ownership.release()


def test_the_record_comes_back_where_the_directory_was_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    ownership = Contender(run, "first").attempt()
    assert ownership is not None
    shutil.rmtree(run)
    ownership.require()
    ownership.restore()
    with pytest.raises(RunOwnedError):
        Contender(run, "second").attempt()
    ownership.release()


def test_the_run_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    assert run_of(tmp_path / "run" / "checkpoints") is None
    make_unmarked(tmp_path / "run", "name: a\n")
    assert run_of(tmp_path / "run" / "checkpoints") == run_of(tmp_path / "run") == tmp_path / "run"
    assert run_of(tmp_path) is None
