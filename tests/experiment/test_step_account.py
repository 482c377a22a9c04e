"""The account of a run's steps: over all ranks, or none."""

from __future__ import annotations

from hpctrain.experiment import step_account
from hpctrain.train.step_times import MeasuredStep
from hpctrain.virtual.run import run_virtual


def _over(*of_ranks: MeasuredStep | None) -> list[MeasuredStep | None]:
    return run_virtual(len(of_ranks), lambda comm: step_account.over_ranks(comm, of_ranks[comm.rank]))


def test_the_slowest_rank_counts_and_the_mean_of_what_they_waited() -> None:
    together = MeasuredStep(3.0, 0.75, 40)
    assert _over(MeasuredStep(2.0, 0.5, 40), MeasuredStep(3.0, 1.0, 41)) == [together, together]


def test_too_few_steps_give_no_account_on_any_rank() -> None:
    assert _over(MeasuredStep(2.0, 0.5, 40), None) == [None, None]
    assert _over(MeasuredStep(2.0, 0.5, 40), MeasuredStep(2.0, 0.5, 13)) == [None, None]


def test_the_line_and_the_facts_tell_the_same() -> None:
    measured = MeasuredStep(0.4614, 0.04712, 40)
    assert step_account.line(measured) == "measured 0.461 s a step, of which 0.0471 s waited for messages"
    assert step_account.facts(measured, 46) == {
        "step": 46,
        "steps": 40,
        "measured_step_seconds": 0.4614,
        "measured_exposed_seconds": 0.04712,
    }
