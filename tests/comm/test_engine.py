"""The engine's laws: order of posting, dependencies, windows, waits, threads, modes, accounts; handles and buffers of MPI."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.comm.base import Complete, SingleCommunicator, piece
from hpctrain.comm.mpi import MpiBuffers, MpiHandle, dtype_char, not_empty
from hpctrain.comm.progress import MessageAccount, PostingQueue, ProgressEngine, ProgressMode, Ticket
from hpctrain.comm.waiting import MORE_RANKS_THAN_CORES, ProgressThread, WaitPolicy
from hpctrain.core.errors import CommunicationTimeoutError
from hpctrain.core.text import place
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch.process_end import DEADLINE
from hpctrain.trace.tracer import Category, Tracer
from hpctrain_testing.run import wait_until
from tests.support.countdown import Countdown
from tests.support.sampling import amount


class Switch:
    """Complete once it is open."""

    def __init__(self) -> None:
        self.open = False

    def test(self) -> bool:
        return self.open

    def __str__(self) -> str:
        return "a switch"


def _engine(**options: object) -> ProgressEngine:
    settings_: dict = {"rank": 5, "deadline_seconds": 30.0, "abort": lambda code: None} | options
    return ProgressEngine(**settings_)


def _never() -> bool:
    raise AssertionError("must not start")


@pytest.mark.slow
@settings(max_examples=amount(30, 60), deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 3)))
def test_any_program_runs_in_posting_order_after_its_dependencies(chance: random.Random, queues: int, window: int | None) -> None:
    engine = _engine()
    made = [engine.queue(SingleCommunicator(f"q{i}"), window) for i in range(queues)]
    started: dict[str, list[int]] = {queue.name: [] for queue in made}
    flying = {queue.name: 0 for queue in made}
    tickets: list[Ticket] = []

    class Watched(Countdown):
        def __init__(self, tests: int, name: str) -> None:
            super().__init__(tests)
            self.name = name
            flying[name] += 1
            assert window is None or flying[name] <= window

        def test(self) -> bool:
            complete = super().test()
            flying[self.name] -= complete
            return complete

    for number in range(chance.randrange(1, 30)):
        queue = chance.choice(made)
        after = chance.sample(tickets, chance.randrange(min(3, len(tickets) + 1)))

        def start(number: int = number, name: str = queue.name, after: list[Ticket] = after) -> Watched:
            assert all(ticket.done for ticket in after)
            started[name].append(number)
            return Watched(chance.randrange(1, 6), name)

        tickets.append(queue.post(start, f"operation {number}", after))
        if chance.random() < 0.3:
            engine.poll()
    engine.wait(chance.sample(tickets, len(tickets)))
    assert all(ticket.done for ticket in tickets)
    assert sum(len(numbers) for numbers in started.values()) == len(tickets)
    assert all(numbers == sorted(numbers) for numbers in started.values())
    assert all(queue.idle for queue in made)


def test_waiting_for_a_handle_outside_drives_the_queues() -> None:
    engine = _engine()
    ticket = engine.queue(SingleCommunicator()).post(lambda: Countdown(3), "inside")
    engine.wait_handle(Countdown(50), "outside")
    assert ticket.done


def test_drain_empties_every_queue() -> None:
    engine = _engine()
    queues = [engine.queue(SingleCommunicator(name)) for name in "ab"]
    last = [queues[0].post(lambda: Countdown(9), "x")]
    for turn in range(6):
        last.append(queues[turn % 2].post(lambda: Countdown(4), f"{turn}", after=last[-1:]))
    engine.drain()
    assert all(ticket.done for ticket in last)


def test_a_start_may_post_and_what_it_posts_comes_after_it() -> None:
    engine = _engine()
    queue, other = engine.queue(SingleCommunicator("one")), engine.queue(SingleCommunicator("two"))
    begun: list[str] = []

    def start() -> Countdown:
        queue.post(lambda: begun.append("inner") or Countdown(1), "inner")
        other.post(lambda: begun.append("elsewhere") or Countdown(1), "elsewhere")
        begun.append("outer")
        return Countdown(1)

    queue.post(start, "outer")
    engine.drain()
    assert begun.index("outer") < begun.index("inner")
    assert sorted(begun) == ["elsewhere", "inner", "outer"]


def test_a_start_must_not_wait() -> None:
    engine = _engine()
    queue = engine.queue(SingleCommunicator())

    def start() -> Countdown:
        engine.wait_handle(Countdown(5), "inside a start")
        return Countdown(1)

    with pytest.raises(AssertionError, match="must not wait"):
        queue.post(start, "outer")


def test_sequence_numbers_count_per_queue_for_ever() -> None:
    engine = _engine()
    split, data = SingleCommunicator("split"), SingleCommunicator("data")
    assert engine.queue(split) is engine.queue(split)
    for expected in range(5):
        ticket = engine.queue(split).post(lambda: Countdown(1), "x")
        assert (ticket.sequence, ticket.queue_name) == (expected, "split")
    assert engine.queue(data).post(lambda: Countdown(1), "x").sequence == 0


def test_nothing_is_kept_of_what_is_complete() -> None:
    engine = _engine()
    queue = engine.queue(SingleCommunicator())
    first = last = queue.post(lambda: Countdown(3), "first")
    for _ in range(100):
        last = queue.post(lambda: Countdown(3), "next", after=[last])
    engine.wait(last)
    assert queue.unfinished() == ()
    assert first.handle is None
    assert first._after == last._after == []


class Clock:
    """Time that passes only where somebody sleeps or looks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 100e-6
        self.now += seconds
        self.slept += 1


