"""Print plans and schedules: as a table of layers, as lines, and as plain data for JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from hpctrain.comm.link import LinkModel
from hpctrain.core.console import output_console, plain_table
from hpctrain.core.intervals import Box, Interval
from hpctrain.core.text import counted
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.plan_report import LayerReport, PlanReport, RedistributionReport, Traffic, Words
from hpctrain.planner.planned_run import PlannedRun, averaging_bytes, micro_counts
from hpctrain.planner.program.group_schedules import GroupSchedule

_COLUMNS = 100  # width without a terminal; the table of layers may be wider
_WIDEST = 1000
_MOST_LISTED = 32
_DIMS = ("samples", "rows", "columns", "channels")
_Value = TypeVar("_Value")
_SHORT = {"conv2d": "conv", "batchnorm": "norm", "adaptiveaveragepool": "mean pool"}


def print_plan(
    task: PlannedRun,
    report: PlanReport,
    averaged: Sequence[GroupSchedule],
    ranks_per_node: int | None,
) -> None:
    """Print the head, layers, totals, gradients and map of ranks to stdout. Lines are never truncated.

    Args:
        ranks_per_node: number of consecutive ranks on each node; None: all ranks are on one node.
    """
    console = output_console(_COLUMNS, markup=True)
    for line in _head(task):
        console.print(line)
    _print_layers(console, task, report)
    for line in (
        *_totals(report),
        *_gradients(task, averaged),
        *_map(task.plan, ranks_per_node),
    ):
        console.print(line)


def _head(task: PlannedRun) -> Iterator[str]:
    plan, config = task.plan, task.config
    height, width, channels = task.job.image_shape
    counts = micro_counts(task)
    samples = counted(counts[0], "sample") if len(set(counts)) == 1 else f"{_range(counts)} samples"
    micro = f" in {config.micro_batches} micro-batches" if config.micro_batches > 1 else ""
    numbers = config.dtype if config.precision == "float32" else config.precision
    yield (
        f"{config.model.name} on {counted(plan.rows * plan.cols, 'rank')}, a grid of {plan.rows} x {plan.cols}; images {height} "
        f"x {width} x {channels}, batch {config.batch}{micro}: {samples} per rank; {numbers}, kernels {task.job.kernels.name}"
    )
    if task.assumption:
        yield task.assumption
    yield (
        "Owned and halo: of rank r = 0, 1, ... of the first split group. Sent: bytes that a rank sends to others in a pass, "
        "minimum..maximum over ranks. MB: maximum over ranks of parameters and of activations (as tensors)."
    )
    yield ""


def _print_layers(console: Console, task: PlannedRun, report: PlanReport) -> None:
    """Print the layers, with the bytes sent in two columns if the width suffices, else in one."""
    for narrow in (False, True):
        table = _layers(task, report, narrow=narrow)
        # Folding may produce lines that are wider than the minimum.
        lines = Segment.split_lines(console.render(table))
        rendered = max(sum(segment.cell_length for segment in line) for line in lines)
        least = max(rendered, Measurement.get(console, console.options.update(max_width=_WIDEST), table).minimum)
        if least <= console.width:
            break
    console.print(table, width=max(console.width, least), crop=False, no_wrap=True)


def _layers(task: PlannedRun, report: PlanReport, *, narrow: bool) -> Table:
    """Return the table of layers.

    Args:
        narrow: whether to put the bytes sent in forward above those of backward, and to fold names earlier.
    """
    table = plain_table(gap=1, bold=True)
    table.show_header = True
    table.add_column("layer", overflow="fold", min_width=16 if narrow else 22)
    table.add_column("use", no_wrap=True)
    table.add_column("owned", overflow="fold", min_width=12 if narrow else 16)
    table.add_column("halo", overflow="fold", min_width=4, max_width=9)
    titles = ("sent\nforward,\nbackward",) if narrow else ("sent\nforward", "sent\nbackward")
    for title in (*titles, "param.\nMB", "activ.\nMB"):
        table.add_column(title, justify="right", no_wrap=True)
    item = report.item_bytes
    for entry in report.entries:
        sent = _sent_cells(entry.traffic, item, narrow=narrow)
        activations = _megabytes([max(entry.activations)], item)
        if isinstance(entry, RedistributionReport):
            table.add_row("  [italic]redistribute[/]", "", f"{entry.source} -> {entry.target}", "", *sent, "", activations)
            continue
        split_size = task.plan.rows
        table.add_row(
            f"{entry.name} {_operation(entry)}",
            entry.use.value,
            _owned(entry, split_size),
            _halo(entry, split_size),
            *sent,
            _megabytes([max(entry.parameters)], item) if any(entry.parameters) else "",
            activations,
        )
    total = report.traffic
    sums = _sent_cells(total, item, narrow=narrow)
    table.add_section()
    table.add_row("[bold]total[/]", "", "", "", *sums, _megabytes([max(report.parameters)], item), "")
    return table


def _sent_cells(traffic: Traffic, item_bytes: int, *, narrow: bool) -> tuple[str, ...]:
    """Return the bytes sent in forward and backward, in two cells or in the two lines of one cell."""
    forward, backward = (
        _range(words, "..\n") for words in (traffic.bytes_forward(item_bytes), traffic.bytes_backward(item_bytes))
    )
    if not narrow:
        return forward, backward
    return ("0" if forward == backward == "0" else f"{forward}\n{backward}",)


def _totals(report: PlanReport) -> Iterator[str]:
    yield ""
    if report.memory is not None:
        arena = _megabytes([of_rank.activations for of_rank in report.memory], 1)
        messages = _megabytes([of_rank.messages for of_rank in report.memory], 1)
        parameters = _megabytes([of_rank.parameters for of_rank in report.memory], 1)
        yield (
            f"Memory per rank: {arena} MB for the activations of a step and their gradients, as the program plans them; "
            f"{messages} MB for messages in its split group; {parameters} MB for parameters, and the same for their gradients."
        )


def _gradients(task: PlannedRun, averaged: Sequence[GroupSchedule]) -> Iterator[str]:
    item = 8 if task.config.dtype == "float64" else 4
    for group in averaged:
        exchanged = _range(group.exchanged_bytes(item))
        which = f" (r = {', '.join(map(str, group.split_ranks))})" if len(group.split_ranks) < task.plan.rows else ""
        yield (
            f"Gradients of group {group.group}{which}: {group.elements:,} elements over {counted(group.ranks, 'rank')}, "
            f"{exchanged} bytes per rank and step with {task.config.averager.name}."
        )
    yield f"All gradients: {_range(averaging_bytes(task, averaged))} bytes per rank and step."
    note = task.candidate.averager.costs.note
    if note is not None:
        yield note


def _map(plan: ParallelPlan, ranks_per_node: int | None) -> Iterator[str]:
    yield ""
    yield "Ranks of each split group, r = 0, 1, ... (they share samples):"
    per_node = ranks_per_node or plan.rows * plan.cols
    for c in range(min(plan.cols, _MOST_LISTED)):
        ranks = range(c * plan.rows, (c + 1) * plan.rows)
        nodes = range(ranks[0] // per_node, ranks[-1] // per_node + 1)
        where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {number_ranges(nodes)}: this split group spans nodes"
        yield f"  c = {c}: {number_ranges(ranks)}   {where}"
    if plan.cols > _MOST_LISTED:
        yield f"  ... and {plan.cols - _MOST_LISTED} more: rank r of split group c is rank {plan.rows} c + r."


def _operation(layer: LayerReport) -> str:
    word, _, rest = layer.operation.partition(" ")
    return f"{_SHORT.get(word, word)} {rest}".strip()


def _owned(layer: LayerReport, split_size: int) -> str:
    boxes = layer.owns[:split_size]
    if layer.kind is LayoutKind.TILES and len({box[2] for box in boxes}) > 1:
        return "tiles " + " ".join(f"{_interval(box[1])}x{_interval(box[2])}" for box in boxes)
    dim = {LayoutKind.SAMPLES: 0, LayoutKind.TILES: 1, LayoutKind.CHANNELS: -1}[layer.kind]
    return f"{layer.kind.value} " + " ".join(_interval(box[dim]) for box in boxes)


def _halo(layer: LayerReport, split_size: int) -> str:
    halo = layer.halo[:split_size]
    if not any(map(any, halo)):
        return ""
    tiled = any(columns for _, columns in halo)
    return " ".join(f"{high}+{wide}" if tiled else str(high) for high, wide in halo)


def _interval(interval: Interval) -> str:
    return f"{interval[0]}:{interval[1]}" if interval[0] < interval[1] else "-"


def _range(values: Sequence[int], between: str = " to ") -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,}{between}{most:,}"


def _megabytes(values: Sequence[int], item_bytes: int) -> str:
    least, most = (f"{item_bytes * value / 1e6:,.2f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def schedule_lines(task: PlannedRun, averaged: Sequence[GroupSchedule], link: LinkModel) -> Iterator[str]:
    """Yield each group's slices with their owners, then the operations in posting order."""
    yield (
        f"{task.config.averager.name} on a grid of {task.plan.rows} x {task.plan.cols}, batch {task.config.batch}; first steps, "
        f"for alpha {link.alpha_seconds:g} s, beta {link.beta_seconds_per_byte:g} s per byte"
    )
    if task.assumption:
        yield task.assumption
    for group in averaged:
        yield ""
        split_ranks = ", ".join(map(str, group.split_ranks))
        yield f"group {group.group}, r = {split_ranks}: {group.elements:,} elements, {counted(group.ranks, 'rank')}"
        if group.schedule is None:
            yield f"one allreduce of all {group.elements:,} elements after backward; every rank updates all of them"
            continue
        yield from group.schedule.table().splitlines()
        yield f"hash {group.schedule.digest()}"
        yield f"exchanged: {_range(group.exchanged)} elements per rank and step"
        yield "slice  [start, stop)  elements of ranks"
        for number, piece in enumerate(group.schedule.slices):
            owned = (
                "; ".join(f"{size:,} of {number_ranges(ranks)}" for size, ranks in _ranks_by_value(group.owned(piece)).items())
                if any(operation.kind.value != "allreduce" for operation in group.schedule.operations)
                else "all elements, on every rank"
            )
            yield f"{number:5}  [{piece.start}, {piece.stop})  {owned}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text in their order, with those at equal distances as a range: "0-7, 16-8176:16, 9"."""
    texts, first = [], 0
    while first < len(numbers):
        last = first + 1
        step = numbers[last] - numbers[first] if last < len(numbers) else 0
        while step > 0 and last + 1 < len(numbers) and numbers[last + 1] - numbers[last] == step:
            last += 1
        if last == len(numbers) or step <= 0 or (step > 1 and last == first + 1):
            last = first  # a single number
        text = str(numbers[first]) + (f"-{numbers[last]}" if last > first else "")
        texts.append(text + (f":{step}" if last > first and step > 1 else ""))
        first = last + 1
    return ", ".join(texts)


