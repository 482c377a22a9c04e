"""Read the contents of run directories for a report: settings, versions, checkpoints, main results, and curves.

`read_runs` reads directories, `summary` returns the results of one run, and `panels` returns the curves of training and
evaluations over epochs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hpctrain.core.errors import CheckpointError, DataError, errors_as
from hpctrain.core.files import json_object, read_bytes
from hpctrain.core.text import duration_text, loss_text, size_text
from hpctrain.core.yaml_source import read_yaml
from hpctrain.runs.directory import TABLE_FILE, TRACE_FILE, RunDirectory, StoredCheckpoint, read_best, stored_checkpoints
from hpctrain.runs.state import Record, RunReader, RunState, evaluated_set
from hpctrain.trace import time_table
from hpctrain.trace.time_table import TimeTable


@dataclass(frozen=True)
class RunRecord:
    """Contents of one run directory.

    Args:
        settings: configuration as text, by dotted key.
        versions: versions of the software, including the revision of the source.
        checkpoints: checkpoints, lowest step first.
        best: name of the best checkpoint and description of its evaluation; empty texts if there is none.
        tables: time tables of a traced step, of all ranks together and then of each rank; empty if the run was not traced.
        trace: file of trace events; None: there is none.
    """

    name: str
    state: RunState
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    checkpoints: tuple[StoredCheckpoint, ...]
    best: tuple[str, str]
    tables: tuple[TimeTable, ...]
    trace: Path | None


def read_runs(paths: Sequence[Path]) -> tuple[RunRecord, ...]:
    """Return the contents of run directories.

    Raises:
        CheckpointError: a directory is not a run directory.
        ConfigError, DataError: a configuration or a record cannot be read, or a run is given twice.
    """
    records = tuple(_read(RunDirectory.open(path)) for path in paths)
    resolved = [record.state.path.resolve() for record in records]
    for number, path in enumerate(resolved):
        if path in resolved[:number]:
            raise DataError(f"{paths[number]} is given twice, but each run must be given once.")
    return records


def _read(directory: RunDirectory) -> RunRecord:
    return RunRecord(
        directory.path.resolve().name,
        RunReader(directory).read(time.time()),
        dict(_flat("", _settings(directory))),
        _versions(directory.path),
        tuple(stored_checkpoints(directory.checkpoints)),
        _best_mark(directory.checkpoints),
        _tables(directory.path / TABLE_FILE),
        directory.path / TRACE_FILE if (directory.path / TRACE_FILE).is_file() else None,
    )


def _settings(directory: RunDirectory) -> object:
    path = directory.path / "config.yaml"
    with errors_as(DataError, lambda why: f"Cannot read {path} ({why}); restore the file."):
        return read_yaml(directory.config(), str(path))[0]


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of each value; a list of plain values is one value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for number, item in enumerate(value):
            yield from _flat(f"{prefix}.{number}", item)
    else:
        yield prefix, json.dumps(value, default=str).strip('"')


def _versions(path: Path) -> dict[str, str]:
    texts = {name: str(value) for name, value in _json(path / "versions.json").items()}
    git = _json(path / "git.json")
    if "revision" in git:
        texts["revision"] = f"{git['revision']}{' with changes' if git.get('dirty') else ''}"
    return texts


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file cannot be read or contains none."""
    try:
        return json_object(read_bytes(path)) or {}
    except (DataError, OSError):
        return {}


def _best_mark(directory: Path) -> tuple[str, str]:
    """Return the name of the best checkpoint and the description of its evaluation; empty texts if no record can be read."""
    try:
        best = read_best(directory)
    except (CheckpointError, OSError):
        best = None
    return ("", "") if best is None else (best.checkpoint, str(best))


def _tables(path: Path) -> tuple[TimeTable, ...]:
    content = _json(path)
    with suppress(DataError), errors_as(DataError, str):
        return tuple(time_table.from_json(table) for table in (content["table"], *content["per_rank"]))
    return ()


