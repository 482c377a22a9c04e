"""Progress by a thread, inside its block and under the lock only; and the mode that a measurement chooses."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.averaging.base import check_at_least_one
from hpctrain.comm.base import Complete, SingleCommunicator
from hpctrain.comm.progress import LocalEvent, ProgressEngine, Ticket
from hpctrain.comm.progress_mode import OverlapMeasurement, ProgressMode, apply, choose, measure
from hpctrain.comm.waiting import ProgressThread
from hpctrain.core.errors import CommunicationTimeoutError
from hpctrain.launch.process_end import DEADLINE
from hpctrain.trace.tracer import THREAD_TRACK, Category, Tracer
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.interleaved_thread import InterleavedThread

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


# -- a thread that posts -----------------------------------------------------------------------------------------------------
def test_a_posting_thread_completes_and_starts_in_order_and_the_program_only_wakes_it() -> None:
    engine = _engine()
    engine.start_thread(posts=True)
    queue, event, started = engine.queue(SingleCommunicator()), LocalEvent("gradient"), list[tuple[int, int]]()

    def start(number: int) -> Slow:
        started.append((number, threading.get_ident()))
        return Slow(3)

    with engine.computing():
        tickets: list[Ticket] = []
        for number in range(6):
            tickets.append(queue.post(lambda number=number: start(number), "one", [event, *tickets[-1:]]))  # type: ignore[misc]
        assert started == []
        event.happen()
        engine.poll()
        _until(lambda: tickets[-1].done)
    assert [number for number, _ in started] == list(range(6))
    assert threading.get_ident() not in {thread for _, thread in started}
    engine.stop_thread()


def test_outside_of_the_block_and_in_a_wait_the_program_does_all_itself() -> None:
    engine = _engine()
    engine.start_thread(posts=True)
    queue, threads = engine.queue(SingleCommunicator()), list[str]()

    def start() -> Slow:
        threads.append(threading.current_thread().name)
        return Slow(2)

    first = queue.post(start, "first")
    engine.poll()
    assert first.done
    event = LocalEvent("gradient")
    second = queue.post(start, "second", [event])
    with engine.computing(), engine._lock:  # no pass lies between the event and the wait
        event.happen()
        engine.wait(second)
    assert threads == [threading.current_thread().name] * 2
    engine.stop_thread()


def _failing(engine: ProgressEngine, event: LocalEvent) -> tuple[Ticket, OSError]:
    failure = OSError("the wire is cut")

    def fail() -> Complete:
        raise failure

    return engine.queue(SingleCommunicator()).post(fail, "failing", [event]), failure


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["poll", "wait", "wait for a handle", "end of the block"])
def test_an_error_in_a_start_reaches_the_program_as_it_is_and_once(place: str) -> None:
    engine = _engine()
    engine.start_thread(posts=True)
    event = LocalEvent("gradient")
    ticket, failure = _failing(engine, event)
    thread = engine._thread
    assert thread is not None

    def compute() -> None:
        with engine.computing():
            event.happen()
            engine.poll()
            _until(lambda: thread._failure is not None)
            if place == "poll":
                engine.operator_done()
            elif place == "wait":
                engine.wait(ticket)
            elif place == "wait for a handle":
                engine.wait_handle(Slow(4), "a halo")

    with pytest.raises(OSError, match="the wire is cut") as raised:
        compute()
    assert raised.value is failure
    with engine.computing():
        engine.poll()
    engine.stop_thread()


def test_a_start_on_the_thread_must_not_wait_either() -> None:
    engine = _engine()
    engine.start_thread(posts=True)
    event = LocalEvent("gradient")

    def start() -> Complete:
        engine.wait_handle(Slow(5), "inside a start")
        return Complete()

    engine.queue(SingleCommunicator()).post(start, "outer", [event])
    thread = engine._thread
    assert thread is not None

    def compute() -> None:
        with engine.computing():
            event.happen()
            _until(lambda: thread._failure is not None)

    with pytest.raises(AssertionError, match="must not wait"):
        compute()
    engine.stop_thread()


def test_what_is_in_flight_when_the_thread_ends_is_completed_by_waits() -> None:
    engine = _engine()
    engine.start_thread(posts=True)
    queue, event = engine.queue(SingleCommunicator()), LocalEvent("gradient")
    handle = Slow(1 << 40)
    first = queue.post(lambda: handle, "first", [event])
    second = queue.post(lambda: Slow(2), "second", [first])
    with engine.computing():
        event.happen()
        _until(lambda: bool(handle.threads))
    engine.stop_thread()
    handle.left = 3
    engine.drain()
    assert first.done
    assert second.done


def test_a_thread_that_hangs_in_a_start_is_reported_at_the_deadline(tmp_path: object) -> None:
    codes, hung, event = list[int](), threading.Event(), LocalEvent("gradient")
    with open(f"{tmp_path}/report", "w+") as stream:
        engine = ProgressEngine(rank=3, deadline_seconds=0.2, abort=codes.append, stream=stream)
        engine.start_thread(posts=True)
        queue, inside = engine.queue(SingleCommunicator()), threading.Event()

        def hang() -> Complete:
            inside.set()
            hung.wait(PATIENCE_SECONDS)
            return Complete()

        ticket = queue.post(hang, "conv1.weight", [event])
        with engine.computing():
            event.happen()
            assert inside.wait(PATIENCE_SECONDS)
            with pytest.raises(CommunicationTimeoutError, match=r"conv1\.weight"):
                engine.wait(ticket)
            hung.set()
        engine.stop_thread()
        stream.seek(0)
        report = stream.read()
    assert codes == [DEADLINE]
    assert "in hang" in report  # the stack of the thread


def test_a_pass_has_its_owners_handling_of_floating_point_errors() -> None:
    engine = _engine()
    engine.start_thread(posts=True)
    event, seen = LocalEvent("gradient"), list[str]()
    ticket = engine.queue(SingleCommunicator()).post(lambda: seen.append(np.geterr()["over"]) or Complete(), "one", [event])
    with np.errstate(over="raise"), engine.computing():
        event.happen()
        _until(lambda: ticket.done)
    assert seen == ["raise"]
    engine.stop_thread()


def test_what_the_thread_does_is_recorded_next_to_the_program() -> None:
    tracer = Tracer(1000)
    engine = ProgressEngine(rank=0, deadline_seconds=PATIENCE_SECONDS, abort=lambda code: None, trace=tracer)
    engine.start_thread(posts=True)
    event = LocalEvent("gradient")

    def start() -> Complete:
        begin = engine.account.clock_ns()
        time.sleep(2e-3)
        engine.account.updated(begin, engine.account.clock_ns())
        tracer.add(Category.UPDATE, "conv.weight", begin, engine.account.clock_ns())
        return Complete()

    ticket = engine.queue(SingleCommunicator("row")).post(start, "conv.weight", [event])
    before = engine.account.seconds
    with engine.computing():
        event.happen()
        while not ticket.done:
            tracer.add(Category.WORK, "the program's own", tracer.clock_ns(), tracer.clock_ns())
            time.sleep(1e-4)
    engine.stop_thread()
    events = tracer.events()
    assert engine.account.seconds == before
    assert engine.account.thread_seconds > 0
    assert len(events.of(Category.UPDATE)) == 0
    of_thread = events.of(Category.THREAD)
    assert {events.names[index] for index in of_thread.name} == {"conv.weight", "posting and progress"}
    assert {events.tracks[index] for index in of_thread.track} == {THREAD_TRACK}
    (sent,) = events.of(Category.COMMUNICATION).track
    assert events.tracks[sent] == "row"
    assert len(events.of(Category.WORK)) > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(20))
def test_any_program_posts_in_order_whatever_thread_starts_an_operation(seed: int) -> None:
    """Real threads, with the interpreter's switches as often as it can."""
    chance = random.Random(seed)
    engine = _engine()
    engine.start_thread(posts=True)
    queues = [engine.queue(SingleCommunicator(name), chance.choice([None, 1, 2])) for name in "ab"]
    started: dict[str, list[int]] = {queue.name: [] for queue in queues}
    events, tickets = list[LocalEvent](), list[Ticket]()
    with engine.computing():
        for number in range(40):
            queue, event = chance.choice(queues), LocalEvent(f"event {number}")
            after = [event, *chance.sample(tickets, min(2, len(tickets)))]

            def start(number: int = number, name: str = queue.name, after: list[Ticket] = after) -> Slow:
                assert all(ticket.done for ticket in after)
                started[name].append(number)
                return Slow(1 + number % 4)

            tickets.append(queue.post(start, f"operation {number}", after))
            events.append(event)
            if chance.random() < 0.5:
                events[chance.randrange(len(events))].happen()
                engine.poll()
        for event in events:
            event.happen()
        if chance.random() < 0.5:
            engine.wait(chance.choice(tickets))
    engine.drain()
    engine.stop_thread()
    assert all(numbers == sorted(numbers) for numbers in started.values())
    assert sum(map(len, started.values())) == 40


