"""The account at the end of a run: how long steps took, and how long a simulation or the run's own choice says they take.

What is simulated are messages, and waits for them; the times of operators are those of a few early steps of the run itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.core.errors import HpctrainError
from hpctrain.experiment import step_account
from hpctrain.job.automatic_choice import PredictedStep
from hpctrain.run.build import Parts
from hpctrain.job.session import Session
from hpctrain.train.metrics_rest import Reporter
from hpctrain.train.operator_sample import OperatorSample
from hpctrain.train.accounts import StepTimes
from hpctrain.train.trainer import Outcome

if TYPE_CHECKING:
    from hpctrain.run.step_prediction import StepPrediction


class RunAccount:
    """Made before the first step, finished after the last one. Both are collective over the world.

    Args:
        mode: how messages progress. most_steps: a bound on the steps of the run; a run with too few has no account.

    Attributes:
        sample: records operators of a few steps; None where nothing is predicted from them, or a trace has them already.
    """

    def __init__(self, session: Session, parts: Parts, mode: ProgressMode, most_steps: float = math.inf) -> None:
        self._session = session
        enough_steps = most_steps >= step_account.FEWEST_STEPS
        self._wanted = enough_steps and (session.world.size > 1 or session.config.machine is not None)
        self.sample: OperatorSample | None = None
        on_host = parts.backend.kernels.arithmetic.on_host
        if self._wanted and session.resolved.choice is None and session.progress.trace is None and on_host:
            self.sample = OperatorSample(parts.replica, session.threads.threads)
        self._prediction: StepPrediction | None = None
        if self._wanted and session.resolved.choice is None:
            # It loads the planner: only for runs that predict, and now, because files may have changed when the run ends.
            from hpctrain.run.step_prediction import StepPrediction

            self._prediction = StepPrediction(session, parts, mode, self.sample)

    def finish(self, step_times: StepTimes, outcome: Outcome, reporter: Reporter) -> None:
        """Say and record the account, where there are steps enough."""
        if not self._wanted:
            return
        measured = step_account.over_ranks(self._session.world, step_times.measured())
        if measured is None:
            return
        predicted, reason = self._predicted(in_haste=outcome.stopped and not outcome.steps_reached)
        reporter.record("steps", step_account.facts(measured, outcome.position.global_step, predicted))
        for line in step_account.lines(measured, predicted, reason):
            reporter.say(line)

    def _predicted(self, *, in_haste: bool) -> tuple[PredictedStep | None, str]:
        """The prediction, or why there is none: both on rank 0 alone. in_haste: the job is to end, so nothing is measured."""
        choice = self._session.resolved.choice
        if choice is not None:
            return choice.prediction, ""
        assert self._prediction is not None
        try:
            return self._prediction.predicted(in_haste=in_haste), ""
        except HpctrainError as error:
            return None, str(error).rstrip(".")