def _timed_out(tmp_path: Path, wait_for_handle: bool) -> tuple[str, list[int], Clock]:
    codes: list[int] = []
    clock = Clock()
    with (tmp_path / "report").open("w+") as stream:
        engine = _engine(deadline_seconds=2.0, abort=codes.append, clock=clock, sleep=clock.sleep, stream=stream)
        split, data = engine.queue(SingleCommunicator("split")), engine.queue(SingleCommunicator("data"))
        engine.wait(split.post(lambda: Countdown(3), "done long ago"))
        lost = split.post(Switch, "conv1.weight")
        target = data.post(_never, "fc.weight", after=[lost])  # type: ignore[arg-type]
        data.post(_never, "fc.bias")  # type: ignore[arg-type]
        wait = (lambda: engine.wait_handle(Switch(), "a halo")) if wait_for_handle else (lambda: engine.wait(target))
        with pytest.raises(CommunicationTimeoutError, match="deadline of 2 s"):
            wait()
        stream.seek(0)
        return stream.read(), codes, clock


def test_past_the_deadline_everything_is_reported_and_the_job_ends(tmp_path: Path) -> None:
    report, codes, clock = _timed_out(tmp_path, wait_for_handle=False)
    assert codes == [DEADLINE]
    assert 2.0 < clock.now < 2.2
    lines = report.splitlines()
    assert lines[:5] == [
        f"{place(5)}no completion within the deadline of 2 s: fc.weight: queue data, sequence number 0, not started, "
        "comes after conv1.weight (split 1)",
        f"{place(5)}unfinished on this rank:",
        f"{place(5)}  conv1.weight: queue split, sequence number 1, operation a switch, in flight",
        f"{place(5)}  fc.weight: queue data, sequence number 0, not started, comes after conv1.weight (split 1)",
        f"{place(5)}  fc.bias: queue data, sequence number 1, not started, after the queue's head",
    ]
    assert "in _timed_out" in report
    assert "done long ago" not in report


def test_a_job_that_was_suspended_has_not_waited() -> None:
    """An hour in which no process could look, as under a scheduler that stops all processes and continues them."""
    clock, codes = Clock(), []

    class Suspended(Countdown):
        def test(self) -> bool:
            clock.now += 3600.0 if self.left == 2 else 0.0
            return super().test()

    engine = _engine(deadline_seconds=2.0, abort=codes.append, clock=clock, sleep=clock.sleep)
    engine.wait_handle(Suspended(4), "long")
    assert codes == []
    assert engine.waited_seconds > 3600.0


def test_a_handle_outside_the_queues_has_the_deadline_too(tmp_path: Path) -> None:
    report, codes, _ = _timed_out(tmp_path, wait_for_handle=True)
    assert codes == [DEADLINE]
    assert "a halo: outside the queues, operation a switch" in report
    assert "conv1.weight" in report


def test_a_long_wait_sleeps_and_is_counted() -> None:
    clock = Clock()
    engine = _engine(clock=clock, sleep=clock.sleep)
    engine.wait_handle(Countdown(300), "long")
    assert clock.slept > 100
    assert clock.now / 2 < engine.waited_seconds <= clock.now
    before = engine.waited_seconds
    engine.wait_handle(Countdown(1), "complete")
    assert engine.waited_seconds == before


