"""The screen of `hpctrain watch`: progress, curves, ranks and events of a run, for any width.

Curves are drawn with braille dots, or with ASCII characters if the terminal has no others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.core.console import plain_table
from hpctrain.core.text import counted, duration_text, escaped, fitting, loss_text
from hpctrain.flight.ring import FlightRecord
from hpctrain.launch.process_end import End
from hpctrain.runs.state import SILENT_SECONDS, RunState, events_of, means_text, set_of

Points = Sequence[tuple[float, float]]

_EMPTY = 0x2800
# Bit of each dot of a braille cell, by row (top to bottom) and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARK, _PLAIN = "o", "."


def text_curve(
    dots: Points, marks: Points, width: int, height: int, label: Callable[[float], str], *, plain: bool = False
) -> list[str]:
    """Return lines of a curve, with the largest value before the first line and the smallest before the last.

    Args:
        dots: (x, y) of the curve.
        marks: (x, y) of highlighted points, drawn as "o".
        width: number of columns, labels included.
        height: number of lines.
        label: callback that returns the text of a value.
        plain: whether to use ASCII characters only.
    """
    points = [(x, y) for x, y in (*dots, *marks) if math.isfinite(y)]
    if not points:
        return [" " * width] * height
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [label(high), *[""] * (height - 2), label(low)]
    margin = max(map(len, labels))
    columns = max(1, width - margin - 1)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    cells = [[_EMPTY] * columns for _ in range(height)]

    def place(x: float, y: float, across: int, down: int) -> tuple[int, int]:
        right = 0.0 if last == first else (x - first) / (last - first)
        below = 0.5 if high == low else (high - y) / (high - low)
        return round(right * (across - 1)), round(below * (down - 1))

    path = [place(x, y, 2 * columns, 4 * height) for x, y in dots if math.isfinite(y)]
    for column, row in (*path[:1], *_joined(path)):
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    signs = [[_sign(cell, plain=plain) for cell in line] for line in cells]
    for x, y in marks:
        if math.isfinite(y):
            column, row = place(x, y, columns, height)
            signs[row][column] = _MARK
    return [f"{name.rjust(margin)} {''.join(line)}" for name, line in zip(labels, signs, strict=True)]


def _joined(path: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of the straight lines between consecutive points of a path."""
    for (column, row), (next_column, next_row) in pairwise(path):
        length = max(abs(next_column - column), abs(next_row - row), 1)
        for k in range(1, length + 1):
            yield column + round(k * (next_column - column) / length), row + round(k * (next_row - row) / length)


def _sign(cell: int, *, plain: bool) -> str:
    if cell == _EMPTY:
        return " "
    return _PLAIN if plain else chr(cell)


#: width without a terminal
COLUMNS = 80
_CURVE_LINES = 5
_TWO_CURVES_COLUMNS = 72  # minimum width for two curves next to each other
_MOST_EVENTS = 6
_MOST_RANKS = 4
_NARROWEST_BAR = 10
_OF_TRAINING = {"interval": "train", "epoch": "whole epoch, train", "evaluation": "", "test": ""}


def screen(state: RunState, console: Console) -> RenderableType:
    """Return the whole screen, as wide as the console."""
    width = console.width
    plain = console.options.ascii_only
    lines: list[RenderableType] = [
        _head(state),
        _position(state, width, plain=plain),
        Text(escaped(fitting(_pace(state), width))),
    ]
    numbers = _numbers(state)
    if numbers is not None:
        lines += ["", numbers]
    curves = _curves(state, width, plain=plain)
    if curves is not None:
        lines += ["", curves]
    lines += ["", *_ranks(state)]
    events = state.events[-_MOST_EVENTS:]
    if events:
        lines += ["", *(_event(event.time, event.text) for event in events)]
    return Group(*lines)


def _head(state: RunState) -> Text:
    end = state.end
    colour = "green" if end == "finished" else "yellow" if end is None or end.startswith("stopped") else "red"
    return Text.assemble((escaped(state.path), "bold"), "  ", (escaped(end or _going(state)), colour), overflow="fold")


def _going(state: RunState) -> str:
    """Return the state of a run that has no recorded end."""
    if not state.ranks:
        record = state.records[-1] if state.records else {}
        since = duration_text(max(0.0, state.now - record["time"])) if record.get("time") else None
        return "no flight records" + (f", last line of metrics {since} ago" if since else " and no metrics yet")
    phase = state.ranks[0].phase or "start"
    return f"running ({phase})"


def _position(state: RunState, width: int, *, plain: bool) -> RenderableType:
    """Return one line with the epoch, a bar and the step."""
    start, record = state.latest("start"), state.latest("interval", "epoch")
    epochs = f"/{start['epochs']}" if "epochs" in start else ""
    epoch = f"epoch {record['epoch']}{epochs}" if "epoch" in record else "before the first step"
    step = f"step {state.step}"
    last = start.get("last_sample") or 0
    if not last:
        return Text(f"{epoch}  {step}")
    share = min(1.0, state.done_samples / last)
    room = width - len(epoch) - len(step) - 10
    if room < _NARROWEST_BAR:
        return Text(f"{epoch}  {share:.0%}  {step}")
    grid = Table.grid(padding=(0, 2, 0, 0))
    full = round(share * room)
    bar: RenderableType = "#" * full + "-" * (room - full) if plain else Bar(1.0, 0.0, share, width=room, color="green")
    grid.add_row(epoch, bar, f"{share:.0%}", step)
    return grid


