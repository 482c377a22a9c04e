"""The engine's laws: order of posting, dependencies, window, every wait drives all queues, no wait without end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.progress import TIMEOUT_EXIT_CODE, ProgressEngine, Ticket
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import CommunicationTimeoutError
from hpctrain.speaker import place


class Countdown:
    """Complete at its n-th test."""

    def __init__(self, tests: int) -> None:
        self.left = tests

    def test(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def __str__(self) -> str:
        return "a fake allreduce"


class Switch:
    """Complete once told so."""

    def __init__(self) -> None:
        self.on = False

    def test(self) -> bool:
        return self.on

    def __str__(self) -> str:
        return "a switch"


def _engine(**options: object) -> ProgressEngine:
    settings_: dict = {"rank": 5, "deadline_seconds": 30.0, "abort": lambda code: None} | options
    return ProgressEngine(**settings_)


def _never() -> bool:
    raise AssertionError("must not start")


@settings(max_examples=60, deadline=None)
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


def test_the_head_starts_at_once_and_its_follower_when_it_may() -> None:
    queue = _engine().queue(SingleCommunicator(), window=1)
    begun: list[str] = []
    first = Switch()
    queue.post(lambda: begun.append("first") or first, "first")
    queue.post(lambda: begun.append("second") or Countdown(1), "second")
    assert begun == ["first"]
    first.on = True
    queue.collect()
    queue.start_heads()
    assert begun == ["first", "second"]


def test_a_blocked_head_is_not_overtaken() -> None:
    engine = _engine()
    split, data = engine.queue(SingleCommunicator("split")), engine.queue(SingleCommunicator("data"))
    gate = Switch()
    blocker = split.post(lambda: gate, "blocker")
    head = data.post(lambda: Countdown(1), "head", after=[blocker])
    behind = data.post(lambda: Countdown(1), "behind")
    for _ in range(5):
        engine.poll()
    assert not behind.done
    gate.on = True
    engine.wait(behind)
    assert head.done


def test_a_wait_drives_all_queues() -> None:
    """What is waited for here comes after something on a queue that nobody waits for."""
    engine = _engine()
    split, data = engine.queue(SingleCommunicator("split")), engine.queue(SingleCommunicator("data"))
    slow = split.post(lambda: Countdown(50), "slow")
    engine.wait(data.post(lambda: Countdown(2), "target", after=[slow]))
    assert slow.done


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
    assert first._after == last._after == ()


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


def test_past_the_deadline_everything_is_told_and_the_job_ends(tmp_path: Path) -> None:
    report, codes, clock = _timed_out(tmp_path, wait_for_handle=False)
    assert codes == [TIMEOUT_EXIT_CODE]
    assert 2.0 < clock.now < 2.2
    lines = report.splitlines()
    assert lines[:5] == [
        f"{place(5)}no completion within the deadline of 2 s: fc.weight: queue data, sequence number 0, not started, "
        "comes after conv1.weight (split 1)",
        f"{place(5)}unfinished on this rank:",
        f"{place(5)}  conv1.weight: queue split, sequence number 1, operation a switch, in flight",
        f"{place(5)}  fc.weight: queue data, sequence number 0, not started, comes after conv1.weight (split 1)",
        f"{place(5)}  fc.bias: queue data, sequence number 1, not started, behind the queue's head",
    ]
    assert "in _timed_out" in report
    assert "done long ago" not in report


def test_a_job_that_was_suspended_has_not_waited() -> None:
    """An hour in which nobody could look, as under a scheduler that stops all processes and continues them."""
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
    assert codes == [TIMEOUT_EXIT_CODE]
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
