"""Actions come in the order of their instants, and of asking."""

from hpctrain.planner.simulation.event_loop import EventLoop


def test_order_is_of_instants_then_of_asking() -> None:
    loop, seen = EventLoop(), []
    for name, seconds in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        loop.at(seconds, lambda name=name: seen.append((name, loop.now)))  # type: ignore[misc]
    assert not loop.run()  # nothing is left
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]


def test_what_is_asked_for_soon_follows_what_is_due_now() -> None:
    loop, seen = EventLoop(), []
    loop.at(1.0, lambda: loop.soon(lambda: seen.append("soon")))
    loop.at(1.0, lambda: seen.append("due"))
    loop.run()
    assert seen == ["due", "soon"]


def test_it_stops_when_asked_to() -> None:
    loop, seen = EventLoop(), []
    loop.at(1.0, loop.stop)
    loop.at(2.0, lambda: seen.append("later"))
    assert loop.run()
    assert seen == []
    assert loop.now == 1.0
