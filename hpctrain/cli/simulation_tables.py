"""Print machines, predictions and search results as tables, with notes below.

Every predicted number is marked as simulated. A search prints the best choices, their plans in words, and a
comparison of the best one with the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from hpctrain.assembly.recipe import statistics_words
from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.core.console import PlainConsole, output_console, plain_table
from hpctrain.core.text import counted, size_text
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.machine import Link, Machine, OperatorClass, OperatorRate
from hpctrain.planner.job import Candidate
from hpctrain.planner.search.configured_search import (
    NodeLayout,
    PlannedSearch,
    SimulatedPoint,
    SimulatedStudy,
    by_averager,
    configured_threads,
    keys_of,
    on_any_grid,
    overrides,
)
from hpctrain.planner.search.search import SearchChoice

_COLUMNS = 100  # width without a terminal
_MACHINE_COLUMNS = 80  # width without a terminal, as under mpiexec
_WIDEST = 1000
_SHARE_THAT_IS_ALL = 0.995


def print_whole(out: Console, rows: Table) -> None:
    """Print a table in its full width. A narrow terminal breaks its lines, but no number is cut off."""
    width = Measurement.get(out, out.options.update(max_width=_WIDEST), rows).maximum
    wide = PlainConsole(file=out.file, width=max(width, out.width), force_terminal=out.is_terminal, markup=True)
    wide.print(rows)


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds with about four digits: 0, 0.0123, 12.34, 1,234."""
    value = seconds * 1e3
    if value == 0:
        return "0"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 1 else 4}f}"


