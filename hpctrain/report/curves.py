"""The curves of runs: what was measured in training and in evaluations, over the epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from hpctrain.runs.state import Record
from hpctrain.report.record import RunRecord

TRAINING, TEST, AVERAGED = "training", "test", "test, averaged weights"
#: of a curve; more cannot be seen
MOST_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """One measure of one run. run: its place among those of the report. part: of what, such as `TRAINING`; xs: in epochs."""

    run: int
    part: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """Curves that share their axes. key: a word for it. unit: of the values, "" for none. percent: they are fractions."""

    key: str
    title: str
    curves: tuple[Curve, ...]
    percent: bool = False


def panels(records: Sequence[RunRecord]) -> tuple[Panel, ...]:
    """A panel for each measure that a run has."""
    kinds = (("loss", "Loss", False), ("top1", "Top-1 accuracy", True), ("top5", "Top-5 accuracy", True))
    learning = [
        Panel(key, title, tuple(curve for run, record in enumerate(records) for curve in _learning(run, record, key)), percent)
        for key, title, percent in kinds
    ]
    others = [
        Panel(key, title, tuple(curve for run, record in enumerate(records) for curve in _plain(run, record, key)))
        for key, title in (("lr", "Learning rate"), ("images_per_second", "Images per second"))
    ]
    return tuple(panel for panel in (*learning, *others) if panel.curves)


def thinned(xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """At most so many points: of each stretch its least and its greatest value, in order, and both ends."""
    if len(xs) <= most:
        return tuple(xs), tuple(ys)
    values = np.asarray(ys)
    kept = {0, len(xs) - 1}
    for stretch in np.array_split(np.arange(len(xs)), (most - 2) // 2):
        kept |= {int(stretch[values[stretch].argmin()]), int(stretch[values[stretch].argmax()])}
    order = sorted(kept)
    return tuple(xs[i] for i in order), tuple(ys[i] for i in order)


def _learning(run: int, record: RunRecord, key: str) -> Iterator[Curve]:
    records = record.state.records
    yield from _curve(run, TRAINING, _training(records, key))
    evaluations = [entry for entry in records if entry.get("kind") == "evaluation"]
    for part, name in ((TEST, key), (AVERAGED, f"ema_{key}")):
        yield from _curve(run, part, [(entry.get("epoch"), entry.get(name)) for entry in evaluations])


def _plain(run: int, record: RunRecord, key: str) -> Iterator[Curve]:
    records = record.state.records
    samples = samples_per_epoch(records)
    entries = [entry for entry in records if entry.get("kind") == "interval"]
    yield from _curve(run, TRAINING, [(_place(entry, samples), entry.get(key)) for entry in entries])


def _curve(run: int, part: str, points: Sequence[tuple[object, object]]) -> Iterator[Curve]:
    """The curve of all points whose both numbers are known and finite, the last one of each place; none where there are none."""
    known = {float(x): float(y) for x, y in points if _is_number(x) and _is_number(y)}
    if known:
        xs, ys = zip(*sorted(known.items()), strict=True)
        yield Curve(run, part, *thinned(xs, ys))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and math.isfinite(value)


def samples_per_epoch(records: Sequence[Record]) -> int:
    """Images of an epoch, as a run's metrics tell; 0 where they do not."""
    told = [entry.get("samples") for entry in records if entry.get("kind") == "start"]
    told += [entry.get("images") for entry in records if entry.get("kind") == "epoch"]
    return max((count for count in told if isinstance(count, int)), default=0)


def _place(entry: Record, samples: int) -> float | None:
    """Where in the training an interval ends, in epochs."""
    epoch, images = entry.get("epoch"), entry.get("images")
    if not samples or not isinstance(epoch, int) or not isinstance(images, int):
        return None
    return epoch - 1 + images / samples


def _training(records: Sequence[Record], key: str) -> list[tuple[object, object]]:
    """(place, mean) of each interval alone: a record has the mean over its epoch so far."""
    samples = samples_per_epoch(records)
    points: list[tuple[object, object]] = []
    epoch, images, total = 0, 0, 0.0
    for entry in records:
        place, mean = _place(entry, samples), entry.get(key)
        if entry.get("kind") not in ("interval", "epoch") or place is None or not isinstance(mean, int | float):
            continue
        if entry["epoch"] != epoch or entry["images"] < images:
            epoch, images, total = entry["epoch"], 0, 0.0
        if entry["images"] > images:
            points.append((place, (mean * entry["images"] - total) / (entry["images"] - images)))
            images, total = entry["images"], mean * entry["images"]
    return points
