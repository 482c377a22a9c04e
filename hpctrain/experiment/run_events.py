"""Events in the metrics of a run that are out of the ordinary, each in words for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.rank_spans import spans


@dataclass(frozen=True)
class RunEvent:
    """An event. time: seconds of the wall clock."""

    time: float
    text: str


def events_of(records: Iterable[Mapping[str, Any]]) -> list[RunEvent]:
    """The events among the records of a run, in their order; a record that lacks something is told as far as it goes."""
    events = []
    for record in records:
        words = _WORDS.get(str(record.get("kind")))
        if words is not None:
            events.append(RunEvent(float(record.get("time") or 0.0), words(record)))
    return events


def _start(record: Mapping[str, Any]) -> str:
    done = record.get("done_samples") or 0
    return f"training begins behind {done:,} samples" if done else "training begins"


def _resume(record: Mapping[str, Any]) -> str:
    changes = ", ".join(record.get("changes") or ())
    return f"resumed at step {record.get('step')}" + (f" with other {changes}" if changes else "")


def _skip(record: Mapping[str, Any]) -> str:
    return f"step {record.get('step')} skipped: {record.get('held') or 'a value'} of {record.get('layer') or 'it'} not finite"


def _rollback(record: Mapping[str, Any]) -> str:
    return f"went back from step {record.get('from_step')} to step {record.get('step')}: {record.get('error')}"


def _shrink(record: Mapping[str, Any]) -> str:
    lost = spans(record.get("lost") or ())
    return f"lost rank {lost}; went on with {record.get('ranks')} from step {record.get('step')}"


def _checkpoint(record: Mapping[str, Any]) -> str:
    return str(record.get("warning"))


def _unreadable(record: Mapping[str, Any]) -> str:
    return f"samples that could not be read, by step {record.get('step')}"


def _image_size(record: Mapping[str, Any]) -> str:
    return f"images of {record.get('size')} px from epoch {record.get('epoch')}"


def _stop(record: Mapping[str, Any]) -> str:
    return f"stopped by {record.get('by')} after step {record.get('step')}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "start": _start,
    "resume": _resume,
    "skip": _skip,
    "rollback": _rollback,
    "shrink": _shrink,
    "checkpoint": _checkpoint,
    "unreadable": _unreadable,
    "image_size": _image_size,
    "stop": _stop,
}
