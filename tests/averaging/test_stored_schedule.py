"""A run that goes on with its stored schedule is bit by bit the run that was never stopped, whatever the link measures now."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from hpctrain.averaging import agreement, slice_sizes, step_clock
from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.compute_times import Times
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import Strategy
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.errors import OptionError
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import averaged, planned

SIZES = (5000, 9001, 3, 12000, 8000)
FAST, SLOW = LinkModel(1e-6, 1e-8), LinkModel(1e-3, 1e-8)  # slices of 16 KiB, and one of everything
STRATEGIES: dict[str, tuple[type[Strategy], dict[str, object]]] = {
    "bucketed": (Bucketed, {}),
    "sharded": (Sharded, {}),
    "priority": (Priority, {}),
    "lazy": (Lazy, {"layers": 2}),
}
#: parameters, states, the schedule, counters
Stored = tuple[np.ndarray, list[dict[str, np.ndarray]], str, dict[str, int]]


def _group() -> FlatGroup:
    random = np.random.default_rng(5)
    specs = {
        f"l{k}.weight": ParameterSpec((size,), lambda random, shape: np.zeros(shape), decay=k != 2)
        for k, size in enumerate(SIZES)
    }
    group = FlatGroup(specs, "float32")
    group.data[...] = random.standard_normal(group.size)
    return group


def _averager(
    strategy: str, comm: ThreadCommunicator, sizes: str = "measured", stored: CollectiveSchedule | None = None
) -> GradientAverager:
    kind, options = STRATEGIES[strategy]
    optimizer = Lars(weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.5)
    return averaged(kind, _group(), optimizer, comm, virtual_engine(comm), stored=stored, sizes=sizes, **options)


def _run(averager: GradientAverager, steps: range) -> None:
    parameters = list(averager.group.parameters.values())
    for step in steps:
        random = np.random.default_rng([step, averager.comm.rank])
        averager.begin_step(0.1)
        for parameter in parameters:
            averager.before_forward([parameter])
        for parameter in reversed(parameters):
            parameter.grad[...] = np.sin(parameter.data * random.standard_normal())
            averager.grad_ready(parameter)
            averager.data_free(parameter)
        averager.end_backward()
    averager.drain()


def _measure(monkeypatch: pytest.MonkeyPatch, link: LinkModel) -> None:
    monkeypatch.setattr(agreement, "calibrate", lambda comm, progress: link)


def _first(strategy: str, ranks: int, steps: range, sizes: str = "measured") -> list[Stored]:
    def program(comm: ThreadCommunicator) -> Stored:
        averager = _averager(strategy, comm, sizes)
        _run(averager, steps)
        state = [averager.full_state(parameter) for parameter in averager.group.parameters.values()]
        assert averager.schedule is not None
        return averager.group.data.copy(), state, averager.schedule.to_json(), averager.counters()

    return run_virtual(ranks, program)


def _second(strategy: str, ranks: int, steps: range, first: Stored, stored: bool) -> list[Stored]:
    def program(comm: ThreadCommunicator) -> Stored:
        averager = _averager(strategy, comm, stored=CollectiveSchedule.from_json(first[2]) if stored else None)
        averager.group.data[...] = first[0]
        for parameter, state in zip(averager.group.parameters.values(), first[1], strict=True):
            averager.load_state(parameter, state)
        averager.load_counters(first[3])
        _run(averager, steps)
        assert averager.schedule is not None
        return averager.group.data.copy(), [], averager.schedule.to_json(), averager.counters()

    return run_virtual(ranks, program)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 7])  # before and after operations are ordered by measured times
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_is_bitwise_whatever_is_measured(monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int, stop: int) -> None:
    _measure(monkeypatch, FAST)
    through = _first(strategy, ranks, range(12))
    first = _first(strategy, ranks, range(stop))[0]
    _measure(monkeypatch, SLOW)
    second = _second(strategy, ranks, range(stop, 12), first, stored=True)
    for (ours, _, schedule, counters), (theirs, _, _, expected) in zip(second, through, strict=True):
        assert counters == expected
        assert CollectiveSchedule.from_json(schedule).slices == CollectiveSchedule.from_json(first[2]).slices
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("strategy", ["bucketed", "sharded", "lazy"])
def test_another_measurement_alone_would_have_changed_slices(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    _measure(monkeypatch, FAST)
    first = _first(strategy, 2, range(3))[0]
    _measure(monkeypatch, SLOW)
    second = _second(strategy, 2, range(3, 12), first, stored=False)[0]
    assert len(CollectiveSchedule.from_json(second[2]).slices) < len(CollectiveSchedule.from_json(first[2]).slices)


@pytest.mark.parametrize("stop", [3, 7])
def test_an_order_not_yet_measured_is_measured_after_the_resume(monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    measured: list[str] = []

    def calibrate(comm: Communicator, progress: object) -> LinkModel:
        measured.append(comm.name)
        return FAST

    _measure(monkeypatch, FAST)
    first = _first("sharded", 2, range(stop))[0]
    assert CollectiveSchedule.from_json(first[2]).timed is (stop > 5)
    monkeypatch.setattr(agreement, "calibrate", calibrate)
    assert CollectiveSchedule.from_json(_second("sharded", 2, range(stop, 12), first, stored=True)[0][2]).timed
    assert bool(measured) is (stop <= 5)


def _measure_times(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every clock measures times by chance, which put operations into another order."""
    calls = count(seed)

    def times(clock: step_clock.StepClock) -> Times:
        random = np.random.default_rng(next(calls))
        ready, free, needed = ({f"l{k}.weight": random.uniform(0, 1e-2) for k in range(len(SIZES))} for _ in range(3))
        return Times(ready, {name: at + ready[name] for name, at in free.items()}, needed, 3e-2)

    monkeypatch.setattr(step_clock.StepClock, "times", times)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_measured_changes_no_bit_by_default(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """The link and the times of two runs differ: they have the same slices and end with the same bits, in whatever order."""
    monkeypatch.setattr(slice_sizes, "RULE_LINK", FAST)  # several slices of these few parameters
    monkeypatch.setattr(slice_sizes, "_LEAST_BUCKET_BYTES", 1 << 12)
    ended: list[Stored] = []
    for seed, link in enumerate((FAST, SLOW, LinkModel(1e-7, 1e-6), LinkModel(0.0, 0.0))):
        _measure(monkeypatch, link)
        _measure_times(monkeypatch, 10 * seed)
        ended.append(_first(strategy, 3, range(9), "rule")[0])
    schedules = [CollectiveSchedule.from_json(each[2]) for each in ended]
    assert len(schedules[0].slices) > 2 or strategy == "priority"
    for (data, state, *_), schedule in zip(ended, schedules, strict=True):
        assert schedule.slices == schedules[0].slices
        assert data.tobytes() == ended[0][0].tobytes()
        for own, other in zip(state, ended[0][1], strict=True):
            assert all(own[name].tobytes() == other[name].tobytes() for name in own)
    if strategy in ("sharded", "priority"):
        assert all(schedule.timed for schedule in schedules)


def test_times_do_change_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_sizes, "RULE_LINK", LinkModel(1e-7, 1e-7))
    orders = set()
    for seed in range(6):
        _measure(monkeypatch, LinkModel(1e-7, 1e-8))
        _measure_times(monkeypatch, 10 * seed)
        orders.add(CollectiveSchedule.from_json(_first("sharded", 2, range(7), "rule")[0][2]).operations)
    assert len(orders) > 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_of_an_earlier_version_fits_the_default(strategy: str) -> None:
    """The words that it was stored under know nothing of how sizes were found."""

    kind, options = STRATEGIES[strategy]
    by_rule, measured = (planned(kind, _group(), sizes=sizes, **options).request() or "" for sizes in ("rule", "measured"))
    assert "sizes" not in by_rule
    assert measured.replace(", sizes measured", "") == by_rule
    assert measured != by_rule


def test_sizes_are_given_or_measured() -> None:
    bucket, cut = "bucket_bytes", "slice_parameters"
    for kind, option in ((Bucketed, bucket), (Sharded, bucket), (Lazy, bucket), (Priority, cut)):
        with pytest.raises(OptionError, match=f"sizes is measured, but {option} is 7"):
            kind.Options(sizes="measured", **{option: 7})  # type: ignore[operator]
