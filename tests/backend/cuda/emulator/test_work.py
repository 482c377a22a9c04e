"""Queues of work: done in their order, after their marks, and all that is waited for."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.cuda.emulator.work import Mark, Work, WorkScheduler


def _scheduler(queues: int, seed: int) -> WorkScheduler:
    scheduler = WorkScheduler(random.Random(seed))
    for i in range(queues):
        scheduler.queue(f"queue {i}")
    return scheduler


#: pieces of work: (queue, the piece issued so long before that it comes after)
PIECES = st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(1, 6)), max_size=20)


@given(pieces=PIECES, seed=st.integers(0, 100))
def test_marks_are_kept_in_every_order(pieces: list[tuple[int, int | None]], seed: int) -> None:
    scheduler = _scheduler(3, seed)
    done: list[int] = []
    marks: list[Mark] = []
    for i, (queue, before) in enumerate(pieces):
        after = marks[i - before] if before is not None and before <= i else None
        scheduler.append(scheduler.queues[queue], Work(str(i), partial(done.append, i), after=after))
        marks.append(scheduler.queues[queue].mark)
        scheduler.run_some()
    if marks:
        scheduler.run_until(marks[len(marks) // 2])
        assert len(marks) // 2 in done
    scheduler.run_all()
    assert sorted(done) == list(range(len(pieces)))
    for i, (queue, before) in enumerate(pieces):
        earlier = [j for j in range(i) if pieces[j][0] == queue] + ([i - before] if before is not None and before <= i else [])
        assert all(done.index(j) < done.index(i) for j in earlier)


def test_work_is_late_and_in_odd_orders() -> None:
    late, orders = 0, set()
    for seed in range(100):
        scheduler = _scheduler(2, seed)
        done: list[int] = []
        for i in range(4):
            scheduler.append(scheduler.queues[i % 2], Work(str(i), partial(done.append, i)))
            scheduler.run_some()
        late += len(done) < 4
        scheduler.run_until(scheduler.queues[0].mark)
        late += len(done) < 4
        scheduler.run_all()
        orders.add(tuple(done))
    assert late > 100
    assert len(orders) == 6  # all there are


def test_a_deadlock_names_both_waits() -> None:
    for run in (lambda scheduler: scheduler.run_all(), lambda scheduler: scheduler.run_until(scheduler.queues[0].mark)):
        for seed in range(4):
            scheduler = _scheduler(2, seed)
            first, second = scheduler.queues
            scheduler.append(first, Work("a wait for event 1", after=Mark(second, 1)))
            scheduler.append(second, Work("a wait for event 2", after=Mark(first, 1)))
            with pytest.raises(EmulatedDeviceError, match=r"queue 0 in a wait for event 1, queue 1 in a wait for event 2"):
                run(scheduler)


def test_memory_of_the_host_is_pending_until_its_work_is_done() -> None:
    scheduler = _scheduler(1, 0)
    memory = np.zeros(10)
    scheduler.append(scheduler.queues[0], Work("upload", reads=(memory[:4],)))
    assert scheduler.is_pending(memory[3:5])
    assert not scheduler.is_pending(memory[4:])
    scheduler.run_all()
    assert not scheduler.is_pending(memory)


def test_failed_work_is_over() -> None:
    scheduler = _scheduler(1, 0)
    scheduler.append(scheduler.queues[0], Work("broken", lambda: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        scheduler.run_all()
    assert scheduler.failed
    scheduler.run_all()
