"""A time table for people: milliseconds per step, the rows that matter, and how much is hidden."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from hpctrain.trace.time_table import Late, Row, TimeTable

_HEAD = ("layer", "compute", "communication", "hidden", "exposed", "late")
_SHORT_HEAD = ("layer", "compute", "comm.", "hidden", "exposed", "late")
_SHORTEST_NAME = 12
_MOST_ROWS = 40


def lines(table: TimeTable, clock_error_seconds: float, ranks: int, width: int | None = None) -> list[str]:
    """The table, line by line.

    Args:
        clock_error_seconds: who came late by less than that is not known, and not shown.
        width: columns of the terminal, for which long names are folded; None: as wide as it gets.
    """
    shown = [row for row in table.rows if row.compute_seconds or row.communication_seconds or _taken(row)]
    cells = [_cells(row, clock_error_seconds) for row in _fewer(shown)]
    cells.append(("left over", _ms(table.left_over_seconds), "", "", "", ""))
    total = table.total
    whole = replace(total, compute_seconds=total.compute_seconds + table.left_over_seconds)
    cells.append(_cells(whole, clock_error_seconds))
    title = f"time per step in ms, mean of {table.steps} {'step' if table.steps == 1 else 'steps'}"
    title += f" and {ranks} ranks" if ranks > 1 else ""
    step, share = table.step_seconds, table.left_over_seconds / table.step_seconds
    ends = [f"step {_ms(step)} ms (median {_ms(table.median_step_seconds)}), {share:.1%} of it left over"]
    if ranks > 1 and total.communication_seconds > 0:
        ends.append(f"{total.hidden_seconds / total.communication_seconds:.0%} of the communication hidden")
        ends.append(f"posting and progress take {total.messages_seconds / step:.1%}")
        ends.append(f"operations are posted at most {_ms(total.delay_seconds)} ms after their turns, in sum")
    ends.append(f"tracing takes {table.tracing_seconds / step:.2%} ({table.events:.0f} events per step)")
    return [title, *_aligned([_HEAD, *cells], width), *_folded("; ".join(ends), width)]


def _fewer(rows: Sequence[Row]) -> list[Row]:
    """All rows, or the heaviest and the sum of the rest, in the given order."""
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    heaviest = sorted(rows, key=_weight, reverse=True)[: _MOST_ROWS - 1]
    kept = [row for row in rows if row in heaviest]
    rest = [row for row in rows if row not in heaviest]
    compute = sum(row.compute_seconds for row in rest)
    taken = sum(_taken(row) for row in rest)
    return [*kept, Row(f"{len(rest)} more rows", "work", compute_seconds=compute, exposed_seconds=taken)]


def _weight(row: Row) -> float:
    return row.compute_seconds + _taken(row) + row.communication_seconds


def _taken(row: Row) -> float:
    """The time that messages took from the program: waits, and its own work for them."""
    return row.exposed_seconds + row.messages_seconds


def _cells(row: Row, clock_error_seconds: float) -> tuple[str, ...]:
    communicates = row.communication_seconds > 0 or _taken(row) > 0
    travel = (row.communication_seconds, row.hidden_seconds, _taken(row))
    return (
        row.name,
        _ms(row.compute_seconds) if row.compute_seconds else "",
        *(_ms(value) if communicates else "" for value in travel),
        _late(row.late, clock_error_seconds),
    )


def _late(late: Late | None, clock_error_seconds: float) -> str:
    if late is None or late.behind_first_seconds <= clock_error_seconds:
        return ""
    return f"rank {late.rank} by {_ms(late.behind_first_seconds)} ({late.share:.0%})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _aligned(cells: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Columns of equal width: the first and the last to the left, numbers to the right; the first folds to fit the width."""
    lines = [list(line) for line in cells]
    if width is not None and sum(_widths(lines)) + 2 * (len(_HEAD) - 1) > width:
        lines[0] = list(_SHORT_HEAD)
    widths = _widths(lines)
    if width is not None:
        widths[0] = min(widths[0], max(_SHORTEST_NAME, width - sum(widths[1:]) - 2 * (len(_HEAD) - 1)))
    made = []
    for line in lines:
        name, *more = _folded(line[0], widths[0])
        middle = [text.rjust(size) for text, size in zip(line[1:-1], widths[1:-1], strict=True)]
        made.append("  ".join([name.ljust(widths[0]), *middle, line[-1]]).rstrip())
        made += [f"  {rest}" for rest in more]
    return made


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]


def _folded(text: str, width: int | None) -> list[str]:
    """Lines of a text, the second and later ones two shorter, as they are indented."""
    if width is None or len(text) <= width:
        return [text]
    first, *rest = textwrap.wrap(text, width, break_on_hyphens=False)
    return [first, *textwrap.wrap(" ".join(rest), width - 2, break_on_hyphens=False)]
