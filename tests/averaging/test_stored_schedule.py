"""A run that goes on with its stored schedule is bit by bit the run that was never stopped, whatever the link measures now."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.averaging import reduction, sharding
from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.bucketed import Bucketed
from hpctrain.averaging.priority import Priority
from hpctrain.averaging.schedule import Schedule
from hpctrain.averaging.sharded import Sharded
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.threads import ThreadCommunicator
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.lars import Lars
from hpctrain.testing.virtual import run_virtual, virtual_engine

SIZES = (5000, 9001, 3, 12000, 8000)
FAST, SLOW = LinkModel(1e-6, 1e-8), LinkModel(1e-3, 1e-8)  # slices of 16 KiB, and one of everything
STRATEGIES = {"bucketed": Bucketed, "sharded": Sharded, "priority": Priority}
Stored = tuple[np.ndarray, list[dict[str, np.ndarray]], str]


def _averager(strategy: str, comm: ThreadCommunicator) -> GradientAverager:
    random = np.random.default_rng(5)
    specs = {
        f"l{k}.weight": ParameterSpec((size,), lambda random, shape: np.zeros(shape), decay=k != 2)
        for k, size in enumerate(SIZES)
    }
    group = FlatGroup(specs, "float32")
    group.data[...] = random.standard_normal(group.size)
    optimizer = Lars(weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.5)
    return STRATEGIES[strategy](group, optimizer, comm, virtual_engine(comm))


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
    for module in (reduction, sharding):
        monkeypatch.setattr(module, "calibrate", lambda comm, progress: link)


def _first(strategy: str, ranks: int, steps: range) -> list[Stored]:
    def program(comm: ThreadCommunicator) -> Stored:
        averager = _averager(strategy, comm)
        averager.agree()
        _run(averager, steps)
        state = [averager.full_state(parameter) for parameter in averager.group.parameters.values()]
        assert averager.schedule is not None
        return averager.group.data.copy(), state, averager.schedule.to_json()

    return run_virtual(ranks, program)


def _second(strategy: str, ranks: int, steps: range, first: Stored, stored: bool) -> list[Stored]:
    def program(comm: ThreadCommunicator) -> Stored:
        averager = _averager(strategy, comm)
        averager.agree(Schedule.from_json(first[2]) if stored else None)
        averager.group.data[...] = first[0]
        for parameter, state in zip(averager.group.parameters.values(), first[1], strict=True):
            averager.load_state(parameter, state)
        _run(averager, steps)
        assert averager.schedule is not None
        return averager.group.data.copy(), [], averager.schedule.to_json()

    return run_virtual(ranks, program)


@pytest.mark.parametrize("stop", [3, 7])  # before and after operations are ordered by measured times
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_is_bitwise_whatever_is_measured(
    monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int, stop: int
) -> None:
    _measure(monkeypatch, FAST)
    through = _first(strategy, ranks, range(12))
    first = _first(strategy, ranks, range(stop))[0]
    _measure(monkeypatch, SLOW)
    second = _second(strategy, ranks, range(stop, 12), first, stored=True)
    for (ours, _, schedule), (theirs, _, _) in zip(second, through, strict=True):
        assert Schedule.from_json(schedule).slices == Schedule.from_json(first[2]).slices
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("strategy", ["bucketed", "sharded"])
def test_another_measurement_alone_would_have_changed_slices(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    _measure(monkeypatch, FAST)
    first = _first(strategy, 2, range(3))[0]
    _measure(monkeypatch, SLOW)
    second = _second(strategy, 2, range(3, 12), first, stored=False)[0]
    assert len(Schedule.from_json(second[2]).slices) < len(Schedule.from_json(first[2]).slices)


@pytest.mark.parametrize("stop", [3, 7])
def test_an_order_not_yet_measured_is_measured_after_the_resume(monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    measured: list[str] = []

    def calibrate(comm: Communicator, progress: object) -> LinkModel:
        measured.append(comm.name)
        return FAST

    _measure(monkeypatch, FAST)
    first = _first("sharded", 2, range(stop))[0]
    assert Schedule.from_json(first[2]).timed is (stop > 5)
    monkeypatch.setattr(sharding, "calibrate", calibrate)
    assert Schedule.from_json(_second("sharded", 2, range(stop, 12), first, stored=True)[0][2]).timed
    assert bool(measured) is (stop <= 5)
