"""Progress by a thread, inside its block and under the lock only; and the mode that a measurement chooses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.progress import ProgressEngine, ProgressMode
from hpctrain.comm.waiting import ProgressThread

PATIENCE_SECONDS = 20.0


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "the thread did nothing"
        time.sleep(1e-4)


class Counter:
    def __init__(self) -> None:
        self.passes = 0

    def __call__(self) -> None:
        self.passes += 1


def test_the_progress_thread_polls_inside_its_block_only() -> None:
    count, lock = Counter(), threading.RLock()
    thread = ProgressThread(count, lock, interval_seconds=1e-5)
    try:
        for _ in range(20):
            before = count.passes
            time.sleep(1e-4)
            assert count.passes == before
            with thread:
                _until(lambda before=before: count.passes > before + 2)
    finally:
        thread.close()


def test_the_progress_thread_waits_for_the_lock() -> None:
    count, lock = Counter(), threading.RLock()
    thread = ProgressThread(count, lock, interval_seconds=1e-5)
    with thread:
        _until(lambda: count.passes > 0)
        with lock:
            before = count.passes
            time.sleep(2e-3)
            assert count.passes == before
        _until(lambda: count.passes > before)
    thread.close()


def test_what_it_raises_is_raised_at_the_end_of_the_block() -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError("the wire is cut")

    thread = ProgressThread(fail, threading.RLock())
    with pytest.raises(OSError, match="the wire is cut"), thread:
        assert failed.wait(PATIENCE_SECONDS)
    thread.close()


class Slow:
    """Complete at the n-th test by any thread; remembers the threads that did."""

    def __init__(self, tests: int) -> None:
        self.left = tests
        self.threads: set[str] = set()

    def test(self) -> bool:
        self.threads.add(threading.current_thread().name)
        self.left -= 1
        return self.left <= 0


def _engine() -> ProgressEngine:
    return ProgressEngine(rank=0, deadline_seconds=PATIENCE_SECONDS, abort=lambda code: None)


def test_messages_move_while_the_program_computes_but_complete_only_when_it_looks() -> None:
    engine = _engine()
    engine.start_thread()
    queue = engine.queue(SingleCommunicator())
    handle, started = Slow(10), []
    first = queue.post(lambda: handle, "first")

    def start_second() -> Slow:
        started.append(threading.current_thread())
        return Slow(1)

    second = queue.post(start_second, "second", after=[first])
    with engine.computing():
        _until(lambda: handle.left <= 0)
        assert not first.done  # the program has not looked
        assert not started
    engine.wait(second)
    assert first.done
    assert started == [threading.current_thread()]
    assert "hpctrain-progress" in handle.threads
    engine.stop_thread()


def test_without_a_thread_computing_changes_nothing() -> None:
    engine = _engine()
    handle = Slow(2)
    ticket = engine.queue(SingleCommunicator()).post(lambda: handle, "alone")
    with engine.computing():
        time.sleep(1e-3)
    assert handle.left == 1
    engine.operator_done()
    assert ticket.done


def test_where_progress_is_left_to_the_transport_operators_do_not_poll() -> None:
    engine = _engine()
    engine.polls_between_operators = False
    handle = Slow(2)
    ticket = engine.queue(SingleCommunicator()).post(lambda: handle, "alone")
    engine.operator_done()
    assert not ticket.done
    engine.wait(ticket)
    assert ticket.done


def test_queues_of_one_name_are_distinguished() -> None:
    engine = _engine()
    comms = [SingleCommunicator("column"), SingleCommunicator("row"), SingleCommunicator("column")]
    names = [engine.queue(comm).name for comm in comms]
    assert names == ["column", "row", "column 2"]
    assert list(engine.communicators().values()) == comms


NONE, TEST, THREAD = ProgressMode.NONE, ProgressMode.TEST, ProgressMode.THREAD


def test_a_mode_is_applied_and_taken_back() -> None:
    engine = ProgressEngine(rank=0, deadline_seconds=9.0, abort=lambda code: None)
    engine.set_mode(NONE)
    assert not engine.polls_between_operators
    engine.set_mode(THREAD)
    assert engine.polls_between_operators
    block = engine.computing()
    engine.set_mode(THREAD)
    assert engine.computing() is block  # one thread, not two
    engine.set_mode(TEST)
    assert engine.polls_between_operators
    assert engine.computing() is not block
