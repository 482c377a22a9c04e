"""Jobs that share a resource progress at equal rates, and no work is lost or gained."""

import random

import pytest

from hpctrain.planner.simulation.event_loop import EventLoop
from hpctrain.planner.simulation.shared_resource import SharedResource


def _ends(jobs: list[tuple[float, float, float]], capacity: float = 1.0, saved: float = 0.0) -> list[float]:
    """Ends of jobs of (begin, seconds, weight)."""
    loop = EventLoop()
    resource = SharedResource(loop, capacity, saved)
    ends = [0.0] * len(jobs)

    def begin(number: int) -> None:
        resource.start(jobs[number][1], jobs[number][2], lambda: ends.__setitem__(number, loop.now))

    for number, (seconds, _, _) in enumerate(jobs):
        loop.at(seconds, lambda number=number: begin(number))  # type: ignore[misc]
    loop.run()
    return ends


def test_two_jobs_share_from_where_they_meet() -> None:
    # The first has done 1 of 2 when the second comes; both have half the rate until the first ends.
    assert _ends([(0.0, 2.0, 1.0), (1.0, 2.0, 1.0)]) == pytest.approx([3.0, 4.0])


def test_capacity_is_room_for_as_many() -> None:
    assert _ends([(0.0, 1.0, 1.0)] * 4, capacity=4) == pytest.approx([1.0] * 4)
    assert _ends([(0.0, 1.0, 1.0)] * 4, capacity=2) == pytest.approx([2.0] * 4)


def test_a_weight_counts_as_so_many_jobs() -> None:
    assert _ends([(0.0, 1.0, 3.0)]) == pytest.approx([3.0])
    assert _ends([(0.0, 1.0, 3.0), (0.0, 2.0, 1.0)])[1] == pytest.approx(_ends([(0.0, 1.0, 1.0)] * 3 + [(0.0, 2.0, 1.0)])[3])


def test_a_busy_resource_loses_no_time() -> None:
    draw = random.Random(5)
    jobs = [(draw.uniform(0, 3), draw.uniform(0.5, 2), 1.0) for _ in range(40)]
    assert max(_ends(jobs)) == pytest.approx(min(begin for begin, _, _ in jobs) + sum(seconds for _, seconds, _ in jobs))


def test_a_load_slows_and_a_stopped_job_gives_back_its_rate() -> None:
    loop = EventLoop()
    resource, ends, left = SharedResource(loop, 1.0), list[float](), list[float]()
    resource.start(2.0, 1.0, lambda: ends.append(loop.now))
    other = resource.start(2.0, 1.0, lambda: ends.append(-1.0))
    loop.at(1.0, lambda: left.append(resource.stop(other)))  # both have done 0.5
    loop.at(1.5, lambda: resource.load(1.0))  # half the rate from here on, with 1.0 to go
    loop.run()
    assert left == pytest.approx([1.5])
    assert ends == pytest.approx([3.5])


def test_the_remainder_is_what_is_not_done() -> None:
    loop = EventLoop()
    resource, left = SharedResource(loop, 1.0), []
    job = resource.start(3.0, 1.0, None)
    resource.start(3.0, 1.0, None)
    loop.at(2.0, lambda: left.append(resource.remaining(job)))
    loop.run()
    assert left == pytest.approx([2.0])


def test_saved_time_is_spent_first_and_comes_back_while_idle() -> None:
    # Of 3 s the first 2 are saved, and pass 64 times as fast: 2 = (64 - 1) t are spent in t.
    spent = 2.0 / 63
    first = 3.0 - 63 * spent
    assert _ends([(0.0, 3.0, 1.0)], saved=2.0) == pytest.approx([first])
    assert _ends([(0.0, 1.0, 1.0)], saved=2.0) == pytest.approx([1.0 / 64])
    # Half a second after the end of the first job, half a second is saved again.
    assert _ends([(0.0, 3.0, 1.0), (first + 0.5, 2.0, 1.0)], saved=2.0)[1] == pytest.approx(first + 0.5 + 2.0 - 0.5, rel=0.02)
    # No more than the most is ever saved.
    assert _ends([(0.0, 3.0, 1.0), (100.0, 3.0, 1.0)], saved=2.0)[1] == pytest.approx(100.0 + first)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_all_jobs_together_spend_what_is_saved_once(weight: float) -> None:
    jobs = [(0.0, 1.0, weight), (0.0, 1.0, weight), (0.1, 1.0, weight)]
    total = 3.0 * weight
    assert max(_ends(jobs, saved=1.0)) == pytest.approx(max(_ends(jobs)) - 1.0, rel=0.05)
    assert max(_ends(jobs, saved=1.0)) >= total - 1.0 - 0.2