#: text for an unknown figure
UNKNOWN = "-"
MOST_HOSTS = 2
#: figures from the configuration; a comparison also lists all keys that differ
SETTINGS = ("model", "data", "batch", "optimiser")
#: figures that are left out if no run has them
_OPTIONAL = frozenset((
    *SETTINGS, "step", "communication not hidden", "predicted step", "GPU memory", "waited for data (most on a rank)",
    "validation loss", "validation top-1", "validation top-5", "best validation top-1 (epoch)",
))  # fmt: skip
#: maximum time between two records that counts as training; a longer time is a pause between jobs
LONGEST_STEP_SECONDS = 600.0


@dataclass(frozen=True)
class Summary:
    """Main figures of a run, None if unknown. Accuracies are fractions.

    Args:
        end: description of how the run ended, or that it continues.
        evaluated: set of the evaluations during training, "validation" or "test".
        loss, top1, top5: figures of the last evaluation, by set.
        best_top1: highest top-1 accuracy of all evaluations during training.
        best_epoch: epoch of the evaluation with the highest top-1 accuracy.
        images_per_second: median over epochs, or over intervals if no epoch is complete.
        seconds: time of training, without pauses between jobs.
        exposed_seconds: time of a step spent waiting for messages.
        predicted_step_seconds: predicted duration of a step; None: the run chose no plan.
        peak_bytes: maximum resident memory over ranks at the latest end.
        device_bytes: maximum GPU memory in use over ranks at the latest end.
        data_share: share of the time that steps waited for data, mean over ranks.
        most_data_share: share of the time that steps waited for data on the rank that waited longest in each epoch.
        optimizer: optimiser with its learning rate and schedule, as text.
    """

    end: str
    epochs: int
    steps: int
    ranks: int | None
    hosts: tuple[str, ...]
    evaluated: str
    loss: Mapping[str, float | None]
    top1: Mapping[str, float | None]
    top5: Mapping[str, float | None]
    best_top1: float | None
    best_epoch: int | None
    images_per_second: float | None
    seconds: float
    step_seconds: float | None
    exposed_seconds: float | None
    predicted_step_seconds: float | None
    peak_bytes: float | None
    device_bytes: float | None
    data_share: float | None
    most_data_share: float | None
    model: str | None = None
    data: str | None = None
    batch: str | None = None
    optimizer: str | None = None


def summary(record: RunRecord) -> Summary:
    """Return the main figures of a run."""
    records = record.state.records
    evaluations = record.state.of_kind("evaluation")
    latest = {evaluated_set(entry): entry for entry in (*evaluations, *record.state.of_kind("test"))}
    ranked = [entry for entry in evaluations if isinstance(entry.get("top1"), int | float)]
    best = max(ranked, key=lambda entry: entry["top1"], default=None)
    epochs, measured = record.state.of_kind("epoch"), _latest_start(records)
    step = next((entry for entry in reversed(measured) if entry.get("kind") == "steps"), {})
    memory = record.state.latest("memory")
    return Summary(
        end=record.state.end or "running, or unknown",
        epochs=max((entry.get("epoch") or 0 for entry in epochs), default=0),
        steps=max((entry.get("step") or 0 for entry in records), default=0),
        ranks=record.state.ranks[0].ranks if record.state.ranks else None,
        hosts=tuple(dict.fromkeys(rank.host for rank in record.state.ranks)),
        evaluated=evaluated_set(evaluations[-1]) if evaluations else TEST,
        loss={split: _number(entry, "loss") for split, entry in latest.items()},
        top1={split: _number(entry, "top1") for split, entry in latest.items()},
        top5={split: _number(entry, "top5") for split, entry in latest.items()},
        best_top1=None if best is None else float(best["top1"]),
        best_epoch=None if best is None else best.get("epoch", 0),
        images_per_second=_rate(measured, "epoch") or _rate(measured, "interval"),
        seconds=_seconds(records),
        step_seconds=_number(step, "measured_step_seconds"),
        exposed_seconds=_number(step, "measured_exposed_seconds"),
        predicted_step_seconds=_number(step, "predicted_step_seconds"),
        peak_bytes=_number(memory, "peak_bytes"),
        device_bytes=_number(memory, "device_bytes"),
        data_share=_share(records, "waited_seconds"),
        most_data_share=_share(records, "most_waited_seconds"),
        model=record.settings.get("model.name"),
        data=record.settings.get("data.train"),
        batch=record.settings.get("batch"),
        optimizer=_optimizer(record.settings),
    )


