"""Search and simulate for a configuration: costs, the search for grid, plan and averager, and simulated scaling.

Costs of computation are measured times if there are any; otherwise, they follow from the rates of the machine. The search returns
the best candidate as keys of a configuration that `train` runs. If the machine's file has `single_thread_rates`, the search also
compares numbers of ranks per node on the same cores. A scaling study simulates one step on several numbers of ranks and
needs neither MPI nor data. Its efficiency is relative to the smallest number of ranks, as in `bench/scaling.py`: T(R0) / T(R) for
weak scaling (a constant batch per rank), R0 T(R0) / (R T(R)) for strong scaling (a constant batch of all ranks).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.config.load import dump, flow
from hpctrain.config.schema import AveragerConfig, Config, GridConfig, PlanConfig
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.text import counted
from hpctrain.nn.network import ImageShape
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.compute_costs import ComputeCosts, MeasuredCosts, RateCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.costs.operator_times import OperatorTimes, Setting, cache_file, processor_model, setting_here
from hpctrain.planner.job import Candidate
from hpctrain.planner.planned_run import PlannedRun, prepare
from hpctrain.planner.program.step_program import predict
from hpctrain.planner.search.advantage import advantage
from hpctrain.planner.search.search import UNCERTAIN_SHARE, SearchResult, search
from hpctrain.planner.search.search_space import configured_space, kept_sections
from hpctrain.planner.simulation.tasks import Prediction, SimulationOptions
from hpctrain.storage.atomic_write import replacing
from hpctrain.trace.chrome import ChromeTrace


def configured_costs(machine: Machine, task: PlannedRun, compute: float = 1.0) -> ComputeCosts:
    """Return the costs of a job's operators, from times in the user's cache only if the machine is this one.

    Args:
        machine: the machine, not scaled.
        compute: speed of computation relative to the machine's.
    """
    rates = RateCosts(machine.scaled(compute=compute), task.job.dtype)
    if not is_here(machine):
        return rates
    times = OperatorTimes(configured_setting(machine, task), cache_file())
    return MeasuredCosts(times, rates, compute) if len(times) else rates


def is_here(machine: Machine) -> bool:
    """Return whether the machine's rates were measured on a processor of this model, so that times measured here apply."""
    sources = [source for key, source in machine.sources.items() if key.startswith("rates")]
    return any(source.startswith("measured") and processor_model() in source for source in sources)


def configured_setting(machine: Machine, task: PlannedRun) -> Setting:
    """Return the setting in which a rank's operators are timed: its threads, and the number of ranks that compute on its node.

    The threads are the configured ones, or one per core.
    """
    threads = configured_threads(task.config) or machine.threads_per_rank
    return setting_here(task.job.kernels, threads, min(task.plan.rows * task.plan.cols, machine.ranks_per_node))


def configured_threads(config: Config) -> int | None:
    """Return the configured number of threads of a rank; None if `threads` is auto."""
    return None if config.threads == "auto" else config.threads


@dataclass(frozen=True)
class SearchTask:
    """Inputs of a search for a configuration. `image` and `classes` are those of `prepare`.

    Attributes:
        machine: the machine, not scaled.
        factors: keyword arguments of `Machine.scaled`.
        keep: sections of the configuration that are not searched.
    """

    config: Config
    ranks: int
    machine: Machine
    factors: Mapping[str, float] = field(default_factory=dict)
    keep: Collection[str] = ()
    image: ImageShape | None = None
    classes: int | None = None


@dataclass(frozen=True)
class PlannedSearch:
    """Search and its result.

    Attributes:
        planned: the job on an arbitrary possible grid.
        layouts: numbers of ranks per node that were compared, that of the machine's file first, or the only one that was
            requested; empty if several were to be compared but could not be.
        why: comparison of the choice with the default, see `advantage`.
        note: sentence about the choice of ranks per node, or the reason why they were not compared; empty if one was requested.
    """

    task: SearchTask
    planned: PlannedRun
    result: SearchResult
    why: str = ""
    layouts: tuple[NodeLayout, ...] = ()
    note: str = ""

    @property
    def seconds(self) -> float:
        """Step time of the best candidate."""
        return self.result.best.seconds