def test_the_played_thread_makes_passes_between_lines_and_its_failures_reach_the_program() -> None:
    threads: list[InterleavedThread] = []

    def make(one_pass: Callable[[], None], lock: object) -> InterleavedThread:
        threads.append(InterleavedThread(one_pass, lock, seed=1, share=1.0))  # type: ignore[arg-type]
        return threads[0]

    engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None, make_thread=make)
    engine.start_thread(posts=True)
    event = LocalEvent("gradient")
    ticket, failure = _failing(engine, event)

    def compute() -> None:
        with engine.computing():
            check_at_least_one(lines_of_averaging=1)
            assert threads[0].passes > 0
            event.happen()
            check_at_least_one(more_of_them=1)

    with pytest.raises(OSError, match="the wire is cut") as raised:
        compute()
    assert raised.value is failure
    assert not ticket.done


NONE, TEST, THREAD = ProgressMode.NONE, ProgressMode.TEST, ProgressMode.THREAD


def _hiding(**times: tuple[float, ...]) -> OverlapMeasurement:
    return OverlapMeasurement(0.04, 0.04, 5e-3, 1 << 20, {ProgressMode(name): values for name, values in times.items()})


@pytest.mark.parametrize(
    ("times", "mode"),
    [
        ({"test": (50,) * 9, "none": (80,) * 9, "thread": (49, 50, 48) * 3}, TEST),  # not clearly better
        ({"test": (80,) * 9, "none": (80, 81, 80) * 3, "thread": (50, 52, 51) * 3}, THREAD),
        ({"test": (80,) * 9, "none": (45, 46, 45) * 3, "thread": (50, 52, 51) * 3}, NONE),  # the transport moves by itself
        ({"test": (80,) * 9, "none": (90,) * 9, "thread": (50, 99, 51) * 3}, TEST),  # often it was much worse
        ({"test": (80,) * 8 + (200,), "none": (90,) * 9, "thread": (79,) * 9}, TEST),  # one slow round decides nothing
        ({"test": (80,) * 9, "none": (90,) * 9}, TEST),  # no thread allowed
        ({"test": (80,) * 6, "none": (90,) * 6, "thread": (50,) * 6}, TEST),  # too few rounds
        ({"test": (80,) * 7, "none": (90,) * 7, "thread": (50,) * 7}, THREAD),
        ({"test": (80,) * 15, "none": (90,) * 15, "thread": (50,) * 13 + (99,) * 2}, THREAD),  # disturbed twice
        ({"test": (80,) * 15, "none": (90,) * 15, "thread": (50,) * 12 + (99,) * 3}, TEST),
        ({"test": (), "none": (), "thread": ()}, TEST),
    ],
)
def test_only_what_is_surely_better_is_chosen(times: dict[str, tuple[float, ...]], mode: ProgressMode) -> None:
    assert choose(_hiding(**times)) is mode


