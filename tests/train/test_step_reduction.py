"""The step's small message: sums over ranks, one step later, flags alike everywhere."""

import numpy as np
import pytest

from hpctrain.backend.kernels.base import LossSums
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.train.step_reduction import StepReduction, StepTotals
from hpctrain.virtual.run import run_virtual, virtual_engine


def _message(comm: Communicator, progress: ProgressEngine) -> StepReduction:
    return StepReduction(comm, progress, 2)


def _on(comm: Communicator) -> list[StepTotals]:
    message = _message(comm, virtual_engine(comm))
    totals = []
    for step in range(3):
        message.clear()
        # rank r has r samples
        sums = LossSums(loss=float(comm.rank * (step + 1)), top1=comm.rank, top5=2 * comm.rank, count=comm.rank)
        message.add(sums, comm.rank * np.array([1.0, step]))
        before = message.read()
        message.post(stop=comm.rank == 1 and step == 1)
        if before is not None:
            totals.append(StepTotals(**{**vars(before), "statistics": before.statistics.copy()}))
    last = message.read()
    assert last is not None
    assert message.read() is None
    return [*totals, last]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_sums_over_ranks_arrive_in_order(ranks: int) -> None:
    samples = sum(range(ranks))
    for totals in run_virtual(ranks, _on, seed=5):
        for step, total in enumerate(totals):
            assert (total.loss, total.top1, total.top5, total.count) == (samples * (step + 1), samples, 2 * samples, samples)
            assert list(total.statistics) == [samples, samples * step]
            assert total.stop == (1 if step == 1 and ranks > 1 else 0)
            assert total.non_finite == 0


def test_numbers_of_checks_are_summed_beside_the_statistics() -> None:
    def program(comm: Communicator) -> tuple[list[float], list[float]]:
        message = StepReduction(comm, virtual_engine(comm), 2, checks=3)
        for factor in (1.0, 2.0):
            message.read()
            message.clear()
            message.add(LossSums(0.0, 0, 0, 1), np.array([1.0, 2.0]))
            message.post(stop=False, checks=factor * np.array([comm.rank, 1.0, 2.0]))
        totals = message.read()
        assert totals is not None
        return totals.statistics.tolist(), totals.checks.tolist()

    assert run_virtual(3, program) == [([3.0, 6.0], [6.0, 6.0, 12.0])] * 3


def test_a_loss_that_is_not_finite_is_counted_and_not_summed() -> None:
    comm = SingleCommunicator()
    message = _message(comm, ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort))
    message.clear()
    message.add(LossSums(float("nan"), 0, 0, 4), np.zeros(2))
    message.add(LossSums(3.0, 1, 1, 2), np.ones(2))
    message.post(stop=False)
    total = message.read()
    assert total is not None
    assert (total.loss, total.non_finite, total.count) == (3.0, 1, 6)


def test_posting_over_an_unread_message_is_a_bug() -> None:
    comm = SingleCommunicator()
    message = _message(comm, ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort))
    message.clear()
    message.post(stop=False)
    with pytest.raises(AssertionError, match="has not been read"):
        message.post(stop=False)
