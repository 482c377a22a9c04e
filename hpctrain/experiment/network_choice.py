"""A network made in Python whose grid, plan and averager are chosen at the start of its job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpctrain.backend.choice import make_backend
from hpctrain.backend.cuda.choose import NodePlace
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.core.errors import ConfigError
from hpctrain.experiment import planned_job
from hpctrain.experiment.start_search import BestCandidate, find
from hpctrain.experiment.started_job import StartedJob
from hpctrain.nn.layers import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.planner.job import Job
from hpctrain.planner.search_space import SearchSpace

#: A name, or a mapping of "name" and options, as in a configuration.
Choice = str | Mapping[str, Any]


@dataclass(frozen=True)
class Automatic:
    """A network for which `start` chooses the grid, and `Job.replica` takes the plan and the averager: the fastest by prediction.

    Args:
        model, image_shape, optimizer, micro_batches, backend, dtype, precision, ema_decay: as `Job.replica` takes them.
        machine: a file that `hpctrain calibrate` wrote, or the name of an installed one; None: it is measured, within a minute.
    """

    model: Layer
    image_shape: tuple[int, int, int]
    optimizer: Choice | Callable[[], Optimizer] = "sgd"
    micro_batches: int = 1
    backend: str = "auto"
    dtype: str = "float32"
    precision: str = "float32"
    machine: str | None = None
    ema_decay: float | None = None

    def best(self, started: StartedJob, batch: int) -> BestCandidate:
        """The fastest grid, plan and averager on the ranks of a started job. Collective.

        Raises:
            HpctrainError: what `Job.replica` refuses, a machine file with a fault, or a network that fits in no plan.
        """

        def planned() -> Job:
            chosen = make_backend(self.backend, self.dtype, self.precision, NodePlace(started.world.size))
            optimizer = optimizer_of(self.optimizer)()
            return planned_job.of_network(
                self.model,
                self.image_shape,
                chosen.kernels,
                dtype=chosen.dtype,
                batch=batch,
                optimizer=optimizer,
                averages=self.ema_decay is not None,
            )

        job = raise_on_all_ranks(started.world, planned)
        split = job.kernels.arithmetic.on_host
        space = SearchSpace(fixed_grid=None if split else (1, started.world.size), fixed_micro_batches=self.micro_batches)
        return find(started, job, space, self.machine)


def optimizer_of(optimizer: Choice | Callable[[], Optimizer]) -> Callable[[], Optimizer]:
    """A maker of optimisers that are not bound yet."""
    return optimizer if callable(optimizer) else partial(OPTIMIZERS.create, *named(optimizer))


def named(choice: Choice) -> tuple[str, dict[str, Any]]:
    """(name, options)."""
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "name" not in options:
        raise ConfigError(f"{options} has no name; give a name, or a mapping of a name and options.")
    return options.pop("name"), options
