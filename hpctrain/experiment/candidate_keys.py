"""A planner's candidate as keys of the configuration: what `train` takes so that it runs as was planned."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import yaml

from hpctrain.config.dump import dump
from hpctrain.config.schema import AveragerConfig, Config, GridConfig, PlanConfig
from hpctrain.parallel.parallel_plan import ParallelPlan

if TYPE_CHECKING:
    from hpctrain.planner.job import Candidate

_WIDEST = 1_000_000  # an override is one line


def keys_of(candidate: Candidate) -> dict[str, Any]:
    """The sections grid, plan and averager as wholes, and micro_batches, as plain data."""
    plan = candidate.plan
    return {
        "grid": _grid(plan),
        "plan": {"default": str(plan.default), **{pattern: str(use) for pattern, use in plan.use.items()}},
        "averager": {"name": candidate.averager, **candidate.options},
        "micro_batches": candidate.micro_batches,
    }


def _grid(plan: ParallelPlan) -> dict[str, Any]:
    grid: dict[str, Any] = {"rows": plan.rows, "cols": plan.cols}
    if plan.tiles is not None:
        grid["tiles"] = list(plan.tiles)
    if plan.overlapped:
        grid["overlap"] = sorted(plan.overlapped)
    return grid


def with_candidate(config: Config, candidate: Candidate) -> Config:
    """The configuration that runs the candidate, whatever it said about grid, plan, averager and micro-batches before."""
    return Config.model_validate({**config.model_dump(mode="json"), **keys_of(candidate)})


def with_defaults(config: Config) -> Config:
    """The configuration with the defaults in the sections that it leaves open: a run on a grid of one row."""
    defaults = {"grid": GridConfig(), "plan": PlanConfig(), "averager": AveragerConfig()}
    return config.model_copy(update={section: defaults[section] for section in config.automatic})


def overrides(candidate: Candidate) -> tuple[str, ...]:
    """The keys as overrides of a command line, each one word of it: "grid={rows: 2, cols: 4}"."""
    return tuple(f"{key}={flow(value)}" for key, value in keys_of(candidate).items())


def flow(value: Any) -> str:
    """YAML in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=_WIDEST)
    return text.removesuffix("\n...\n").strip()


def command_line(file: str, words: tuple[str, ...], ranks: int) -> str:
    """The command that trains a configuration on so many ranks, as a shell takes it."""
    start = f"mpiexec -n {ranks} python -m mpi4py -m hpctrain train"
    return " ".join((start, *(shlex.quote(word) for word in (file, *words))))


def written(config: Config, candidate: Candidate, head: tuple[str, ...]) -> str:
    """The whole configuration with the candidate's keys as YAML, behind lines of comments."""
    comments = "".join(f"# {line}\n" for line in head)
    return comments + dump(with_candidate(config, candidate))
