"""Times of a step are seconds of compute since its begin, medians over the measured steps."""

from hpctrain.averaging.step_clock import StepClock
from hpctrain.comm.progress import ProgressEngine


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _step(clock: StepClock, hand: Hand, engine: ProgressEngine, seconds: float, waited: float) -> None:
    """Forward reads both; backward computes b, then a, and waits in between. The last event of c is never announced."""
    clock.begin(True)
    for name in ("a", "b"):
        clock.needed(name)
        hand.seconds += seconds
    clock.ready("b")
    clock.free("b")
    hand.seconds += waited
    engine.waited_seconds += waited
    hand.seconds += seconds
    clock.ready("a")
    clock.free("a")
    hand.seconds += seconds
    clock.end(("a", "b", "c"))


def test_medians_without_waits() -> None:
    hand = Hand()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=lambda code: None, clock=hand)
    clock = StepClock(engine)
    clock.begin(False)
    hand.seconds += 100
    clock.ready("a")  # not measured
    for seconds, waited in ((1.0, 7.0), (2.0, 0.0), (3.0, 50.0)):
        _step(clock, hand, engine, seconds, waited)
    times = clock.times()
    assert times.needed == {"a": 0.0, "b": 2.0}
    assert times.ready == {"b": 4.0, "a": 6.0, "c": 8.0}
    assert times.free == times.ready
    assert times.end_seconds == 8.0