def test_tickets_start_in_order_and_say_where_they_stand() -> None:
    queue, switch, begun = PostingQueue("row"), Switch(), list[str]()
    first = queue.post(lambda: switch, "first")
    second = queue.post(lambda: begun.append("second") or Complete(), "second", [first])
    third = queue.post(lambda: begun.append("third") or Complete(), "third")
    assert str(first) == "first: queue row, sequence number 0, operation a switch, in flight"
    assert str(second) == "second: queue row, sequence number 1, not started, comes after first (row 0)"
    assert str(third) == "third: queue row, sequence number 2, not started, after the queue's head"
    assert queue.unfinished() == (first, second, third)
    switch.open = True
    queue.collect()
    queue.start_heads()
    assert begun == ["second", "third"]
    assert queue.idle
    assert str(third) == "third: queue row, sequence number 2, complete"


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_holds_back_what_is_too_many(window: int) -> None:
    queue, switches = PostingQueue("row", window), [Switch() for _ in range(5)]
    started: list[Switch] = []
    tickets: list[Ticket] = []
    for switch in switches:
        tickets.append(queue.post(lambda switch=switch: started.append(switch) or switch, "one"))  # type: ignore[misc]
    for done in range(5):
        assert started == switches[: done + window]
        switches[done].open = True
        queue.collect()
        queue.start_heads()
        assert tickets[done].done
    assert queue.idle


def test_letting_messages_move_completes_nothing() -> None:
    queue, switch = PostingQueue("row"), Switch()
    ticket = queue.post(lambda: switch, "one")
    switch.open = True
    queue.progress_once()
    assert not ticket.done
    queue.collect()
    assert ticket.done


class _Later(Switch):
    """Post something once it is opened."""

    operation = ""


class _Heard(FlightRecorder):
    """Keep the notes of starts and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[str] = []

    def started(self, number: int, operation: str) -> None:
        super().started(number, operation)
        self.history.append(f"started: {operation}")

    def done(self, number: int) -> None:
        super().done(number)
        self.history.append("done")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_flight_record_hears_of_an_operation_once_it_is_with_the_transport(at_once: bool) -> None:
    """Of one that waits for its device first it would have no size, and ranks could not be compared by it."""
    flight, later = _Heard(), _Later()
    queue = PostingQueue("row", flight=flight)
    queue.post(Switch, "first")
    queue.post(lambda: later, "second")
    assert flight.history == ["started: a switch"]
    queue.collect()
    assert flight.history == ["started: a switch"]
    later.operation = "allreduce of 3 float32 elements"
    if not at_once:
        queue.collect()
    later.open = True
    queue.collect()
    queue.collect()
    assert flight.history == ["started: a switch", "started: allreduce of 3 float32 elements", "done"]


@given(st.floats(0, 1e4))
def test_ranks_that_outnumber_cores_sleep_for_a_share_of_their_wait(waited_seconds: float) -> None:
    """So a wait is longer by that share at most, and takes next to nothing of the cores where it is long."""
    sleep = MORE_RANKS_THAN_CORES.next_sleep(waited_seconds)
    usual = WaitPolicy().next_sleep(waited_seconds)
    assert usual == WaitPolicy().sleep_seconds
    assert usual <= sleep <= max(usual, min(0.02 * waited_seconds, MORE_RANKS_THAN_CORES.longest_seconds))
    assert MORE_RANKS_THAN_CORES.next_sleep(1e3) == MORE_RANKS_THAN_CORES.longest_seconds


@pytest.mark.parametrize(("policy", "offers"), [(WaitPolicy(), 5), (WaitPolicy(offering_seconds=0.0), 0)])
def test_a_wait_offers_its_core_before_it_sleeps(policy: WaitPolicy, offers: int) -> None:
    clock, done = _Clock(), list[str]()
    engine = ProgressEngine(
        rank=0,
        deadline_seconds=1.0,
        abort=lambda code: None,
        clock=lambda: 2e-6 * clock.now,  # a test takes 20 us
        sleep=lambda seconds: done.append("sleep"),
        offer_core=lambda: done.append("offer"),
    )
    engine.wait_policy = policy
    engine.wait(engine.queue(SingleCommunicator()).post(lambda: _after(6, clock), "slow"))
    assert done.count("offer") == max(0, offers - 1)
    assert len(done) == 4


class _Clock:
    """Nanoseconds that pass where the test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def pass_by(self, nanoseconds: int) -> None:
        self.now += nanoseconds


def _after(tests: int, clock: _Clock) -> Countdown:
    """Return an operation of which each test takes 10 ns."""
    return Countdown(tests, lambda: clock.pass_by(10))


def _traced_engine(clock: _Clock) -> tuple[ProgressEngine, Tracer]:
    tracer = Tracer(100, clock_ns=clock)
    return ProgressEngine(rank=0, deadline_seconds=1e9, abort=lambda code: None, trace=tracer), tracer


