"""A process computes, posts, polls and waits as a rank's program does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.planner.collective_costs import Stage
from hpctrain.planner.simulation.operations import Posted
from hpctrain.planner.simulation.places import places
from hpctrain.planner.simulation.processes import SimulatedProcess, Stretch
from hpctrain.planner.simulation.world import SimulatedWorld
from hpctrain.trace.tracer import Category
from tests.support.simulated import link, machine, program


def _run(
    body: Callable[[SimulatedProcess], Stretch],
    mode: ProgressMode = ProgressMode.TEST,
    unattended: int = 0,
    cores_per_rank: float = 1.0,
) -> SimulatedProcess:
    step = program([(1, ())])
    (place,) = places(step, 1)
    world = SimulatedWorld(step, machine(link(unattended_bytes=unattended), cores_per_rank=cores_per_rank), [place])
    process = SimulatedProcess(place, world, mode)
    process.recorder.begin()
    process.start(body(process))
    world.loop.run()
    return process


def _post(process: SimulatedProcess, *stages: Stage) -> Posted:
    posted = Posted("sum", "queue", 0)
    process.post(process.world.group(process.place, "all"), posted, stages)
    return posted


def _stage(seconds: float, cpu: float = 0.0, rounds: int = 1) -> Stage:
    return Stage(True, 0.0, seconds, 1.0, cpu, rounds)


def _now(process: SimulatedProcess) -> float:
    return process.world.loop.now


def test_work_takes_its_time() -> None:
    assert _now(_run(lambda process: process.work(1.5))) == 1.5


def test_a_wait_ends_with_the_operation_and_is_recorded() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        yield from process.wait(_post(process, _stage(2.0)))

    process = _run(body)
    assert _now(process) == 2.0
    events = process.recorder.events()
    assert sorted(events.category.tolist()) == [Category.COMMUNICATION, Category.WAIT]
    assert set(events.stop_ns.tolist()) == {2_000_000_000}


@pytest.mark.parametrize(("cpu", "end"), [(1.0, 2.0), (5.0, 5.0)])
def test_the_cores_time_of_messages_goes_with_a_wait(cpu: float, end: float) -> None:
    def body(process: SimulatedProcess) -> Stretch:
        yield from process.wait(_post(process, _stage(2.0, cpu)))

    assert _now(_run(body)) == pytest.approx(end)


def test_the_cores_time_of_messages_comes_on_top_of_work() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        posted = _post(process, _stage(2.0, 0.5))
        yield from process.work(4.0)
        yield from process.poll()
        assert posted.done
        yield from process.work(1.0)

    assert _now(_run(body, unattended=10)) == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("mode", "end"), [(ProgressMode.TEST, 4.0 + 2.0), (ProgressMode.THREAD, 4.0), (ProgressMode.POSTING, 4.0)]
)
def test_stages_follow_at_polls_or_by_the_thread(mode: ProgressMode, end: float) -> None:
    def body(process: SimulatedProcess) -> Stretch:
        posted = _post(process, _stage(1.0), _stage(2.0))
        yield from process.work(4.0)
        yield from process.wait(posted)

    assert _now(_run(body, mode, unattended=10)) == pytest.approx(end)


def test_rounds_move_by_the_thread() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        posted = _post(process, _stage(1.0, rounds=4))
        yield from process.work(4.0)
        yield from process.wait(posted)

    assert _now(_run(body, ProgressMode.TEST, 10)) == pytest.approx(4.75)
    assert _now(_run(body, ProgressMode.THREAD, 10)) == pytest.approx(4.0)


def test_what_flies_at_the_end_is_recorded() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        _post(process, _stage(2.0))
        yield from process.work(1.0)

    process = _run(body)
    assert len(process.recorder.events()) == 0
    process.finish()
    assert process.recorder.events().category.tolist() == [Category.COMMUNICATION]


@pytest.mark.parametrize(("seconds", "cores_per_rank", "end"), [(1e-4, 1.0, 1e-4), (1e-4, 0.5, 2e-3), (0.5, 0.5, 0.5)])
def test_a_rank_that_shares_its_core_gets_it_back_at_a_tick(seconds: float, cores_per_rank: float, end: float) -> None:
    def body(process: SimulatedProcess) -> Stretch:
        yield from process.wait(_post(process, _stage(seconds)))

    process = _run(body, cores_per_rank=cores_per_rank)
    assert _now(process) == pytest.approx(end)
    (wait,) = [k for k, category in enumerate(process.recorder.events().category) if category == Category.WAIT]
    assert process.recorder.events().stop_ns[wait] == pytest.approx(end * 1e9)


def test_an_operation_that_is_complete_costs_no_wait_on_a_shared_core() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        posted = _post(process, _stage(0.5))
        yield from process.work(1.0)
        yield from process.poll()
        yield from process.wait(posted)

    assert Category.WAIT not in _run(body, cores_per_rank=0.5).recorder.events().category.tolist()
