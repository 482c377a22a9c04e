"""Rank and keeper each count, in their own looks, how long the other has not beaten while it is watched."""

from __future__ import annotations

from hpctrain.launch.pulse import Pulse


def _looks(pulse: Pulse, count: int) -> list[bool]:
    return [pulse.look(1.0) for _ in range(count)]


def test_one_that_nobody_watches_may_stand_still() -> None:
    pulse = Pulse()
    assert not any(_looks(pulse, 100))
    pulse.watch(3.0)
    pulse.rest()
    assert not any(_looks(pulse, 100))


def test_one_that_beats_lives() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    for _ in range(20):
        assert not any(_looks(pulse, 3))
        pulse.beat()


def test_one_that_stands_still_for_the_deadline_does_not() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    assert _looks(pulse, 5) == [False, False, False, True, True]  # the first look sees that it is watched


def test_a_keeper_that_stands_still_for_the_deadline_does_not() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    assert not any(pulse.look_at_keeper(1.0) for _ in range(100))  # there is none
    pulse.keep()
    assert [pulse.look_at_keeper(1.0) for _ in range(5)] == [False, False, False, True, True]
    pulse.keep()
    assert not pulse.look_at_keeper(1.0)