def _optimizer(settings: Mapping[str, str]) -> str | None:
    """Return the optimiser with its learning rate and schedule; None if the configuration does not name it."""
    name = settings.get("optimizer.name")
    if name is None:
        return None
    return f"{name}, lr {settings.get('optimizer.lr', UNKNOWN)}, {settings.get('schedule.name', UNKNOWN)}"


def summary_texts(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """Return (heading, texts of the runs) for each figure, without optional figures that no run has."""
    texts = [
        ("model", [figures.model or UNKNOWN for figures in summaries]),
        ("data", [figures.data or UNKNOWN for figures in summaries]),
        ("batch", [figures.batch or UNKNOWN for figures in summaries]),
        ("optimiser", [figures.optimizer or UNKNOWN for figures in summaries]),
        ("state", [figures.end for figures in summaries]),
        ("ranks", [_text(figures.ranks, "d") for figures in summaries]),
        ("hosts", [_hosts(figures.hosts) for figures in summaries]),
        ("epochs", [f"{figures.epochs:,}" for figures in summaries]),
        ("steps", [f"{figures.steps:,}" for figures in summaries]),
        *(row for split in (VALIDATION, TEST) for row in _evaluation_texts(split, summaries)),
        ("images/s", [_text(figures.images_per_second, ",.0f") for figures in summaries]),
        ("step", [_milliseconds(figures.step_seconds) for figures in summaries]),
        ("communication not hidden", [_milliseconds(figures.exposed_seconds) for figures in summaries]),
        ("predicted step", [_milliseconds(figures.predicted_step_seconds) for figures in summaries]),
        ("peak memory", [_size(figures.peak_bytes) for figures in summaries]),
        ("GPU memory", [_size(figures.device_bytes) for figures in summaries]),
        ("waited for data (most on a rank)", [_waits(figures.data_share, figures.most_data_share) for figures in summaries]),
        ("training time", [duration_text(figures.seconds) for figures in summaries]),
    ]
    return [(heading, values) for heading, values in texts if heading not in _OPTIONAL or set(values) != {UNKNOWN}]


def _evaluation_texts(split: str, summaries: Sequence[Summary]) -> Iterator[tuple[str, list[str]]]:
    losses = [figures.loss.get(split) for figures in summaries]
    best = [figures.best_top1 if figures.evaluated == split else None for figures in summaries]
    epochs = [figures.best_epoch for figures in summaries]
    yield f"{split} loss", [UNKNOWN if loss is None else loss_text(loss) for loss in losses]
    yield f"{split} top-1", [_text(figures.top1.get(split), ".2%") for figures in summaries]
    yield f"{split} top-5", [_text(figures.top5.get(split), ".2%") for figures in summaries]
    texts = [UNKNOWN if top1 is None else f"{top1:.2%} ({epoch})" for top1, epoch in zip(best, epochs, strict=True)]
    if split != TEST or any(figures.evaluated == TEST for figures in summaries):
        yield f"best {split} top-1 (epoch)", texts


def _text(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _hosts(hosts: Sequence[str]) -> str:
    """Return the names of at most MOST_HOSTS hosts; for more, return their number and the first name."""
    if not hosts:
        return UNKNOWN
    return ", ".join(hosts) if len(hosts) <= MOST_HOSTS else f"{len(hosts):,}, {hosts[0]} first"


def _milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{1e3 * seconds:.4g} ms"


def _size(size_bytes: float | None) -> str:
    return UNKNOWN if size_bytes is None else size_text(size_bytes)


def _waits(share: float | None, most: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%} ({most or share:.1%})"


def _share(records: Sequence[Record], waited: str) -> float | None:
    entries = [entry for entry in records if entry.get("kind") == "data" and _number(entry, "seconds")]
    seconds = sum(_number(entry, "seconds") or 0.0 for entry in entries)
    return sum(_number(entry, waited) or 0.0 for entry in entries) / seconds if seconds else None


def _seconds(records: Sequence[Record]) -> float:
    times = [entry["time"] for entry in records if isinstance(entry.get("time"), int | float)]
    gaps = (later - earlier for earlier, later in pairwise(times))
    return float(sum(gap for gap in gaps if 0.0 < gap <= LONGEST_STEP_SECONDS))


def _latest_start(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records of the latest start that trained, as speeds of different starts must not be mixed."""
    starts = [number for number, entry in enumerate(records) if entry.get("kind") == "start"]
    ends = [*starts[1:], len(records)]
    sessions = [records[: starts[0]] if starts else records, *(records[a:b] for a, b in zip(starts, ends, strict=False))]
    return next((session for session in reversed(sessions) if _rate(session, "epoch") or _rate(session, "interval")), ())


def _rate(entries: Sequence[Record], kind: str) -> float | None:
    rates = [rate for entry in entries if entry.get("kind") == kind and (rate := _number(entry, "images_per_second"))]
    return median(rates) if rates else None


def _number(entry: Record, key: str) -> float | None:
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) else None


TRAINING, VALIDATION, TEST = "training", "validation", "test"
#: end of the name of a set whose metrics are those of the averaged weights
AVERAGED = ", averaged weights"
#: maximum number of points of a curve; more would not be visible
MOST_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """One metric of one run.

    Attributes:
        run: index of the run in the report.
        part: data set of the metric, for example `TRAINING`.
        xs, ys: positions in epochs, and values.
    """

    run: int
    part: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """Curves that share their axes.

    Attributes:
        curves: curves of all runs.
        percent: whether values are fractions, to be shown in percent.
    """

    key: str
    title: str
    curves: tuple[Curve, ...]
    percent: bool = False


def panels(records: Sequence[RunRecord]) -> tuple[Panel, ...]:
    """Return a panel for each metric that any run has."""
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
    """Return at most `most` of the points (xs, ys), in order: both ends, and the minimum and maximum of each stretch."""
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
    evaluations = record.state.of_kind("evaluation", "test")
    for split in (VALIDATION, TEST):
        of_split = [entry for entry in evaluations if evaluated_set(entry) == split]
        for part, name in ((split, key), (f"{split}{AVERAGED}", f"ema_{key}")):
            yield from _curve(run, part, [(entry.get("epoch"), entry.get(name)) for entry in of_split])


def _plain(run: int, record: RunRecord, key: str) -> Iterator[Curve]:
    records = record.state.records
    samples = samples_per_epoch(records)
    entries = record.state.of_kind("interval", "epoch")  # an epoch shorter than metrics.interval_seconds may have no interval
    yield from _curve(run, TRAINING, [(_place(entry, samples), entry.get(key)) for entry in entries])


def _curve(run: int, part: str, points: Sequence[tuple[float | None, float | None]]) -> Iterator[Curve]:
    """Yield the curve of all points whose coordinates are known, with the last point at each position."""
    known = {float(x): float(y) for x, y in points if x is not None and y is not None}
    if known:
        xs, ys = zip(*sorted(known.items()), strict=True)
        yield Curve(run, part, *thinned(xs, ys))


def samples_per_epoch(records: Sequence[Record]) -> int:
    """Return the number of images per epoch from a run's metrics; 0 if it is unknown."""
    counts = [entry.get("samples") for entry in records if entry.get("kind") == "start"]
    counts += [entry.get("images") for entry in records if entry.get("kind") == "epoch"]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _place(entry: Record, samples: int) -> float | None:
    """Return the position at which an interval ends, in epochs; None if it is unknown."""
    epoch, images = entry.get("epoch"), entry.get("images")
    if not samples or not isinstance(epoch, int) or not isinstance(images, int):
        return None
    return epoch - 1 + images / samples


def _training(records: Sequence[Record], key: str) -> list[tuple[float | None, float | None]]:
    """Return (position, mean) of each interval, computed from the records' means over their epoch so far."""
    samples = samples_per_epoch(records)
    points: list[tuple[float | None, float | None]] = []
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
