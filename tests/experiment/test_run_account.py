"""The account of a run: where there is one, and why there is no prediction. Whole runs are in tests/cli/test_automatic.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.comm.single import SingleCommunicator
from hpctrain.experiment.automatic_choice import PredictedStep
from hpctrain.experiment.run_account import RunAccount
from hpctrain.train.step_times import MeasuredStep
from tests.support.heard import Heard

MEASURED = MeasuredStep(0.5, 0.25, 20)
PREDICTED = PredictedStep(0.4, 0.2, 1.0, "two nodes", "abc")


def _heard(
    machine: str | None, choice: Any = None, *, on_host: bool = True, stopped: bool = False, steps: Any = MEASURED
) -> Heard:
    """All that an account of one rank says; its operators were not sampled."""
    session: Any = SimpleNamespace(
        world=SingleCommunicator(),
        config=SimpleNamespace(machine=machine),
        resolved=SimpleNamespace(choice=choice),
        progress=SimpleNamespace(trace=None),
        threads=SimpleNamespace(threads=1),
        is_root=True,
    )
    kernels = SimpleNamespace(arithmetic=SimpleNamespace(on_host=True))
    parts: Any = SimpleNamespace(backend=SimpleNamespace(kernels=kernels), replica=None)
    account = RunAccount(session, parts, ProgressMode.TEST)
    assert (account.sample is not None) == (machine is not None and choice is None)
    outcome: Any = SimpleNamespace(stopped=False, steps_reached=False, position=SimpleNamespace(global_step=26))
    heard = Heard()
    account.finish(SimpleNamespace(measured=lambda: steps), outcome, heard)  # type: ignore[arg-type]
    return heard


def test_one_rank_without_a_machine_has_no_account() -> None:
    heard = _heard(None)
    assert (heard.lines, heard.records) == ([], [])


def test_a_run_of_few_steps_has_no_account() -> None:
    assert _heard("xc40", steps=MeasuredStep(0.5, 0.25, 3)).lines == []
    assert _heard("xc40", steps=None).lines == []


def test_a_run_that_chose_is_compared_with_the_prediction_that_it_chose_by() -> None:
    heard = _heard("xc40", SimpleNamespace(prediction=PREDICTED))
    compared = "predicted 0.4 s a step, measured 0.5 (80%); exposed 0.2 against 0.25;"
    assert heard.lines == [compared, "  posting and progress took 0 s"]
    ((kind, values),) = heard.records
    assert kind == "steps"
    assert (values["step"], values["predicted_step_seconds"], values["accuracy"]) == (26, 0.4, pytest.approx(0.8))


def test_a_machine_that_is_gone_is_no_failure_of_the_run() -> None:
    measured, messages, reason = _heard("nowhere.yaml").lines
    assert measured == "measured 0.5 s a step, of which 0.25 s waited for messages;"
    assert messages == "  posting and progress took 0 s;"
    assert reason.startswith("  no prediction: There is no machine file")
