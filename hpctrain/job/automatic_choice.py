"""The choice of a run for what its configuration leaves open: as data, kept next to the run, put into its configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import yaml

from hpctrain.config import grid
from hpctrain.config.load import flow
from hpctrain.config.schema import Config
from hpctrain.config.values import OPEN_SECTIONS
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.parallel.parallel_plan import ParallelPlan

if TYPE_CHECKING:  # a start with nothing `auto` must not load the planner
    from hpctrain.planner.machine import Machine
    from hpctrain.planner.planned_run import PlannedRun
    from hpctrain.planner.tasks import Prediction

#: key of a checkpoint's metadata
CHOICE_META = "choice"


@dataclass(frozen=True)
class PredictedStep:
    """The predicted time of a step. exposed_seconds: of waits for messages. measured_share: of compute, 0 .. 1.

    machine: its name. machine_digest: of all its numbers.
    """

    seconds: float
    exposed_seconds: float
    measured_share: float
    machine: str
    machine_digest: str


@dataclass(frozen=True)
class AutomaticChoice:
    """Values of the sections that a configuration leaves to the start of a run.

    Attributes:
        sections: section ("grid", "plan", "averager") -> its values as plain data, as a configuration has them.
        ranks: that it was made for. model_digest: of the model's layers and parameters.
        prediction: of a step. next_best: the candidate that came second, in words, with its step's seconds; empty if there
            was none.
    """

    sections: Mapping[str, Any]
    ranks: int
    model_digest: str
    prediction: PredictedStep
    next_best: str = ""

    def to_meta(self) -> dict[str, Any]:
        """Return it for JSON, with sections as YAML in one line: the order of a plan's patterns counts, which JSON may change."""
        return asdict(self) | {"sections": {section: flow(values) for section, values in self.sections.items()}}

    @classmethod
    def from_meta(cls, meta: Any, place: str) -> AutomaticChoice:
        """Return the choice that `to_meta` gave. place: of the file that it was in, for messages.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            texts: Mapping[str, str] = meta["sections"]
            sections = {section: yaml.safe_load(texts[section]) for section in OPEN_SECTIONS if section in texts}
            return cls(**{**meta, "sections": sections, "prediction": PredictedStep(**meta["prediction"])})
        except (TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
            raise CheckpointError(
                f"The automatic choice in {place} cannot be read ({error}); name grid, plan and averager, or train again."
            ) from error

    def applied(self, config: Config) -> Config:
        """Return the configuration with the chosen values in the sections that it leaves open."""
        return Config.model_validate({**config.model_dump(mode="json"), **self.sections})

    def check_fits(self, task: PlannedRun, place: str) -> None:
        """Refuse a stored choice that was made for another model.

        Args:
            task: the run as it is asked for now, on any grid. place: where the choice lies.

        Raises:
            CheckpointError: a pattern of layers that are gone, or other layers or parameters.
        """
        reason = "the model has other layers or parameters than then"
        try:
            config = self.applied(task.config)
            graph = task.graph_of(1)
            grid.parallel_plan(config, max(1, self.ranks // config.grid.rows)).check([node.name for node in graph.nodes])
        except ConfigError as error:
            reason = str(error).rstrip(".")
        else:
            if self.model_digest == model_digest(task):
                return
        raise CheckpointError(
            f"The automatic choice in {place} no longer matches the model {task.config.model.name}: {reason}; "
            f"give the model that it was made for, or start a new training without --resume."
        )

    def line(self, config: Config) -> str:
        """Return the choice in one line. config: with the choice applied."""
        plan = grid.parallel_plan(config, max(1, self.ranks // config.grid.rows))
        what = ", ".join(self.sections)
        return (
            f"{what} auto: {chosen_words(plan, config.averager.name, config.averager.options)}, "
            f"predicted {self.prediction.seconds:.3g} s a step{f' (next best {self.next_best})' if self.next_best else ''}"
        )


@dataclass(frozen=True)
class Resolved:
    """A configuration with nothing left to be chosen; the same on every rank.

    choice: what was chosen; None if nothing was left to it. machine: that was measured for it; None: none was.
    lines: for people.
    """

    config: Config
    choice: AutomaticChoice | None = None
    machine: Machine | None = None
    lines: tuple[str, ...] = ()


def chosen_words(plan: ParallelPlan, averager: str, options: Mapping[str, Any]) -> str:
    """Return grid, plan and averager in a few words."""
    with_options = f" ({', '.join(f'{option} {value}' for option, value in options.items())})" if options else ""
    return f"{grid.describe(plan)}, averager {averager}{with_options}"


def predicted_step_of(prediction: Prediction, machine: Machine) -> PredictedStep:
    """Return the part of a prediction that a run keeps."""
    step = prediction.step
    return PredictedStep(step.seconds, step.exposed_seconds, prediction.measured_share, machine.name, machine_digest(machine))


def machine_digest(machine: Machine) -> str:
    """Return SHA-256 of all numbers of a machine."""
    return hashlib.sha256(repr(asdict(machine)).encode()).hexdigest()


def model_digest(task: PlannedRun) -> str:
    """Return SHA-256 of the names of all layers and the shapes of all parameters."""
    lines = [node.name for node in task.graph_of(1).nodes]
    lines += [f"{name} {tuple(spec.shape)}" for name, spec in task.specs.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