def _ranks_by_value(by_rank: Sequence[_Value]) -> dict[_Value, list[int]]:
    """Return the ranks that have each value, ascending. Values are in the order of their first ranks."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in enumerate(by_rank):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _rank_classes(n_ranks: int, **by_rank: Sequence[int]) -> list[dict[str, Any]]:
    """Return a mapping for each class of ranks with equal numbers: the ranks as text, and the numbers by name."""
    classes = _ranks_by_value(list(zip(*by_rank.values(), strict=True)))
    return [{"ranks": number_ranges(ranks), **dict(zip(by_rank, values, strict=True))} for values, ranks in classes.items()]


def schedule_dict(group: GroupSchedule) -> dict[str, Any]:
    """Return the schedule of a group as plain data. Ranks are counted within the group."""
    schedule = group.schedule
    return {
        "group": group.group,
        "rows": list(group.split_ranks),
        "ranks": group.ranks,
        "elements": group.elements,
        "classes": _rank_classes(group.ranks, samples=group.samples, exchanged_elements=group.exchanged),
        "order": number_ranges(group.order or range(group.ranks)),
        "hash": None if schedule is None else schedule.digest(),
        "schedule": None if schedule is None else json.loads(schedule.to_json()),
    }


def as_dict(
    task: PlannedRun,
    report: PlanReport,
    split_groups: Sequence[Sequence[int]],
    averaged: Sequence[GroupSchedule],
    ranks_per_node: int | None,
) -> dict[str, Any]:
    """Return everything that `print_plan` shows as plain data: integers, in lists by class of equal ranks.

    Args:
        report: report of the first split group of each class.
        split_groups: indices c of the split groups in each class (see `equal_split_groups`).
        ranks_per_node: number of consecutive ranks on each node; None: all ranks are on one node.
    """
    item, rows, n_ranks = report.item_bytes, task.plan.rows, len(task.counts)
    memory = report.memory or ()
    rank_texts = [number_ranges([c * rows + r for c in equal]) for equal in split_groups for r in range(rows)]
    return {
        "model": task.config.model.name,
        "grid": {"rows": task.plan.rows, "cols": task.plan.cols, "tiles": list(task.plan.image_tiles)},
        "image": list(task.job.image_shape),
        "assumption": task.assumption or None,
        "batch": task.config.batch,
        "ranks_per_node": ranks_per_node or n_ranks,
        "classes": [{"ranks": ranks, "samples": samples} for ranks, samples in zip(rank_texts, report.counts, strict=True)],
        "dtype": report.dtype,
        "kernels": task.job.kernels.name,
        "entries": [_entry(entry, item) for entry in report.entries],
        "total": _sent(report.traffic.bytes_forward(item), report.traffic.bytes_backward(item)),
        "memory_bytes": [
            {"activations": of_rank.activations, "messages": of_rank.messages, "parameters": of_rank.parameters}
            for of_rank in memory
        ],
        "averaging": [{key: value for key, value in schedule_dict(group).items() if key != "schedule"} for group in averaged],
        "averaging_bytes": _rank_classes(n_ranks, bytes=averaging_bytes(task, averaged)),
    }


def _entry(entry: LayerReport | RedistributionReport, item_bytes: int) -> dict[str, Any]:
    traffic = entry.traffic
    sent = _sent(traffic.bytes_forward(item_bytes), traffic.bytes_backward(item_bytes))
    words = {"words_forward": list(traffic.forward), "words_backward": list(traffic.backward)}
    activations = {"activation_bytes": [item_bytes * size for size in entry.activations]}
    if isinstance(entry, RedistributionReport):
        head = {"redistribution": entry.name, "reader": entry.reader, "source": entry.source, "target": entry.target}
        return {**head, **words, **sent, **activations}
    return {
        "layer": entry.name,
        "operation": entry.operation,
        "use": entry.use.value,
        "split": entry.kind.value,
        "shape": list(entry.shape),
        "owns": list(map(_box, entry.owns)),
        "halo_rows": [rows for rows, _ in entry.halo],
        "halo_columns": [columns for _, columns in entry.halo],
        **words,
        "statistics_words_forward": list(traffic.statistics_forward),
        "statistics_words_backward": list(traffic.statistics_backward),
        **sent,
        "parameter_bytes": [item_bytes * size for size in entry.parameters],
        **activations,
    }


def _sent(forward: Words, backward: Words) -> dict[str, Any]:
    return {"bytes_forward": list(forward), "bytes_backward": list(backward)}


def _box(box: Box) -> dict[str, list[int]]:
    names = _DIMS if len(box) == len(_DIMS) else (_DIMS[0], _DIMS[-1])
    return {name: list(interval) for name, interval in zip(names, box, strict=True)}
