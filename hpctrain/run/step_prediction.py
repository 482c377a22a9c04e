"""Prediction of a run's step time from the links of the machine and a sample of the run's first steps.

The simulation has two passes. In the first one it knows only the sampled operators. The program of a run also spends time between
operators: Python, posting, tests of messages, and the work of other threads on its core. The sampled processor time of a step
contains all of it. The second pass adds the part that the first pass lacked to the operators.

This module loads the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from hpctrain.averaging.strategies.lazy import LazyAverager
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.config.grid import parallel_plan
from hpctrain.core.errors import BackendError, HpctrainError
from hpctrain.core.intervals import even
from hpctrain.core.log import get_logger
from hpctrain.data.sampler import counts as counts_over
from hpctrain.job.automatic_choice import PredictedStep, predicted_step_of
from hpctrain.job.session import Session
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner import machine_file, planned_run
from hpctrain.planner.compute_costs import RateCosts, SampledCosts, SampledTimes, sampled_rates
from hpctrain.planner.job import AveragerChoice, Candidate
from hpctrain.planner.machine import Machine
from hpctrain.planner.measurement import measured_in_haste
from hpctrain.planner.step_program import predict
from hpctrain.planner.tasks import SimulationOptions
from hpctrain.run.build import TrainingSetup
from hpctrain.training.accounts import MeasuredStep, OperatorSample

_log = get_logger(__name__)


class StepPrediction:
    """Prediction of a run's step time.

    Args:
        mode: progress mode of messages.
        sample: operator times of a few steps; None: use those of the trace, if there is one.
    """

    def __init__(self, session: Session, setup: TrainingSetup, mode: ProgressMode, sample: OperatorSample | None) -> None:
        self._session, self._setup, self._mode, self._sample = session, setup, mode, sample

    def predicted(self, sampled: MeasuredStep | None, share: float, *, in_haste: bool) -> PredictedStep | None:
        """Return the predicted step on rank 0, None on other ranks. Collective.

        Args:
            sampled: sampled steps of this rank; None: there are none.
            share: share of the usual time in which links are measured. The value of rank 0 counts.
            in_haste: whether to skip measurements, because the job must end.

        Raises:
            HpctrainError: no prediction is possible; the message has the reason.
        """
        samples = [one for one in self._session.world.allgather_object(sampled) if one is not None]
        machine = self._machine(share, in_haste=in_haste)
        return self._simulated(machine, samples) if self._session.is_root else None

    def _machine(self, share: float, *, in_haste: bool) -> Machine:
        """Return the configured machine, or measure the links of this one. Collective; all ranks return or raise the same.

        Raises:
            HpctrainError: the machine file cannot be read, there is no time for a measurement, or operators were not timed.
        """
        session, name = self._session, self._session.config.machine
        if name is not None:
            return machine_file.read(name)
        if in_haste:
            raise HpctrainError(
                "the job was stopped before the links were measured; measure them with `hpctrain calibrate` and set machine to "
                "its file"
            )
        times = self._times()
        if not all(session.world.allgather_object(times is not None)):
            raise BackendError("operators that do not run on the processor are not timed; a machine file has their rates")
        assert times is not None
        rates = sampled_rates(self._plan(), times)
        return measured_in_haste(session.world, lambda before: rates, session.config.deadline_seconds, share)

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

    def _simulated(self, machine: Machine, samples: Sequence[MeasuredStep]) -> PredictedStep:
        """Simulate a step with the operator times of this rank.

        Args:
            samples: sampled steps of all ranks.

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
        averager_options, averagers = dict(config.averager.options), self._setup.replica.averagers.values()
        for of_group in averagers:
            if isinstance(of_group, LazyAverager):
                averager_options["max_interval"] = of_group.interval
        candidate = Candidate(plan, AveragerChoice(config.averager.name, averager_options), config.micro_batches)
        options = SimulationOptions(progress=self._mode)
        rates, times = RateCosts(machine, job.dtype), self._times()
        if note := machine.estimate_note(job.dtype):
            _log.info(note)
        if times is None:
            return predicted_step_of(predict(job, candidate, machine, rates, options), machine)
        first = predict(job, candidate, machine, SampledCosts(self._plan(), times, rates), options)
        if not samples:
            return predicted_step_of(first, machine)
        shares = machine.cores_per_node <= machine.ranks_per_node * self._session.threads.threads
        # Equal ranks wait for the slowest one. Other ranks of a grid differ in their work, so rank 0 is compared with itself.
        busy_seconds = max(one.core_seconds(shares_cores=shares) for one in (samples if config.grid.rows == 1 else samples[:1]))
        further_seconds = (busy_seconds - first.step.busy_seconds) / self._setup.replica.passes.micro_batches
        second = predict(job, candidate, machine, SampledCosts(self._plan(), times, rates, further_seconds), options)
        step = predicted_step_of(second, machine)
        data_seconds = max(one.late_data_seconds(shares_cores=shares) for one in samples)
        return replace(step, seconds=max(step.seconds, self._least_seconds(machine, samples)) + data_seconds)

    def _least_seconds(self, machine: Machine, samples: Sequence[MeasuredStep]) -> float:
        """Return the time that the cores of a node need for a step of all its ranks; 0 if each rank has a core.

        It includes the polls of waiting ranks, which take the cores of others. The simulation lacks them, because it represents
        equal ranks by one, which computes and waits at the same time.
        """
        cores, ranks = machine.cores_per_node, machine.ranks_per_node
        seconds = fmean(one.core_seconds(shares_cores=True) + one.polling_seconds for one in samples)
        return seconds * ranks / cores if cores < ranks else 0.0