def _nanoseconds(engine: ProgressEngine) -> int:
    return round(engine.account.seconds * 1e9)


def test_the_outermost_call_counts_and_an_update_inside_does_not() -> None:
    clock = _Clock()
    engine, tracer = _traced_engine(clock)
    queue, account = engine.queue(SingleCommunicator()), engine.account

    def start() -> Countdown:
        clock.now += 100  # what is prepared
        account.updated(clock.now, clock.now + 1000)
        clock.now += 1000
        queue.post(lambda: _after(1, clock), "inner")
        return _after(2, clock)

    queue.post(start, "outer")
    assert _nanoseconds(engine) == 100 + 10 + 10  # both are tested as they are posted
    engine.poll()
    assert _nanoseconds(engine) == 100 + 10 + 10 + 10
    engine.poll()  # nothing is in flight any more
    assert _nanoseconds(engine) == 130
    stretches = tracer.events().of(Category.MESSAGES)
    assert (stretches.stop_ns - stretches.start_ns).tolist() == [1120, 10]


def test_an_update_outside_of_the_engine_is_nobodys_time_for_messages() -> None:
    clock = _Clock()
    account = MessageAccount(clock_ns=clock)
    account.updated(0, 500)
    account.begin()
    clock.now += 7
    account.end()
    assert account.seconds == pytest.approx(7e-9)


def test_a_wait_is_a_wait() -> None:
    clock = _Clock()
    engine, tracer = _traced_engine(clock)
    ticket = engine.queue(SingleCommunicator()).post(lambda: _after(5, clock), "slow")
    posted = _nanoseconds(engine)
    engine.wait(ticket)
    assert ticket.done
    assert _nanoseconds(engine) == posted == 10
    assert len(tracer.events().of(Category.WAIT)) == 1


def test_an_error_in_a_start_leaves_the_account_whole() -> None:
    clock = _Clock()
    engine, _ = _traced_engine(clock)

    def fail() -> Countdown:
        clock.now += 3
        raise OSError("the wire is cut")

    for times in (1, 2):
        with pytest.raises(OSError, match="wire"):
            engine.queue(SingleCommunicator()).post(fail, "failing")
        assert _nanoseconds(engine) == 3 * times


def test_a_posting_that_waits_for_the_next_look_is_recorded_as_late_at_most_since_the_last_one() -> None:
    clock = _Clock()
    engine, tracer = _traced_engine(clock)
    queue = engine.queue(SingleCommunicator())
    first = queue.post(lambda: _after(3, clock), "first")
    queue.post(lambda: _after(1, clock), "second", [first])
    clock.now += 100_000
    engine.poll()  # seen to be under way still
    last_look = clock.now
    clock.now += 50_000  # an operator, in which it completes
    engine.poll()
    delays = tracer.events().of(Category.DELAY)
    (index,) = delays.name.tolist()
    assert delays.names[index] == "second"
    assert (delays.start_ns.tolist(), delays.stop_ns.tolist()) == ([last_look - 10], [last_look + 50_000 + 10])


def test_what_is_posted_in_its_turn_is_not_late() -> None:
    clock = _Clock()
    engine, tracer = _traced_engine(clock)
    queue = engine.queue(SingleCommunicator())
    for _ in range(3):
        clock.now += 100_000
        engine.wait(queue.post(lambda: _after(2, clock), "prompt"))
    assert len(tracer.events().of(Category.DELAY)) == 0


def test_a_full_window_is_no_turn() -> None:
    clock = _Clock()
    engine, tracer = _traced_engine(clock)
    queue = engine.queue(SingleCommunicator(), window=1)
    queue.post(lambda: _after(3, clock), "first")
    queue.post(lambda: _after(1, clock), "second")
    clock.now += 100_000
    engine.poll()
    last_look = clock.now
    clock.now += 20_000
    engine.poll()
    delays = tracer.events().of(Category.DELAY)
    assert delays.start_ns.tolist() == [last_look - 10]


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
                wait_until(lambda before=before: count.passes > before + 2)
    finally:
        thread.close()


def test_the_progress_thread_waits_for_the_lock() -> None:
    count, lock = Counter(), threading.RLock()
    thread = ProgressThread(count, lock, interval_seconds=1e-5)
    with thread:
        wait_until(lambda: count.passes > 0)
        with lock:
            before = count.passes
            time.sleep(2e-3)
            assert count.passes == before
        wait_until(lambda: count.passes > before)
    thread.close()


def test_what_it_raises_is_raised_at_the_end_of_the_block() -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError("the wire is cut")

    thread = ProgressThread(fail, threading.RLock())
    with pytest.raises(OSError, match="the wire is cut"), thread:
        assert failed.wait(60)
    thread.close()


