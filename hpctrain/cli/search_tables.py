"""How the result of a search is printed: a table of the best choices, their plans in words, and why each next one loses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import fill
from typing import Any

from hpctrain.backend.specs import BatchNormSpec
from hpctrain.cli.simulation_tables import console, machine_lines, measured_line, megabytes, milliseconds, print_whole, size_lines, table
from hpctrain.experiment.candidate_keys import keys_of, overrides
from hpctrain.experiment.planner_search import PlannedSearch
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.job import Candidate
from hpctrain.planner.search import SearchChoice

_INDENT = "   "
_MOST_LISTED = 3  # patterns of the same use; all of them stand in --json and in a written file


def print_search(outcome: PlannedSearch, best: int, command: str) -> None:
    """The best choices and the command line that trains with the first."""
    task, job, choices = outcome.task, outcome.job, outcome.result.choices[:best]
    height, width, channels = job.image_shape
    out = console()
    out.print(
        f"Simulated: {task.config.model.name} on {task.ranks:,} ranks, batch {task.config.batch}; images {height} x {width} x "
        f"{channels}, kernels {job.kernels.name}"
    )
    for line in (*machine_lines(task.machine, task.factors), *([job.assumption] if job.assumption else []), ""):
        out.print(line)
    figures = table("", "step ms", "exposed ms", "memory MB", "exchanged MB", "micro", "grid")
    for number, choice in enumerate(choices, 1):
        plan, prediction = choice.candidate.plan, choice.prediction
        figures.add_row(
            f"{number}",
            milliseconds(prediction.step.seconds),
            milliseconds(prediction.step.exposed_seconds),
            megabytes(prediction.memory_bytes),
            megabytes(prediction.exchanged_bytes),
            f"{choice.candidate.micro_batches}",
            f"{plan.rows} x {plan.cols}",
        )
    print_whole(out, figures)
    out.print("")
    for number, choice in enumerate(choices, 1):
        out.print(f"{number}: {words(choice.candidate)}.")
        if choice.why:
            reason = f"Against {number - 1}: {choice.why}."
            out.print(fill(reason, out.width, initial_indent=_INDENT, subsequent_indent=_INDENT), soft_wrap=True)
    out.print("")
    for line in _statistics_lines(outcome, choices[0].candidate):
        out.print(line)
    out.print(measured_line(choices[0].prediction.measured_share))
    for line in size_lines(task.machine, task.ranks, choices[0].prediction.memory_bytes):
        out.print(line)
    out.print(f"To train so:\n  {command}", soft_wrap=True)


def _statistics_lines(outcome: PlannedSearch, candidate: Candidate) -> Iterator[str]:
    """The samples that local batch norm normalises over, which the choice decides."""
    config = outcome.task.config
    normalised = any(isinstance(node.spec, BatchNormSpec) for node in outcome.job.graph_of(1).nodes)
    if normalised and config.batch_norm.statistics == "local":
        samples = -(-config.batch // (candidate.plan.cols * candidate.micro_batches))
        yield f"Batch norm takes its statistics over {samples} {'sample' if samples == 1 else 'samples'} with choice 1."


def words(candidate: Candidate) -> str:
    """The uses of the layers and the averager in a few words."""
    plan, options = candidate.plan, candidate.options
    uses = [str(plan.default), *_runs_of_uses(plan)] if plan.rows > 1 else ["batch"]
    if plan.tiles is not None and plan.rows > 1:
        uses.append(f"images in {plan.tiles[0]} x {plan.tiles[1]} tiles")
    described = f" with {', '.join(f'{name} {value}' for name, value in options.items())}" if options else ""
    return f"{', '.join(uses)}; averager {candidate.averager}{described}"


def _runs_of_uses(plan: ParallelPlan) -> Iterator[str]:
    """The plan's patterns with their uses; long runs of the same use from the first to the last pattern."""
    for use, run in groupby(plan.use.items(), key=lambda item: item[1]):
        patterns = [pattern for pattern, _ in run]
        if len(patterns) > _MOST_LISTED:
            yield f"{patterns[0]} .. {patterns[-1]} {use} ({len(patterns)} patterns)"
        else:
            yield from (f"{pattern} {use}" for pattern in patterns)


def as_dict(outcome: PlannedSearch, best: int, command: str) -> dict[str, Any]:
    """The best choices as plain data."""
    return {
        "simulated": True,
        "model": outcome.task.config.model.name,
        "ranks": outcome.task.ranks,
        "batch": outcome.task.config.batch,
        "machine": outcome.task.machine.name,
        "what_if": dict(outcome.task.factors),
        "assumption": outcome.job.assumption or None,
        "estimated": outcome.result.estimated,
        "command": command,
        "choices": [_choice(choice) for choice in outcome.result.choices[:best]],
    }


def _choice(choice: SearchChoice) -> dict[str, Any]:
    prediction = choice.prediction
    return {
        "grid": [choice.candidate.plan.rows, choice.candidate.plan.cols],
        "keys": keys_of(choice.candidate),
        "overrides": list(overrides(choice.candidate)),
        "step_seconds": prediction.step.seconds,
        "exposed_seconds": prediction.step.exposed_seconds,
        "memory_bytes": prediction.memory_bytes,
        "exchanged_bytes": prediction.exchanged_bytes,
        "measured_share": prediction.measured_share,
        "loses": choice.why or None,
    }
