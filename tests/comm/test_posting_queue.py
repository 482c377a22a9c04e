"""A queue alone: tickets start in order, say where they stand, and count from 0. Whole engines are in test_progress.py."""

from __future__ import annotations

import pytest

from hpctrain.comm.posting_queue import PostingQueue, Ticket
from hpctrain.comm.single import Complete
from hpctrain.flight.recorder import FlightRecorder


class _Switch:
    """Complete once it is open."""

    def __init__(self) -> None:
        self.open = False

    def test(self) -> bool:
        return self.open

    def __str__(self) -> str:
        return "a switch"


def test_tickets_start_in_order_and_say_where_they_stand() -> None:
    queue, switch, begun = PostingQueue("row"), _Switch(), list[str]()
    first = queue.post(lambda: switch, "first")
    second = queue.post(lambda: begun.append("second") or Complete(), "second", [first])
    third = queue.post(lambda: begun.append("third") or Complete(), "third")
    assert str(first) == "first: queue row, sequence number 0, operation a switch, in flight"
    assert str(second) == "second: queue row, sequence number 1, not started, comes after first (row 0)"
    assert str(third) == "third: queue row, sequence number 2, not started, behind the queue's head"
    assert queue.unfinished() == (first, second, third)
    switch.open = True
    queue.collect()
    queue.start_heads()
    assert begun == ["second", "third"]
    assert queue.idle
    assert str(third) == "third: queue row, sequence number 2, complete"


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_holds_back_what_is_too_many(window: int) -> None:
    queue, switches = PostingQueue("row", window), [_Switch() for _ in range(5)]
    started: list[_Switch] = []
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
    queue, switch = PostingQueue("row"), _Switch()
    ticket = queue.post(lambda: switch, "one")
    switch.open = True
    queue.progress_once()
    assert not ticket.done
    queue.collect()
    assert ticket.done


class _Later(_Switch):
    """Posts something once it is told to."""

    operation = ""


class _Heard(FlightRecorder):
    """Keeps what it is told of starts and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def started(self, number: int, operation: str) -> None:
        super().started(number, operation)
        self.told.append(f"started: {operation}")

    def done(self, number: int) -> None:
        super().done(number)
        self.told.append("done")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_flight_record_hears_of_an_operation_once_it_is_with_the_transport(at_once: bool) -> None:
    """Of one that waits for its device first it would have no size, and ranks could not be compared by it."""
    flight, later = _Heard(), _Later()
    queue = PostingQueue("row", flight=flight)
    queue.post(_Switch, "first")
    queue.post(lambda: later, "second")
    assert flight.told == ["started: a switch"]
    queue.collect()
    assert flight.told == ["started: a switch"]
    later.operation = "allreduce of 3 float32 elements"
    if not at_once:
        queue.collect()
    later.open = True
    queue.collect()
    queue.collect()
    assert flight.told == ["started: a switch", "started: allreduce of 3 float32 elements", "done"]