def _pace(state: RunState) -> list[tuple[int, str]]:
    """Return speed, learning rate, remaining time and newest checkpoint as texts, each with its priority for `fitting`."""
    record = state.latest("interval")
    facts = []
    if record.get("images_per_second") is not None:
        facts.append((1, f"{record['images_per_second']:,.0f} images/s"))
    if record.get("lr") is not None:
        facts.append((3, f"lr {record['lr']:.4g}"))
    if state.seconds_left is not None and state.end is None:
        facts.append((0, f"{duration_text(state.seconds_left)} left"))
    if state.checkpoint is not None:
        written = state.checkpoint.name.partition(".")[0].removeprefix("checkpoint-")
        facts.append((2, f"checkpoint of step {int(written)}, {duration_text(state.checkpoint_age_seconds)} ago"))
    return facts or [(0, "no checkpoint yet")]


def _numbers(state: RunState) -> Table | None:
    """Return a table of loss and accuracies in training and of evaluations; None before the first record."""
    train, evaluation = state.latest("interval", "epoch"), state.latest("evaluation")
    if not train and not evaluation:
        return None
    table = plain_table("", "loss", "top1", "top5")
    table.add_row("train", *means_text(train))
    for entry in filter(None, (evaluation, state.latest("test"))):
        table.add_row(set_of(entry), *means_text(entry))
        if "ema_top1" in entry:
            averaged = means_text({name: entry.get(f"ema_{name}") for name in ("loss", "top1", "top5")})
            table.add_row(f"{set_of(entry)}, averaged", *averaged)
    best = max((value for _, value in state.curve("top1", "evaluation")), default=None)
    if best is not None:
        table.add_row(f"best {set_of(evaluation)}", "", f"{best:.2%}", "")
    return table


def _curves(state: RunState, width: int, *, plain: bool) -> RenderableType | None:
    """Return curves of loss and accuracy over steps, with dots for training and "o" for evaluations; None without curves."""
    in_a_row = width >= _TWO_CURVES_COLUMNS
    columns = (width - 2) // 2 if in_a_row else width
    curves = []
    for measure, title, label in (("loss", "loss", loss_text), ("top1", "top1", "{:.1%}".format)):
        train, test = state.curve(measure, "interval", "epoch"), state.curve(measure, "evaluation")
        if len(train) + len(test) > 1:
            lines = text_curve(train, test, columns, _CURVE_LINES, label, plain=plain)
            of = f", o of {set_of(state.latest('evaluation'))}" if test else ""
            curves.append(Text("\n".join([f"{title} over steps{of}", *lines]), no_wrap=True))
    if not curves:
        return None
    if not in_a_row:
        return Group(*curves)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in curves:
        grid.add_column(width=columns)
    grid.add_row(*curves)
    return grid


def _ranks(state: RunState) -> list[RenderableType]:
    """Return lines about the latest activity of the ranks: a summary, then one per rank that failed or is silent for long."""
    if not state.ranks:
        return [Text("ranks: no flight records here")]
    by_silence = sorted(state.ranks, key=state.silent_seconds, reverse=True)
    hosts = len({record.host for record in state.ranks})
    count = f"{counted(len(by_silence), 'rank')} on {counted(hosts, 'node')}"
    missing = by_silence[0].ranks - len(by_silence)
    more = f"; {missing} more left no record here" if missing > 0 else ""
    last = by_silence[0]
    lines: list[RenderableType] = [
        Text(f"{count}, last sign of life at most {_ago(state.silent_seconds(last))} ago (rank {last.rank}){more}")
    ]
    limit = state.silent_seconds(by_silence[-1]) + SILENT_SECONDS
    for record in by_silence[:_MOST_RANKS]:
        failed = record.end not in (End.RUNNING, End.FINISHED)
        if state.silent_seconds(record) > limit or failed:
            lines.append(Text(escaped(_rank(state, record)), style="red"))
    return lines


def _rank(state: RunState, record: FlightRecord) -> str:
    waits = f", which waits for {record.wait}" if record.wait else ""
    sentence = f": {record.sentence}" if record.sentence else ""
    ago = _ago(state.silent_seconds(record))
    return f"  rank {record.rank} on {record.host}: {ago} ago in {record.phase or 'start'}{waits}{sentence}"


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration_text(seconds)


def _event(seconds: float, text: str) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(time.strftime("%m-%d %H:%M:%S", time.localtime(seconds)), Text(escaped(text), overflow="fold"))
    return grid


def news(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each training record and for each event."""
    for record in records:
        events = events_of([record])
        if events:
            yield events[0].text
        elif record.get("kind") in _OF_TRAINING:
            loss, top1, _ = means_text(record)
            where = f"epoch {record.get('epoch')}  step {record.get('step')}"
            yield f"{where}  {_OF_TRAINING[record['kind']] or set_of(record)} loss {loss}  top1 {top1}"
