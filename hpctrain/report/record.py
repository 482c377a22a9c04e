"""All that a run's directory tells for a report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core.yaml_source import read_yaml
from hpctrain.core.errors import CheckpointError, ConfigError, DataError
from hpctrain.runs.state import RunReader, RunState
from hpctrain.run.trace_report import TABLE_FILE, TRACE_FILE
from hpctrain.core.files import json_object, read_bytes
from hpctrain.storage import best_record
from hpctrain.storage.checkpoint import checkpoints
from hpctrain.runs.directory import RunDirectory
from hpctrain.trace import time_table
from hpctrain.trace.time_table import TimeTable


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on the disk. written: seconds of the wall clock. best: what makes it the best one; "" where it is not."""

    step: int
    name: str
    megabytes: float
    written: float
    best: str


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Args:
        name: of its directory. state: at the time of reading. settings: of its configuration, by dotted key, as text.
        versions: of what computed, its source's revision among them. tables: where the time of a traced step went, of all ranks
            together and then of each; none where it was not traced. trace: the file of its events; None: there is none.
    """

    name: str
    state: RunState
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    checkpoints: tuple[StoredCheckpoint, ...]
    tables: tuple[TimeTable, ...]
    trace: Path | None


def read_runs(paths: Sequence[Path]) -> tuple[RunRecord, ...]:
    """The records of runs, each of which is told apart by its name.

    Raises:
        CheckpointError: a directory is that of no run. DataError: a configuration or a record that cannot be read, or the same
            run twice.
    """
    records = tuple(_read(RunDirectory.open(path)) for path in paths)
    resolved = [record.state.path.resolve() for record in records]
    for number, path in enumerate(resolved):
        if path in resolved[:number]:
            raise DataError(f"{paths[number]} is given twice; give each run once.")
    return records


def _read(directory: RunDirectory) -> RunRecord:
    return RunRecord(
        directory.path.resolve().name,
        RunReader(directory).read(time.time()),
        dict(_flat("", _settings(directory))),
        _versions(directory.path),
        tuple(_checkpoints(directory.checkpoints)),
        _tables(directory.path / TABLE_FILE),
        directory.path / TRACE_FILE if (directory.path / TRACE_FILE).is_file() else None,
    )


def _settings(directory: RunDirectory) -> object:
    try:
        return read_yaml(directory.config(), str(directory.path / "config.yaml"))[0]
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise DataError(f"{directory.path / 'config.yaml'} cannot be read ({error}); restore the file.") from error


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of each value; a list of plain values is one."""
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
    """A JSON object; an empty one where the file is not there, or is none."""
    try:
        return json_object(read_bytes(path)) or {}
    except (DataError, OSError):
        return {}


def _checkpoints(directory: Path) -> Iterator[StoredCheckpoint]:
    """The checkpoints by step; one that is deleted meanwhile is left out."""
    try:
        best = best_record.read(directory)
        stored = checkpoints(directory)
    except (CheckpointError, OSError):
        return
    for step, path in stored:
        try:
            files = [entry.stat() for entry in os.scandir(path)] if path.is_dir() else [path.stat()]
            written = path.stat().st_mtime
        except OSError:
            continue
        mark = str(best) if best is not None and best.checkpoint == path.name else ""
        yield StoredCheckpoint(step, path.name, sum(file.st_size for file in files) / 1e6, written, mark)


def _tables(path: Path) -> tuple[TimeTable, ...]:
    content = _json(path)
    try:
        return tuple(time_table.from_json(table) for table in (content["table"], *content["per_rank"]))
    except (KeyError, TypeError):
        return ()