@pytest.mark.parametrize("mode", ProgressMode)
def test_a_mode_says_what_it_does_in_words(mode: ProgressMode) -> None:
    assert "move" in mode.in_words
    assert "test" not in mode.in_words


def test_the_hidden_share_is_of_the_smaller_of_both() -> None:
    found = OverlapMeasurement(0.03, 0.05, 5e-3, 1, {TEST: (0.05, 0.05, 0.09), NONE: (0.08,) * 3, THREAD: (0.065,) * 3})
    assert found.hidden(TEST) == pytest.approx(1.0)
    assert found.hidden(NONE) == pytest.approx(0.0)
    assert found.hidden(THREAD) == pytest.approx(0.5)
    assert "test hides 100%" in str(found)


def test_a_mode_is_applied_and_taken_back() -> None:
    engine = ProgressEngine(rank=0, deadline_seconds=9.0, abort=lambda code: None)
    apply(engine, NONE)
    assert not engine.polls_between_operators
    apply(engine, THREAD)
    assert engine.polls_between_operators
    block = engine.computing()
    apply(engine, THREAD)
    assert engine.computing() is block  # one thread, not two
    apply(engine, TEST)
    assert engine.polls_between_operators
    assert engine.computing() is not block


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_measurement_is_the_same_on_all_ranks(ranks: int) -> None:
    def work(comm: ThreadCommunicator) -> OverlapMeasurement:
        engine = ProgressEngine(rank=comm.rank, deadline_seconds=1e9, abort=comm.abort, sleep=lambda seconds: None)
        found = measure(comm, engine, [TEST, NONE], operator_seconds=1e-3, most_bytes=40_000)
        assert engine.polls_between_operators
        assert found is not None
        return found

    found = run_virtual(ranks, work)
    assert all(each == found[0] for each in found)
    assert found[0].by_round.keys() == {TEST, NONE}
    assert 4 <= found[0].message_bytes <= 40_000
    assert min(min(times) for times in found[0].by_round.values()) > 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_short_exchange_is_not_measured(ranks: int) -> None:
    def work(comm: ThreadCommunicator) -> OverlapMeasurement | None:
        engine = ProgressEngine(rank=comm.rank, deadline_seconds=1e9, abort=comm.abort, sleep=lambda seconds: None)
        return measure(comm, engine, [TEST, NONE], operator_seconds=1e-3, most_bytes=40_000, worth_seconds=3600)

    assert run_virtual(ranks, work) == [None] * ranks
