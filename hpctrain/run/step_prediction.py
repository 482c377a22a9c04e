"""Prediction of a run's step time from the links of the machine and the times of the run's operators.

This module loads the planner.
"""

from __future__ import annotations

from hpctrain.averaging.strategies.lazy import LazyAverager
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.config.grid import parallel_plan
from hpctrain.core.errors import BackendError, HpctrainError
from hpctrain.core.intervals import even
from hpctrain.data.sampler import counts as counts_over
from hpctrain.job.automatic_choice import PredictedStep, predicted_step_of
from hpctrain.job.session import Session
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner import machine_file, planned_run
from hpctrain.planner.compute_costs import ComputeCosts, RateCosts, SampledCosts, SampledTimes, sampled_rates
from hpctrain.planner.job import AveragerChoice, Candidate
from hpctrain.planner.machine import Machine
from hpctrain.planner.measurement import measured_in_haste
from hpctrain.planner.step_program import predict
from hpctrain.planner.tasks import SimulationOptions
from hpctrain.run.build import TrainingSetup
from hpctrain.train.accounts import OperatorSample


class StepPrediction:
    """Prediction of a run's step time.

    Args:
        mode: progress mode of messages.
        sample: operator times of a few steps; None: use those of the trace, if there is one.
    """

    def __init__(self, session: Session, setup: TrainingSetup, mode: ProgressMode, sample: OperatorSample | None) -> None:
        self._session, self._setup, self._mode, self._sample = session, setup, mode, sample

    def predicted(self, *, in_haste: bool) -> PredictedStep | None:
        """Return the predicted step on rank 0, None on other ranks. Collective.

        Args:
            in_haste: whether to skip measurements, because the job must end.

        Raises:
            HpctrainError: no prediction is possible; the message has the reason.
        """
        machine = self._machine(in_haste=in_haste)
        return self._simulated(machine) if self._session.is_root else None

    def _machine(self, *, in_haste: bool) -> Machine:
        """Return the configured machine, or measure the links of this one. Collective; all ranks return or raise the same.

        Raises:
            HpctrainError: the machine file cannot be read, there is no time for a measurement, or operators were not timed.
        """
        session, name = self._session, self._session.config.machine
        if name is not None:
            return machine_file.read(name)
        if in_haste:
            raise HpctrainError("the job had to end")
        times = self._times()
        if not all(session.world.allgather_object(times is not None)):
            raise BackendError("operators that do not run on the processor are not timed; a machine file has their rates")
        assert times is not None
        rates = sampled_rates(self._plan(), times)
        return measured_in_haste(session.world, lambda before: rates, session.config.deadline_seconds)

    def _times(self) -> SampledTimes | None:
        """Return the times of this rank's operators, from the sampled steps or from the trace; None if they were not timed."""
        trace = self._session.progress.trace
        if self._sample is not None:
            return SampledTimes.of(self._sample.events())
        return None if trace is None or not self._setup.backend.kernels.arithmetic.on_host else SampledTimes.of(trace.events())

    def _plan(self) -> ExecutionPlan:
        """Return the execution plan of this rank for a step with the full batch."""
        config, groups = self._session.config, self._session.groups
        counts = counts_over(config.batch, groups.all_ranks.size, groups.split_size, config.exact.shards)
        first = groups.position - groups.split_rank
        of_group = tuple(
            even(count, self._setup.replica.passes.micro_batches)[0] for count in counts[first : first + groups.split_size]
        )
        return self._setup.replica.network.program(of_group, training=True).plan

    def _simulated(self, machine: Machine) -> PredictedStep:
        """Simulate a step with the operator times of this rank.

        Raises:
            HpctrainError: the run cannot be simulated; the message has the reason.
        """
        config, network, cols = self._session.config, self._setup.replica.network, self._session.grid.cols
        job = planned_run.of_network(
            network.model,
            network.image_shape,
            network.kernels,
            dtype=self._setup.backend.dtype,
            batch=config.batch,
            optimizer=OPTIMIZERS.create(config.optimizer.name, config.optimizer.options),
            averages=config.ema.decay is not None,
            shards=config.exact.shards,
        )
        plan = parallel_plan(config, cols) if config.grid.rows > 1 else ParallelPlan(1, cols)
        options, averagers = dict(config.averager.options), self._setup.replica.averagers.values()
        for of_group in averagers:
            if isinstance(of_group, LazyAverager):
                options["max_interval"] = of_group.interval
        averager = AveragerChoice(config.averager.name, options)
        candidate = Candidate(plan, averager, config.micro_batches)
        costs: ComputeCosts = RateCosts(machine, config.dtype)
        times = self._times()
        if times is not None:
            costs = SampledCosts(self._plan(), times, costs)
        simulation = SimulationOptions(progress=self._mode)
        return predicted_step_of(predict(job, candidate, machine, costs, simulation), machine)
