"""The choice of plans on virtual ranks: rank 0's times decide for all, errors reach all, nothing is sent without a choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.backend.cuda import cudnn_graphs
from hpctrain.backend.cuda.cudnn_plans import CudnnPlans
from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.errors import BackendError
from hpctrain.experiment.plan_choice import agree
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.fake_cudnn import FakeCudnn, FakePlan

KEY = ConvolutionKey("forward", (2, 7, 9, 4), (6, 3, 3, 4), (2, 7, 9, 6), (1, 1), (1,) * 4, (1, 1), 1, "float32", "float32")


class Planner:
    """Implements `TimedPlans` by a stand-in for cuDNN, of which the plan of that place in the list is the fastest."""

    def __init__(self, cudnn: FakeCudnn, fastest: int) -> None:
        self.plans = CudnnPlans(cudnn.handle, candidates=3)
        self._cudnn, self._fastest, self.timed = cudnn, fastest, 0

    def time_plans(self) -> None:
        self.timed += 1
        self.plans.time(self._seconds)

    def _seconds(self, sizes, run) -> float:
        run(1, *sizes)
        return abs(self._fastest - [plan.name for plan in self._cudnn.plans].index(self._cudnn.executed[-1][3]))

    def plan_choices(self) -> dict[str, str]:
        return self.plans.choices()

    def take_plan_choices(self, choices) -> None:
        self.plans.take_choices(choices)


@pytest.fixture
def library(monkeypatch) -> FakeCudnn:
    cudnn = FakeCudnn(plans=[FakePlan("eng1"), FakePlan("eng2"), FakePlan("eng3"), FakePlan("eng4")])
    monkeypatch.setattr(cudnn_graphs, "library", lambda: cudnn)
    return cudnn


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_use_what_is_the_fastest_on_the_first(library, ranks: int) -> None:
    later = replace(KEY, kind="weight")

    def on_rank(comm: ThreadCommunicator) -> tuple[dict[str, str], list[str], int]:
        planner = Planner(library, fastest=(1, 0, 2)[comm.rank])
        keys = [KEY, later] if comm.rank == 0 else [KEY]
        for key in keys:
            planner.plans.plan(key)
        choices = agree(comm, planner)
        return choices, [planner.plans.plan(key).name for key in (KEY, later)], planner.timed

    expected = {cudnn_graphs.describe(key): "eng2" for key in (KEY, later)}
    results = run_virtual(ranks, on_rank)
    assert [choices for choices, *_ in results] == [expected] * ranks
    assert [names for _, names, _ in results] == [["eng2", "eng2"]] * ranks, "planned before and after"
    assert [timed for *_, timed in results] == [1, 0, 0][:ranks]


def test_a_rank_without_that_plan_is_an_error_on_all(library) -> None:
    def on_rank(comm: ThreadCommunicator) -> str:
        planner = Planner(library, fastest=2)
        if comm.rank == 2:
            planner.plans = CudnnPlans(library.handle, candidates=2)
        planner.plans.plan(KEY)
        with pytest.raises(BackendError, match=r"The plan eng3 for .* \(on rank 2 of 3\)") as raised:
            agree(comm, planner)
        return str(raised.value)

    assert len(set(run_virtual(3, on_rank))) == 1


def test_where_there_is_nothing_to_choose_nothing_is_sent() -> None:
    def on_rank(comm: ThreadCommunicator) -> tuple[dict[str, str], int]:
        counters = Counters()
        return agree(CountingCommunicator(comm, counters), EmulatedDevice()), len(list(counters))

    assert run_virtual(2, on_rank) == [({}, 0)] * 2