def three_digits(value: float) -> str:
    """Return a number with two decimals below 10, one below 100, and none from 100 on: 0.04, 1.23, 12.3, 1,234."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def megabytes(n_bytes: float) -> str:
    """Return a number of bytes in millions."""
    return three_digits(n_bytes / 1e6)


def machine_lines(machine: Machine, factors: Mapping[str, float], threads: int | None = None) -> Iterator[str]:
    """Yield a sentence with the machine and the share of its numbers that was measured, and one with the what-if factors.

    Args:
        threads: configured number of threads of a rank; None: one thread per core. If it differs from that of the machine's
            file, another sentence states this.
    """
    numbers = machine.sources.values()
    measured = sum(source.startswith("measured") for source in numbers)
    share = "measured" if measured == len(numbers) else f"{measured} of {len(numbers)} numbers measured"
    yield f"Machine {machine.name} ({share if measured else 'not measured'}): {machine.description or 'no description'}."
    changed = [f"{name} x {factor:g}" for name, factor in factors.items() if factor != 1]
    if changed:
        yield f"What if: {', '.join(changed)}."
    full = (machine.origin or machine).threads_per_rank
    if threads is not None and machine.origin is not None:
        yield (
            f"A node has {counted(machine.ranks_per_node, 'rank')} with {counted(threads, 'thread')} each; the machine's file "
            f"has {counted(machine.origin.ranks_per_node, 'rank')} with {counted(full, 'thread')} each."
        )
    elif threads is not None and threads != full:
        yield (
            f"Times are those of {counted(full, 'thread')} per rank instead of {threads}, because the machine's file has no "
            "single_thread_rates."
        )


def measured_line(share: float, estimate: str = "") -> str:
    """Return sentences on the measured share of the compute time, on `Machine.estimate_note`, and on how to increase it."""
    if share >= _SHARE_THAT_IS_ALL:
        return "All computation times were measured on this processor."
    if share == 0:
        part_measured = "No computation times were measured; all follow from the machine's rates."
    else:
        part_measured = f"{share:.0%} of the computation time was measured; the rest follows from the machine's rates."
    estimate = f" {estimate}" if estimate else ""
    return (
        f"{part_measured}{estimate} To measure a machine: `hpctrain calibrate`; to measure this network: "
        "`hpctrain plan search --measure`."
    )


def size_lines(machine: Machine, ranks: int, memory_bytes: int) -> Iterator[str]:
    """Yield a sentence for each limit of the machine that a job of `ranks` ranks, each with `memory_bytes`, exceeds."""
    nodes = machine.nodes_of(ranks)
    if nodes > machine.nodes:
        places = f"{machine.nodes:,} x {machine.ranks_per_node}"
        needs = f"{ranks:,} ranks need {nodes:,} nodes, so more nodes of the same kind are assumed"
        yield f"Machine {machine.name} has {places} ranks; {needs}."
    if memory_bytes > machine.memory_bytes:
        needed, present = size_text(memory_bytes), size_text(machine.memory_bytes)
        yield f"A rank needs up to {needed}, but has {present}: the largest of these jobs does not fit."


def print_scaling(study: SimulatedStudy, points: Sequence[SimulatedPoint]) -> None:
    """Print the simulated points of each averager with their efficiency and notes."""
    task = on_any_grid(study.search_task(next(iter(study.configs)), study.ranks[0]))
    height, width, channels = task.job.image_shape
    weak = study.mode == "weak"
    batch = points[0].batch // points[0].ranks if weak else points[0].batch
    out = output_console(_COLUMNS, markup=True)
    out.print(
        f"Simulated: {task.config.model.name}, {study.mode} scaling, batch {batch} {'per rank' if weak else 'in all'}; "
        f"images {height} x {width} x {channels}, kernels {task.job.kernels.name}"
    )
    threads = configured_threads(task.config)
    for line in (*machine_lines(study.machine, study.factors, threads), *([task.assumption] if task.assumption else [])):
        out.print(line)
    for name, line_points in by_averager(points).items():
        out.print(f"\naverager {name}, simulated:")
        print_whole(out, scaling_table(line_points))
        averager = study.configs[name].averager
        note = AveragerChoice(averager.name, averager.options).costs.note
        if note is not None:
            out.print(note)
    out.print("")
    share = min(point.prediction.measured_share for point in points)
    out.print(measured_line(share, study.machine.estimate_note(task.job.dtype)))
    for line in size_lines(
        study.machine, max(point.ranks for point in points), max(point.prediction.memory_bytes for point in points)
    ):
        out.print(line)


def scaling_table(points: Sequence[SimulatedPoint]) -> Table:
    """Return a table with a row for each point; efficiency is relative to the first point."""
    rows = plain_table("ranks", "step ms", "exposed ms", "efficiency", "images/s", "memory MB", left=0, bold=True)
    for point in points:
        rows.add_row(
            f"{point.ranks:,}",
            milliseconds(point.step_seconds),
            milliseconds(point.exposed_seconds),
            f"{point.efficiency(points[0]):.1%}",
            three_digits(point.images_per_second),
            megabytes(point.prediction.memory_bytes),
        )
    return rows


_MOST_LISTED = 3  # maximum number of patterns of the same use; --json and written files contain all


def print_search(outcome: PlannedSearch, best: int, command: str) -> None:
    """Print the first `best` choices, and the command line that trains with the first one."""
    task, planned, choices = outcome.task, outcome.planned, outcome.result.choices[:best]
    height, width, channels = planned.job.image_shape
    out = output_console(_COLUMNS, markup=True)
    out.print(
        f"Simulated: {task.config.model.name} on {task.ranks:,} ranks, batch {task.config.batch}; images {height} x {width} x "
        f"{channels}, kernels {planned.job.kernels.name}"
    )
    threads = None if outcome.layouts else configured_threads(task.config)
    for line in (*machine_lines(task.machine, task.factors, threads), *([planned.assumption] if planned.assumption else []), ""):
        out.print(line)
    if outcome.layouts:
        print_whole(out, _layout_table(outcome.layouts))
        for layout in outcome.layouts:
            if layout.refusal:
                out.print(f"{layout}: {layout.refusal}.")
    if outcome.note:
        out.print(outcome.note)
    if outcome.layouts or outcome.note:
        out.print("")
    figures = plain_table("", "step ms", "exposed ms", "memory MB", "exchanged MB", "micro", "grid", bold=True)
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
        out.print(f"{number}: {candidate_words(choice.candidate)}.")
        if not choice.fits:
            out.print("   It does not fit in the memory of a rank.")
    out.print("")
    if outcome.why:
        out.print(f"Choice 1: {outcome.why}.")
    best_one = choices[0].candidate
    words = statistics_words(best_one.plan, planned.job.graph_of(1), task.config.batch, best_one.micro_batches)
    if words and task.config.batch_norm.statistics == "local":
        out.print(f"With choice 1, {words}.")
    out.print(measured_line(choices[0].prediction.measured_share, task.machine.estimate_note(planned.job.dtype)))
    for line in size_lines(task.machine, task.ranks, choices[0].prediction.memory_bytes):
        out.print(line)
    ranks_of_node = counted(min(task.ranks, task.machine.ranks_per_node), "rank")
    placement = f", {ranks_of_node} on each node" if outcome.layouts else ""
    out.print(f"To train with choice 1{placement}:\n  {command}", soft_wrap=True)


def _layout_table(layouts: Sequence[NodeLayout]) -> Table:
    """Return a table with a row for each number of ranks per node, in ascending order; numbers without a result have dashes."""
    rows = plain_table("ranks per node", "threads", "ranks", "grid", "step ms", "exposed ms", left=0, bold=True)
    for layout in sorted(layouts, key=lambda one: one.ranks_per_node):
        figures = ("-", "-", "-")
        if layout.outcome is not None:
            best = layout.outcome.result.best
            step, plan = best.prediction.step, best.candidate.plan
            figures = (f"{plan.rows} x {plan.cols}", milliseconds(step.seconds), milliseconds(step.exposed_seconds))
        rows.add_row(f"{layout.ranks_per_node}", f"{layout.threads}", f"{layout.task.ranks:,}", *figures)
    return rows


def candidate_words(candidate: Candidate) -> str:
    """Return a short description of the uses of layers and the averager."""
    plan = candidate.plan
    uses = [str(plan.default), *_runs_of_uses(plan)] if plan.rows > 1 else ["batch"]
    if plan.tiles is not None and plan.rows > 1:
        uses.append(f"images in {plan.tiles[0]} x {plan.tiles[1]} tiles")
    return f"{', '.join(uses)}; averager {candidate.averager}"


def _runs_of_uses(plan: ParallelPlan) -> Iterator[str]:
    """Yield the plan's patterns with their uses. Long runs of the same use are abbreviated by their first and last pattern."""
    for use, run in groupby(plan.use.items(), key=lambda item: item[1]):
        patterns = [pattern for pattern, _ in run]
        if len(patterns) > _MOST_LISTED:
            yield f"{patterns[0]} .. {patterns[-1]} {use} ({len(patterns)} patterns)"
        else:
            yield from (f"{pattern} {use}" for pattern in patterns)


