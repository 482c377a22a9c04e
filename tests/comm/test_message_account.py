"""The account of messages: the outermost call counts, updates and waits do not, and nobody's time is another thread's."""

from __future__ import annotations

import threading

import pytest

from hpctrain.comm.message_account import MessageAccount
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.trace.tracer import Category, Tracer


class _Clock:
    """Nanoseconds that pass where the test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class _After:
    """Complete at the n-th test; a test takes 10 ns."""

    def __init__(self, tests: int, clock: _Clock) -> None:
        self.left, self.clock = tests, clock

    def test(self) -> bool:
        self.clock.now += 10
        self.left -= 1
        return self.left <= 0


def _engine(clock: _Clock) -> tuple[ProgressEngine, Tracer]:
    tracer = Tracer(100, clock_ns=clock)
    return ProgressEngine(rank=0, deadline_seconds=1e9, abort=lambda code: None, trace=tracer), tracer


def _nanoseconds(engine: ProgressEngine) -> int:
    return round(engine.account.seconds * 1e9)


def test_the_outermost_call_counts_and_an_update_inside_does_not() -> None:
    clock = _Clock()
    engine, tracer = _engine(clock)
    queue, account = engine.queue(SingleCommunicator()), engine.account

    def start() -> _After:
        clock.now += 100  # what is prepared
        account.updated(clock.now, clock.now + 1000)
        clock.now += 1000
        queue.post(lambda: _After(1, clock), "inner")
        return _After(2, clock)

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
    engine, tracer = _engine(clock)
    ticket = engine.queue(SingleCommunicator()).post(lambda: _After(5, clock), "slow")
    posted = _nanoseconds(engine)
    engine.wait(ticket)
    assert ticket.done
    assert _nanoseconds(engine) == posted == 10
    assert len(tracer.events().of(Category.WAIT)) == 1


def test_an_error_in_a_start_leaves_the_account_whole() -> None:
    clock = _Clock()
    engine, _ = _engine(clock)

    def fail() -> _After:
        clock.now += 3
        raise OSError("the wire is cut")

    for times in (1, 2):
        with pytest.raises(OSError, match="wire"):
            engine.queue(SingleCommunicator()).post(fail, "failing")
        assert _nanoseconds(engine) == 3 * times


def test_a_second_thread_has_its_own_sum() -> None:
    clock = _Clock()
    account = MessageAccount(clock_ns=clock)

    def beside() -> None:
        account.second_thread(threading.get_ident())
        account.begin()
        clock.now += 40
        account.updated(clock.now - 30, clock.now)
        account.end()

    account.begin()
    clock.now += 5
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    account.end()
    assert (account.seconds, account.beside_seconds) == (pytest.approx(45e-9), pytest.approx(10e-9))


def test_a_posting_that_waits_for_the_next_look_is_recorded_as_late_at_most_since_the_last_one() -> None:
    clock = _Clock()
    engine, tracer = _engine(clock)
    queue = engine.queue(SingleCommunicator())
    first = queue.post(lambda: _After(3, clock), "first")
    queue.post(lambda: _After(1, clock), "second", [first])
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
    engine, tracer = _engine(clock)
    queue = engine.queue(SingleCommunicator())
    for _ in range(3):
        clock.now += 100_000
        engine.wait(queue.post(lambda: _After(2, clock), "prompt"))
    assert len(tracer.events().of(Category.DELAY)) == 0


def test_a_full_window_is_no_turn() -> None:
    clock = _Clock()
    engine, tracer = _engine(clock)
    queue = engine.queue(SingleCommunicator(), window=1)
    queue.post(lambda: _After(3, clock), "first")
    queue.post(lambda: _After(1, clock), "second")
    clock.now += 100_000
    engine.poll()
    last_look = clock.now
    clock.now += 20_000
    engine.poll()
    delays = tracer.events().of(Category.DELAY)
    assert delays.start_ns.tolist() == [last_look - 10]
