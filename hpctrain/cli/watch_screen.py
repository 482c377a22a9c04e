"""The screen of `hpctrain watch`: progress, figures, ranks and events of a run, for any width."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.core.console import plain_table
from hpctrain.core.text import counted, duration_text, escaped, fitting
from hpctrain.flight.ring import FlightRecord
from hpctrain.launch.process_end import End
from hpctrain.runs.state import SILENT_SECONDS, RunState, evaluated_set, means_text, run_events

#: width without a terminal
COLUMNS = 80
_MOST_EVENTS = 6
_MOST_RANKS = 4
_NARROWEST_BAR = 10
_OF_TRAINING = {"interval": "train", "epoch": "whole epoch, train", "evaluation": "", "test": ""}


def screen(state: RunState, console: Console) -> RenderableType:
    """Return the whole screen, as wide as the console."""
    width = console.width
    lines: list[RenderableType] = [
        _head(state),
        _position(state, width, plain=console.options.ascii_only),
        Text(escaped(fitting(_pace(state), width))),
    ]
    numbers = _numbers(state)
    if numbers is not None:
        lines += ["", numbers]
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
        table.add_row(evaluated_set(entry), *means_text(entry))
        if "ema_top1" in entry:
            averaged = means_text({name: entry.get(f"ema_{name}") for name in ("loss", "top1", "top5")})
            table.add_row(f"{evaluated_set(entry)}, averaged", *averaged)
    best = max((value for _, value in state.curve("top1", "evaluation")), default=None)
    if best is not None:
        table.add_row(f"best {evaluated_set(evaluation)}", "", f"{best:.2%}", "")
    return table


def _ranks(state: RunState) -> list[RenderableType]:
    """Return lines about the latest activity of the ranks: a summary, then at most 4 ranks that failed or are silent for long."""
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
        events = run_events([record])
        if events:
            yield events[0].text
        elif record.get("kind") in _OF_TRAINING:
            loss, top1, _ = means_text(record)
            where = f"epoch {record.get('epoch')}  step {record.get('step')}"
            yield f"{where}  {_OF_TRAINING[record['kind']] or evaluated_set(record)} loss {loss}  top1 {top1}"