def search_dict(outcome: PlannedSearch, best: int, command: str) -> dict[str, Any]:
    """Return the first `best` choices, and the command line that trains with the first one, as plain data."""
    return {
        "simulated": True,
        "model": outcome.task.config.model.name,
        "ranks": outcome.task.ranks,
        "ranks_per_node": outcome.task.machine.ranks_per_node,
        "threads": configured_threads(outcome.task.config),
        "batch": outcome.task.config.batch,
        "machine": outcome.task.machine.name,
        "what_if": dict(outcome.task.factors),
        "assumption": outcome.planned.assumption or None,
        "estimated": outcome.result.estimated,
        "command": command,
        "layouts": [_layout(layout) for layout in outcome.layouts],
        "layouts_note": outcome.note or None,
        "why": outcome.why or None,
        "choices": [_choice(choice) for choice in outcome.result.choices[:best]],
    }


def _layout(layout: NodeLayout) -> dict[str, Any]:
    return {
        "ranks_per_node": layout.ranks_per_node,
        "threads": layout.threads,
        "ranks": layout.task.ranks,
        "step_seconds": None if layout.outcome is None else layout.outcome.seconds,
        "refusal": layout.refusal or None,
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
        "fits": choice.fits,
    }


def print_machine(machine: Machine) -> None:
    """Print a table of every number of a machine and its source; print a repeated source once."""
    table = plain_table("number", "value", "source", left=3, bold=True)
    table.title, table.title_justify = f"{machine.name}: {machine.description}", "left"
    previous = ""
    for key, value in _machine_lines(machine):
        below = (name for name in machine.sources if name.startswith(f"{key}."))
        source = machine_file.source_of(machine, next(below, key))  # of a section: that of its first number
        table.add_row(key, value, "" if source == previous else source)
        previous = source
    output_console(_MACHINE_COLUMNS).print(table)