def test_messages_move_while_the_program_computes_but_complete_only_when_it_looks() -> None:
    engine = _engine()
    engine.start_thread()
    queue = engine.queue(SingleCommunicator())
    handle, started = Countdown(10), []
    first = queue.post(lambda: handle, "first")

    def start_second() -> Countdown:
        started.append(threading.current_thread())
        return Countdown(1)

    second = queue.post(start_second, "second", after=[first])
    with engine.computing():
        wait_until(lambda: handle.left <= 0)
        assert not first.done  # the program has not looked
        assert not started
    engine.wait(second)
    assert first.done
    assert started == [threading.current_thread()]
    assert "hpctrain-progress" in handle.threads
    engine.stop_thread()


def test_without_a_thread_computing_changes_nothing() -> None:
    engine = _engine()
    handle = Countdown(2)
    ticket = engine.queue(SingleCommunicator()).post(lambda: handle, "alone")
    with engine.computing():
        time.sleep(1e-3)
    assert handle.left == 1
    engine.operator_done()
    assert ticket.done


def test_where_progress_is_left_to_the_transport_operators_do_not_poll() -> None:
    engine = _engine()
    engine.polls_between_operators = False
    handle = Countdown(2)
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
    engine = _engine()
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    scripted = _Clock()
    monkeypatch.setattr("hpctrain.comm.mpi.time.perf_counter_ns", scripted)
    monkeypatch.setattr(MpiHandle, "_shortest_ns", 400)
    return scripted


class TimedRequest:
    """Moves data in its first calls, and in none after them."""

    def __init__(self, clock: _Clock, moving: int) -> None:
        self._clock, self._moving, self.calls = clock, moving, 0

    def Test(self) -> bool:
        self.calls += 1
        self._clock.now += 5_000 if self.calls <= self._moving else 1_500
        return False


@pytest.mark.parametrize(("moving", "calls"), [(0, 1), (1, 2), (5, 6), (200, 64)])
def test_a_test_calls_mpi_while_data_moves(clock: _Clock, moving: int, calls: int) -> None:
    """With a single call, the link would idle during the next operator; calls without end would stop the program."""
    request = TimedRequest(clock, moving)
    assert not MpiHandle(request, "allgather").test()
    assert request.calls == calls


NAMES = ("FLOAT", "DOUBLE", "INT32_T", "INT64_T", "UINT8_T", "UINT16_T")


def _buffers() -> MpiBuffers:
    library: Any = SimpleNamespace(**{name: name for name in NAMES})
    library.buffer = SimpleNamespace(fromaddress=lambda address, size: (address, size))
    return MpiBuffers(library)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float32", "FLOAT"), ("float64", "DOUBLE"), ("uint8", "UINT8_T"), ("bfloat16", "UINT16_T")],
)
def test_arrays_of_a_device_are_addresses(dtype: str, name: str) -> None:
    array = DeviceArray(4096, (3, 2), dtype, None)
    assert _buffers().whole(array) == ((4096, array.nbytes), name)
    assert _buffers().whole(array.reshape(-1)[2:4])[0] == (4096 + 2 * array.itemsize, 2 * array.itemsize)


def test_arrays_of_the_host_are_themselves() -> None:
    for dtype, name in (("int32", "INT32_T"), ("int64", "INT64_T"), ("uint16", "UINT16_T")):
        array = np.zeros(3, dtype)
        assert _buffers().whole(array) == (array, name) or _buffers().whole(array)[0] is array
    with pytest.raises(AssertionError, match="C-contiguous"):
        _buffers().whole(np.zeros((3, 2), np.float32)[:, 0])


def test_pieces() -> None:
    array = np.arange(6.0)
    _, (counts, places), datatype = _buffers().others_parts(array, [1, 3, 2], 1)
    assert (counts, places, datatype) == ([1, 0, 2], [0, 1, 4], "DOUBLE")
    np.testing.assert_array_equal(piece(array, [1, 3, 2], 1), [1.0, 2.0, 3.0])
    assert piece(DeviceArray(64, (6,), "float32", None), [1, 3, 2], 2).pointer == 64 + 16


def test_an_empty_buffer_begins_where_no_other_does() -> None:
    array = np.zeros(4)
    assert not_empty(array) is array
    for empty in (array[:0], DeviceArray(64, (0,), "bfloat16", None)):
        other = not_empty(empty)
        assert (other.size, dtype_char(other)) == (0, dtype_char(empty))
        assert other.ctypes.data != array.ctypes.data
