"""The account of a run's steps: over all ranks, or none, beside what was predicted."""

from __future__ import annotations

import pytest

from hpctrain.experiment import step_account
from hpctrain.experiment.automatic_choice import PredictedStep
from hpctrain.train.step_times import MeasuredStep
from hpctrain.virtual.run import run_virtual

MEASURED = MeasuredStep(0.4614, 0.04712, 40, 0.00172)
PREDICTED = PredictedStep(0.4522, 0.0411, 0.9, "two nodes", "abc")


def _over(*of_ranks: MeasuredStep | None) -> list[MeasuredStep | None]:
    return run_virtual(len(of_ranks), lambda comm: step_account.over_ranks(comm, of_ranks[comm.rank]))


def test_the_slowest_rank_counts_and_the_mean_of_what_they_waited() -> None:
    together = MeasuredStep(3.0, 0.75, 40, 0.25)
    assert _over(MeasuredStep(2.0, 0.5, 40, 0.125), MeasuredStep(3.0, 1.0, 41, 0.375)) == [together, together]


def test_too_few_steps_give_no_account_on_any_rank() -> None:
    assert _over(MeasuredStep(2.0, 0.5, 40), None) == [None, None]
    assert _over(MeasuredStep(2.0, 0.5, 40), MeasuredStep(2.0, 0.5, 13)) == [None, None]


def test_accuracy_is_what_is_left_of_the_measured_time_beside_the_error() -> None:
    assert step_account.accuracy(2.0, 2.0) == 1.0
    assert step_account.accuracy(1.5, 2.0) == step_account.accuracy(2.5, 2.0) == 0.75
    assert step_account.accuracy(6.0, 2.0) == -1.0


def test_lines_of_80_columns_compare_the_prediction_with_the_run() -> None:
    expected = ["predicted 0.452 s a step, measured 0.461 (98%); exposed 0.0411 against 0.0471;"]
    expected += ["  posting and progress took 0.0017 s"]
    assert step_account.lines(MEASURED, PREDICTED) == expected


@pytest.mark.parametrize(("reason", "end"), [("", ""), ("there is no machine", "; no prediction: there is no machine")])
def test_a_run_without_a_prediction_tells_what_was_measured(reason: str, end: str) -> None:
    expected = ["measured 0.461 s a step, of which 0.0471 s waited for messages;"]
    expected += [f"  posting and progress took 0.0017 s{end}"]
    assert step_account.lines(MEASURED, None, reason) == expected


def test_the_facts_hold_both_sides() -> None:
    measured = {"step": 46, "steps": 40, "measured_step_seconds": 0.4614, "measured_exposed_seconds": 0.04712}
    measured |= {"measured_messages_seconds": 0.00172}
    assert step_account.facts(MEASURED, 46) == measured
    assert step_account.facts(MEASURED, 46, PREDICTED) == measured | {
        "predicted_step_seconds": 0.4522,
        "predicted_exposed_seconds": 0.0411,
        "accuracy": pytest.approx(0.98, abs=1e-3),
        "measured_share": 0.9,
        "machine": "two nodes",
        "machine_digest": "abc",
    }