def _machine_lines(machine: Machine) -> list[tuple[str, str]]:
    lines = [
        ("nodes", f"{machine.nodes}"),
        ("ranks_per_node", f"{machine.ranks_per_node}"),
        ("cores_per_rank", f"{machine.cores_per_rank:g}"),
        ("memory_bytes", size_text(machine.memory_bytes)),
        ("ranks_per_card", f"{machine.ranks_per_card}"),
    ]
    for name, link in (("within", machine.within), ("between", machine.between)):
        lines += [(f"{name}.{key}", value) for key, value in _link_lines(link)]
    for kind, rate in machine.rates.items():
        lines.append((f"rates.{kind}", _rate_words(kind, rate)))
    for kind, rate in machine.single_thread_rates.items():
        lines.append(("single_thread_rates", f"{kind}: {_rate_words(kind, rate)}"))
    if math.isfinite(machine.node_bytes_per_second):
        lines.append(("node_bytes_per_second", f"{size_text(machine.node_bytes_per_second)}/s"))
    return lines


def _rate_words(kind: OperatorClass, rate: OperatorRate) -> str:
    of_memory = kind.of_dtype("float32") is OperatorClass.MEMORY
    speed = "" if of_memory else f"{rate.flops_per_second / 1e9:.1f} Gflop/s, "
    of_weights = "".join(
        f", {words} {size_text(n_bytes)}/s"
        for words, n_bytes in (("weights", rate.weight_bytes_per_second), ("transposed", rate.transposed_bytes_per_second))
        if n_bytes is not None
    )
    return f"{speed}{size_text(rate.bytes_per_second)}/s{of_weights}, {rate.call_seconds * 1e6:.0f} us per call"


def _link_lines(link: Link) -> list[tuple[str, str]]:
    lines = []
    for one in link.segments:
        rate = f"{size_text(1 / one.beta_seconds_per_byte)}/s" if one.beta_seconds_per_byte else "no time per byte"
        unattended = "" if one.unattended_bytes is None else f", {one.unattended_bytes / 1024:.0f} KiB between polls"
        polls = f", {one.polls} polls before" if one.polls else ""
        begin = f"{one.from_bytes / 1024:g} KiB"
        lines.append(("segments", f"from {begin}: {one.alpha_seconds * 1e6:.1f} us, {rate}{unattended}{polls}"))
    lines.append(("operation_seconds", f"{link.operation_seconds * 1e6:.0f} us"))
    lines.append(("byte_seconds", f"{link.byte_seconds * 1e12:.0f} ps"))
    lines.append(("sum_seconds", f"{link.sum_seconds * 1e12:.0f} ps"))
    lines.append(("burst_bytes", f"{link.burst_bytes / 1024:.0f} KiB"))
    if link.buffered_bytes is not None:
        lines.append(("buffered_bytes", f"{link.buffered_bytes / 1024:.0f} KiB"))
    return lines
