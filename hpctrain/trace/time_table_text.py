"""Time tables as text for a terminal: shares and milliseconds of a step, longest rows first, and the hidden communication."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hpctrain.core.text import counted
from hpctrain.trace.time_table import Late, Row, TimeTable

_HEAD = ("layer", "share", "compute", "comm.", "hidden", "exposed", "late rank")
_SHORTEST_NAME = 12
_GAP = 2
_SUM = re.compile(r"and \d+ more  ")
#: columns and lines of a screen, without the lines that a run prints around its table
COLUMNS, LINES = 80, 37


def lines(
    table: TimeTable,
    clock_error_seconds: float,
    ranks: int,
    width: int | None = COLUMNS,
    most: int | None = LINES,
) -> list[str]:
    """Return the lines of the table, longest rows first. Rows that do not fit are summed in one line.

    Args:
        clock_error_seconds: error of the clocks; smaller delays of late ranks are not shown.
        width: maximum number of columns, to which long names are folded; None: no limit.
        most: maximum number of lines; None: no limit.
    """
    step = table.step_seconds
    shown = [row for row in table.rows if row.compute_seconds or row.communication_seconds or _taken(row)]
    rows = sorted(shown, key=lambda row: (_share(row), row.communication_seconds), reverse=True)
    total = replace(table.total, compute_seconds=table.total.compute_seconds + table.left_over_seconds)
    left_over = Row("left over", "work", compute_seconds=table.left_over_seconds)
    last = [_cells(row, step, clock_error_seconds) for row in (left_over, total)]
    title = f"time per step in ms, mean of {counted(table.steps, 'step')}"
    title += f" and {ranks} ranks" if ranks > 1 else ""
    end = _folded(_summary(table, ranks), width)
    room = None if most is None else most - 1 - len(end)
    first = [_cells(row, step, clock_error_seconds) for row in rows]
    kept = len(rows)
    aligned = _aligned([_HEAD, *first, *last], width)
    while room is not None and len(aligned) > room and kept:
        kept -= 1
        rest = _cells(_sum(rows[kept:]), step, clock_error_seconds)
        aligned = _aligned([_HEAD, *first[:kept], rest, *last], width)
    return [title, *aligned, *end]


def is_sum(line: str) -> bool:
    """Return whether a line is the sum of the rows that did not fit."""
    return _SUM.match(line) is not None


def _summary(table: TimeTable, ranks: int) -> str:
    total, step = table.total, table.step_seconds
    words = [
        f"step {_ms(step)} ms (median {_ms(table.median_step_seconds)}), {table.left_over_seconds / step:.1%} of it left over"
    ]
    if ranks > 1 and total.communication_seconds > 0:
        words.append(f"{total.hidden_seconds / total.communication_seconds:.0%} of the communication hidden")
        words.append(f"posting and progress take {total.messages_seconds / step:.1%}")
        words.append(f"posting is delayed by at most {_ms(total.delay_seconds)} ms in total")
    words.append(f"tracing takes {table.tracing_seconds / step:.2%} ({table.events:.0f} events per step)")
    return "; ".join(words)


def _sum(rows: Sequence[Row]) -> Row:
    """Return the sum of the rows that did not fit, without their communication, because simultaneous times do not add up."""
    compute = sum(row.compute_seconds for row in rows)
    return Row(f"and {len(rows)} more", "work", compute_seconds=compute, exposed_seconds=sum(map(_taken, rows)))


def _share(row: Row) -> float:
    """Return the program's time for a row: computation and messages."""
    return row.compute_seconds + _taken(row)


def _taken(row: Row) -> float:
    """Return the program's time for messages: waits, posting and testing."""
    return row.exposed_seconds + row.messages_seconds


def _cells(row: Row, step_seconds: float, clock_error_seconds: float) -> tuple[str, ...]:
    travels = _ms(row.communication_seconds), _ms(row.hidden_seconds)
    return (
        row.name,
        f"{_share(row) / step_seconds:.1%}",
        _ms(row.compute_seconds) if row.compute_seconds else "",
        *(travels if row.communication_seconds > 0 else ("", "")),
        _ms(_taken(row)) if row.communication_seconds > 0 or _taken(row) > 0 else "",
        _late(row.late, clock_error_seconds),
    )


def _late(late: Late | None, clock_error_seconds: float) -> str:
    if late is None or late.after_first_seconds <= clock_error_seconds:
        return ""
    return f"{late.rank} by {_ms(late.after_first_seconds)} ({late.share:.0%})"


def _ms(seconds: float) -> str:
    """Return milliseconds with three decimals, or one decimal from 100 on."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.3f}" if milliseconds < 99.9995 else f"{milliseconds:.1f}"


def _aligned(cells: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return columns of equal width: the first (folded to fit) and the last left-aligned, numbers right-aligned."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    if width is not None:
        widths[0] = min(widths[0], max(_SHORTEST_NAME, width - sum(widths[1:]) - _GAP * (len(_HEAD) - 1)))
    aligned = []
    for line in cells:
        name, *more = _folded(line[0], widths[0])
        middle = [text.rjust(size) for text, size in zip(line[1:-1], widths[1:-1], strict=True)]
        aligned.append((" " * _GAP).join([name.ljust(widths[0]), *middle, line[-1]]).rstrip())
        aligned += [f"  {rest}" for rest in more]
    return aligned


def _folded(text: str, width: int | None) -> list[str]:
    """Return the lines of a text, broken at blanks and after dots, but not within numbers.

    Lines after the first are two columns shorter, because they are indented.
    """
    if width is None or len(text) <= width:
        return [text]
    lines = [""]
    for piece in re.findall(r"(?:[^. ]|\.(?=\d))*[. ]*", text):
        room = width if len(lines) == 1 else width - 2
        if lines[-1] and len(f"{lines[-1]}{piece}".rstrip()) > room:
            lines.append("")
        while len(piece.rstrip()) > width - 2:  # longer than a line
            lines[-1], piece = piece[: width - 2], piece[width - 2 :]
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines if line.strip()]