@dataclass(frozen=True)
class NodeLayout:
    """Number of ranks per node with the search on it.

    Attributes:
        outcome: result of the search; None if it failed or was skipped.
        refusal: reason why there is no result; empty if there is one.
    """

    task: SearchTask
    outcome: PlannedSearch | None = None
    refusal: str = ""

    @property
    def ranks_per_node(self) -> int:
        return self.task.machine.ranks_per_node

    @property
    def threads(self) -> int:
        """Number of threads of a rank."""
        return configured_threads(self.task.config) or self.task.machine.threads_per_rank

    def __str__(self) -> str:
        return f"{counted(self.ranks_per_node, 'rank')} per node with {counted(self.threads, 'thread')} per rank"


def on_any_grid(task: SearchTask) -> PlannedRun:
    """Return the job on the first possible grid, with default values in the searched sections.

    Raises:
        HpctrainError: configuration and data do not agree.
    """
    config, ranks = task.config, task.ranks
    grids = range(1, ranks + 1) if config.exact.shards is None else (1,)  # exact does not support split layers
    rows = next((rows for rows in grids if ranks % rows == 0 and ranks // rows <= config.batch), 1)
    open_sections = {"grid": GridConfig(rows=rows), "plan": PlanConfig(), "averager": AveragerConfig(), "micro_batches": 1}
    return prepare(config.model_copy(update=open_sections), ranks, task.image, task.classes)


def run_search(task: SearchTask) -> PlannedSearch:
    """Search for the best grid, plan and averager of a task, on ranks with the configured number of threads.

    Raises:
        ConfigError: no grid has work for each rank, no plan fits in memory, or the threads exceed the cores of a node.
    """
    task = replace(task, machine=task.machine.with_threads(configured_threads(task.config)))
    planned = on_any_grid(task)
    costs = configured_costs(task.machine, planned, task.factors.get("compute", 1.0))
    machine = task.machine.scaled(**task.factors)
    space = configured_space(task.config, task.ranks, task.keep, planned.job.kernels)
    result = search(planned.job, machine, costs, task.ranks, space)
    return PlannedSearch(task, planned, result, advantage(planned.job, result, machine))


_MOST_LAYOUTS = 5  # each costs a search


def search_layouts(task: SearchTask, ranks_per_node: int | None = None) -> PlannedSearch:
    """Search for the best number of ranks per node and for the best candidate on it; return the result of that search.

    Compared numbers of ranks per node use the nodes that the ranks of the task fill on the machine. The machine's number is kept
    unless another one is faster by more than the uncertainty of predictions. A rank has the configured number of threads, or one
    per core.

    Args:
        task: search on the machine with the ranks per node of its file.
        ranks_per_node: the only number of ranks per node to search, for the ranks of the task; None: compare several, if the
            machine's file has `single_thread_rates` and neither the grid nor the number of ranks rules it out.

    Raises:
        HpctrainError: the search fails for every number of ranks per node; the error is that of the machine's number.
        ConfigError: the given ranks per node times the configured threads exceed the cores of a node, or the given number
            differs from the machine's, whose file has no `single_thread_rates`.
    """
    machine, reason = task.machine, _why_not_compared(task)
    if ranks_per_node is not None:
        fixed = run_search(_on_layout(task, ranks_per_node, task.ranks))
        return replace(fixed, layouts=(NodeLayout(fixed.task, fixed),))
    if reason:
        return replace(run_search(task), note=f"Ranks per node are not compared: {reason}.")
    nodes, errors = machine.nodes_of(task.ranks), []
    layouts: list[NodeLayout] = []
    for number in ranks_per_node_choices(machine, configured_threads(task.config)):
        layout_task = task
        try:
            layout_task = _on_layout(task, number, nodes * number)  # raises if a node has too few cores for the machine's number
            if layouts and layout_task.ranks > task.config.batch:  # the machine's number is searched in any case
                refusal = f"{layout_task.ranks:,} ranks exceed the batch of {task.config.batch:,} samples"
                layouts.append(NodeLayout(layout_task, refusal=refusal))
                continue
            layouts.append(NodeLayout(layout_task, run_search(layout_task)))
        except HpctrainError as error:
            errors.append(error)
            layouts.append(NodeLayout(layout_task, refusal=str(error).rstrip(".")))
    searched = [layout for layout in layouts if layout.outcome is not None]
    if not searched:
        raise errors[0]
    best, note = _best_layout(layouts[0], searched)
    return replace(best, layouts=tuple(layouts), note=note)


def ranks_per_node_choices(machine: Machine, threads: int | None = None) -> tuple[int, ...]:
    """Return the numbers of ranks per node to compare, at most five: the machine's, then divisors of the node's cores.

    Powers of two precede other divisors; among each, numbers near the machine's precede distant ones.

    Args:
        threads: number of threads of a rank, which limits the ranks per node; None: one per core.
    """
    cores, present = machine.cores_per_node, machine.ranks_per_node
    most = cores // (threads or 1)
    others = [number for number in range(1, most + 1) if cores % number == 0 and number != present]
    others.sort(key=lambda number: (number.bit_count() > 1, abs(math.log(number / present))))
    return (present, *others[: _MOST_LAYOUTS - 1])


def _why_not_compared(task: SearchTask) -> str:
    """Return the reason why numbers of ranks per node are not compared; empty if they are."""
    present = task.machine.ranks_per_node
    if not task.machine.single_thread_rates:
        return (
            f"the file of machine {task.machine.name} has no single_thread_rates, which `hpctrain calibrate` measures for ranks "
            f"with several cores"
        )
    if "grid" in task.keep and not task.config.grid.automatic and task.config.grid.cols is not None:
        return f"the kept grid has {counted(task.config.grid.rows * task.config.grid.cols, 'rank')}"
    if task.ranks % present:
        return f"a job of {counted(task.ranks, 'rank')} does not fill nodes of {counted(present, 'rank')}"
    return ""


def _on_layout(task: SearchTask, ranks_per_node: int, ranks: int) -> SearchTask:
    """Return the search on `ranks` ranks of the machine with this number of ranks per node; its configuration has the threads."""
    threads, machine = configured_threads(task.config), task.machine
    if ranks_per_node != machine.ranks_per_node or machine.single_thread_rates:
        machine = machine.with_ranks_per_node(ranks_per_node, threads)
    config = task.config.model_copy(update={"threads": threads or machine.threads_per_rank})
    return replace(task, config=config, ranks=ranks, machine=machine)


def _best_layout(present: NodeLayout, searched: Sequence[NodeLayout]) -> tuple[PlannedSearch, str]:
    """Return the search with the best number of ranks per node, and a sentence about the choice.

    `present` has the machine's number of ranks per node.
    """
    outcomes = [layout.outcome for layout in searched if layout.outcome is not None]
    fastest, best = min(zip(searched, outcomes, strict=True), key=lambda pair: pair[1].seconds)
    shares = [outcome.result.best.prediction.measured_share for outcome in outcomes]
    mixed = " Only some of these choices have measured times; add --measure for all." if min(shares) == 0 < max(shares) else ""
    words = f"The fastest choice is {fastest}"
    if present.outcome is None:
        return best, f"{words}.{mixed}"
    if fastest is present:
        return best, f"{words}, as many ranks as in the machine's file.{mixed}"
    gain = present.outcome.seconds / best.seconds - 1
    if gain > UNCERTAIN_SHARE:
        of_file = counted(present.ranks_per_node, "rank")
        return best, f"{words}, {gain:.0%} faster than the {of_file} of the machine's file.{mixed}"
    error = f"{fastest} would be {gain:.1%} faster, which is within the error of predictions"
    return present.outcome, f"The best choice is {present}, as many ranks as in the machine's file: {error}.{mixed}"


def resolved(
    config: Config, ranks: int | None, machine: str | None, image: ImageShape | None, classes: int | None
) -> tuple[Config, str]:
    """Return the configuration that a job with this number of ranks would run on a machine, and a line with the reason.

    Args:
        ranks: number of ranks; None: the size of the configured grid.
        machine: file or name of a machine; None: the configured one.
        image, classes: see `planned_run.prepare`.

    Raises:
        ConfigError: a section is auto, but the number of ranks or the machine is unknown, or no plan fits.
    """
    name = machine or config.machine
    if ranks is None and not config.grid.automatic and config.grid.cols is not None:
        ranks = config.grid.rows * config.grid.cols
    if ranks is None or name is None:
        lacks = "the number of ranks" if ranks is None else "the machine"
        option = "--ranks" if ranks is None else "--machine"
        raise ConfigError(
            f"{' and '.join(config.automatic)} {'is' if len(config.automatic) == 1 else 'are'} auto, which depends on {lacks}; "
            f"give {option}, or values instead of auto."
        )
    keep = kept_sections(config)
    outcome = run_search(SearchTask(config, ranks, machine_file.read(name), keep=keep, image=image, classes=classes))
    clauses = f"{', '.join(config.automatic)} auto: predicted {outcome.seconds:.3g} s per step", outcome.why
    line = "; ".join(filter(None, clauses))
    return with_candidate(config, outcome.result.best.candidate), line


Mode = Literal["weak", "strong"]


@dataclass(frozen=True)
class SimulatedPoint:
    """Simulated step on a number of ranks.

    Attributes:
        averager: label of the averager.
        batch: samples of a step over all ranks.
    """

    averager: str
    ranks: int
    batch: int
    grid: tuple[int, int]  # (Pr, Pc)
    prediction: Prediction

    @property
    def step_seconds(self) -> float:
        return self.prediction.step.seconds

    @property
    def exposed_seconds(self) -> float:
        return self.prediction.step.exposed_seconds

    @property
    def images_per_second(self) -> float:
        return self.batch / self.step_seconds

    def efficiency(self, base: SimulatedPoint) -> float:
        """Return images per second and rank, relative to `base`."""
        return (self.images_per_second / self.ranks) / (base.images_per_second / base.ranks)

    def facts(self, base: SimulatedPoint) -> dict[str, Any]:
        """Return the point as plain data, with the efficiency relative to `base`."""
        return {
            "averager": self.averager,
            "ranks": self.ranks,
            "grid": list(self.grid),
            "batch": self.batch,
            "step_seconds": self.step_seconds,
            "exposed_seconds": self.exposed_seconds,
            "efficiency": self.efficiency(base),
            "images_per_second": self.images_per_second,
            "memory_bytes": self.prediction.memory_bytes,
            "exchanged_bytes": self.prediction.exchanged_bytes,
            "measured_share": self.prediction.measured_share,
        }


@dataclass(frozen=True)
class SimulatedStudy:
    """Jobs of a scaling study. `image` and `classes` are those of `prepare`.

    Attributes:
        configs: configuration of each averager, by label.
        mode: "weak" or "strong"; if weak, the configured batch is the batch of each rank, as in `bench scaling`.
        machine: the machine with the configured threads, not scaled.
        factors: keyword arguments of `Machine.scaled`.
    """

    configs: Mapping[str, Config]
    ranks: tuple[int, ...]
    mode: Mode
    machine: Machine
    factors: Mapping[str, float]
    options: SimulationOptions
    image: ImageShape | None = None
    classes: int | None = None

    @property
    def title(self) -> str:
        """Model, machine and mode, marked as simulated."""
        model = next(iter(self.configs.values())).model.name
        changed = "".join(f", {name} x {factor:g}" for name, factor in self.factors.items() if factor != 1)
        return f"simulated: {model} on {self.machine.name}{changed}, {self.mode} scaling"

    def tasks(self) -> Iterator[tuple[str, PlannedRun]]:
        """Yield the label and the plan of each job."""
        for label in self.configs:
            for ranks in self.ranks:
                task = self.search_task(label, ranks)
                config = task.config
                if config.automatic:
                    config = with_candidate(config, run_search(task).result.best.candidate)
                yield label, prepare(config, ranks, self.image, self.classes)

    def search_task(self, label: str, ranks: int) -> SearchTask:
        """Return the search for the sections that the configuration of a label leaves open (auto), on `ranks` ranks."""
        config = self.configs[label]
        batch = config.batch * ranks if self.mode == "weak" else config.batch
        keep = kept_sections(config)
        config = config.model_copy(update={"batch": batch})
        return SearchTask(config, ranks, self.machine, self.factors, keep, self.image, self.classes)


def run(study: SimulatedStudy) -> list[SimulatedPoint]:
    """Simulate all points, averager by averager.

    Raises:
        HpctrainError: the job cannot run on one of the numbers of ranks; raised before the first simulation.
    """
    machine = study.machine.scaled(**study.factors)
    points = []
    for label, task in list(study.tasks()):
        costs = configured_costs(study.machine, task, study.factors.get("compute", 1.0))
        prediction = predict(task.job, task.candidate, machine, costs, study.options)
        plan = task.plan
        points.append(SimulatedPoint(label, plan.rows * plan.cols, task.config.batch, (plan.rows, plan.cols), prediction))
    return points


def facts(study: SimulatedStudy, points: Sequence[SimulatedPoint]) -> dict[str, Any]:
    """Return the study as plain data. Efficiency is relative to the first point of the same averager."""
    return {
        "simulated": True,
        "machine": study.machine.name,
        "what_if": dict(study.factors),
        "mode": study.mode,
        "points": [point.facts(line[0]) for line in by_averager(points).values() for point in line],
    }


def write_trace(path: Path, point: SimulatedPoint, title: str) -> Path:
    """Write the simulated step of a point as a trace file, in which each class of ranks is a process, and return the path.

    Raises:
        OSError: the file cannot be written.
    """
    classes = point.prediction.step.events
    begin_ns = min((int(events.start_ns.min()) for events in classes.values() if len(events)), default=0)
    with replacing(path) as partial:
        with ChromeTrace(partial, base_ns=begin_ns) as trace:
            for number, (name, events) in enumerate(classes.items()):
                trace.add_rank(number, events, name=f"simulated: {name}")
            trace.describe({"simulated": True, "title": title, "averager": point.averager, "ranks": point.ranks})
        if trace.error is not None:
            raise trace.error
    return path


def by_averager(points: Sequence[SimulatedPoint]) -> dict[str, list[SimulatedPoint]]:
    """Return the points of each averager, in order."""
    return {
        name: [point for point in points if point.averager == name] for name in dict.fromkeys(point.averager for point in points)
    }


def keys_of(candidate: Candidate) -> dict[str, Any]:
    """Return the sections grid, plan, averager and micro_batches of a candidate as plain data."""
    plan = candidate.plan
    return {
        "grid": {"rows": plan.rows, "cols": plan.cols, **({} if plan.tiles is None else {"tiles": list(plan.tiles)})},
        "plan": {"default": str(plan.default), **{pattern: str(use) for pattern, use in plan.use.items()}},
        "averager": {"name": candidate.averager.name, **candidate.averager.options},
        "micro_batches": candidate.micro_batches,
    }


def with_candidate(config: Config, candidate: Candidate) -> Config:
    """Return the configuration that runs the candidate, with its grid, plan, averager and micro-batches."""
    return Config.model_validate({**config.model_dump(mode="json"), **keys_of(candidate)})


def overrides(candidate: Candidate, threads: int | None = None) -> tuple[str, ...]:
    """Return the candidate's keys, and `threads` if it is not None, as command-line overrides: "grid={rows: 2, cols: 4}"."""
    keys = keys_of(candidate) if threads is None else {**keys_of(candidate), "threads": threads}
    return tuple(f"{key}={flow(value)}" for key, value in keys.items())


def command_line(file: str, words: tuple[str, ...], ranks: int) -> str:
    """Return the command that trains the configuration `file` with the overrides `words` on `ranks` ranks, quoted for a shell."""
    start = f"mpiexec -n {ranks} python -m mpi4py -m hpctrain train"
    return " ".join((start, *(shlex.quote(word) for word in (file, *words))))


def written(config: Config, candidate: Candidate, head: tuple[str, ...]) -> str:
    """Return the whole configuration with the candidate's keys as YAML, preceded by `head` as comment lines."""
    comments = "".join(f"# {line}\n" for line in head)
    return comments + dump(with_candidate(config, candidate))
