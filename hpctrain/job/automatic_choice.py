"""Automatic choice of grid, plan and averager: values for the sections that a configuration leaves open, stored with the run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from hpctrain.assembly.recipe import Recipe, describe, statistics_words
from hpctrain.backend.choice import Backend
from hpctrain.backend.graph import Graph
from hpctrain.config.load import flow
from hpctrain.config.schema import Config
from hpctrain.config.values import OPEN_SECTIONS
from hpctrain.core.errors import CheckpointError, ConfigError, errors_as

if TYPE_CHECKING:  # a start without automatic sections must not import the planner
    from hpctrain.planner.costs.machine import Machine
    from hpctrain.planner.planned_run import PlannedRun
    from hpctrain.planner.simulation.tasks import Prediction

#: key of the choice in a checkpoint's metadata
CHOICE_META = "choice"


@dataclass(frozen=True)
class PredictedStep:
    """Predicted time of a step.

    Attributes:
        exposed_seconds: time of the step spent waiting for messages.
        measured_share: share of the compute time that is based on measured operators, in [0, 1].
        machine_digest: hash of all numbers of the machine model.
    """

    seconds: float
    exposed_seconds: float
    measured_share: float
    machine: str
    machine_digest: str


@dataclass(frozen=True)
class AutomaticChoice:
    """Values of the sections that a configuration leaves open, chosen at the start of a run.

    Attributes:
        sections: section ("grid", "plan", "averager") -> its values as plain data, as in a configuration.
        model_digest: hash of the model's layers and parameters.
        why: comparison with the default in words ("2.1 times as fast as averaging alone, because ..."); empty if it is unknown.
    """

    sections: Mapping[str, Any]
    ranks: int
    model_digest: str
    prediction: PredictedStep
    why: str = ""

    def to_meta(self) -> dict[str, Any]:
        """Return the choice as plain values for JSON.

        Each section is one line of YAML, because the order of a plan's patterns matters and JSON tools may change it.
        """
        return asdict(self) | {"sections": {section: flow(values) for section, values in self.sections.items()}}

    @classmethod
    def from_meta(cls, meta: Any, place: str) -> AutomaticChoice:
        """Return the choice stored by `to_meta` in the file `place`.

        Raises:
            CheckpointError: the values do not describe a choice.
        """
        advice = "set grid, plan and averager, or start a new training"
        with errors_as(CheckpointError, lambda why: f"Cannot read the automatic choice in {place} ({why}); {advice}."):
            texts: Mapping[str, str] = meta["sections"]
            sections = {section: yaml.safe_load(texts[section]) for section in OPEN_SECTIONS if section in texts}
            others = {key: value for key, value in meta.items() if key != "next_best"}  # which earlier versions stored
            return cls(**{**others, "sections": sections, "prediction": PredictedStep(**meta["prediction"])})

    def applied(self, config: Config) -> Config:
        """Return the configuration with the chosen values in the open sections."""
        return Config.model_validate({**config.model_dump(mode="json"), **self.sections})

    def check_fits(self, task: PlannedRun, place: str) -> None:
        """Raise unless the stored choice was made for this model.

        Args:
            task: the requested run, on any grid.
            place: path of the stored choice, for messages.

        Raises:
            CheckpointError: a pattern of the stored plan matches no layer, or the model's layers or parameters have changed.
        """
        reason = "layers or parameters of the model have changed"
        try:
            config = self.applied(task.config)
            graph = task.job.graph_of(1)
            grid = config.grid.rows, max(1, self.ranks // config.grid.rows)
            Recipe.of(config, grid=grid).plan.check([node.name for node in graph.nodes])
        except ConfigError as error:
            reason = str(error).rstrip(".")
        else:
            if self.model_digest == model_digest(task):
                return
        raise CheckpointError(
            f"The automatic choice in {place} no longer matches the model {task.config.model.name}: {reason}; "
            f"use the model that the choice was made for, or start a new training."
        )

    def line(self, config: Config, graph: Graph) -> str:
        """Return a description of the choice in one line: its predicted step time, the reason, and the scope of batch norms.

        Args:
            config: configuration with the choice applied.
            graph: model lowered for one sample.
        """
        recipe = Recipe.of(config, grid=(config.grid.rows, max(1, self.ranks // config.grid.rows)))
        plan = recipe.plan
        clauses = [
            f"{', '.join(self.sections)} auto: {describe(plan)}, averager {recipe.averager}",
            f"predicted {self.prediction.seconds:.3g} s per step",
            self.why,
        ]
        if plan.rows > 1 and config.batch_norm.statistics == "local":
            clauses.append(statistics_words(plan, graph, config.batch, config.micro_batches))
        return "; ".join(filter(None, clauses))


@dataclass(frozen=True)
class Resolved:
    """Recipe of a configuration without open sections, the same on every rank.

    Attributes:
        choice: choice that was applied; None if no section was open.
        machine: machine model that was measured for the choice; None if none was measured.
        lines: lines that report the choice.
        backend: backend of this rank, with which the choice was made; None if no section was open.
    """

    recipe: Recipe
    choice: AutomaticChoice | None = None
    machine: Machine | None = None
    lines: tuple[str, ...] = ()
    backend: Backend | None = field(default=None, compare=False)


def predicted_step_of(prediction: Prediction, machine: Machine) -> PredictedStep:
    """Return the part of a prediction that is stored with a run."""
    step = prediction.step
    return PredictedStep(step.seconds, step.exposed_seconds, prediction.measured_share, machine.name, machine_digest(machine))


def machine_digest(machine: Machine) -> str:
    """Return the SHA-256 hash of all numbers of a machine model."""
    return hashlib.sha256(repr(asdict(machine)).encode()).hexdigest()


def model_digest(task: PlannedRun) -> str:
    """Return the SHA-256 hash of the names of all layers and the shapes of all parameters."""
    lines = [node.name for node in task.job.graph_of(1).nodes]
    lines += [f"{name} {tuple(spec.shape)}" for name, spec in task.job.specs.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
