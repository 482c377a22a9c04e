"""The file of a run's hashes: one line of JSON for each step that has them, in as few bytes as that takes.

    {"tensors": ["parameters/conv1.weight", ...]}                        the keys of the lines below, until the next such line
    {"step": 100, "epoch": 1, "all": "5f0c...", "hashes": "91b2..."}     16 digits for each tensor, one behind the other

One process writes. Nothing here communicates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core.errors import DataError
from hpctrain.core.files import json_object, read_bytes
from hpctrain.storage import metrics_file

#: hexadecimal digits of a hash
DIGITS = 16


@dataclass(frozen=True)
class HashRecord:
    """The hashes of a run's state after so many steps.

    Attributes:
        keys: of the tensors, as a checkpoint has them, parameters first. digests: `DIGITS` of each, one behind the other.
        whole: one hash of all.
    """

    step: int
    keys: tuple[str, ...]
    digests: str
    whole: str

    def by_key(self) -> dict[str, str]:
        """The hash of each tensor."""
        return {key: self.digests[DIGITS * place : DIGITS * (place + 1)] for place, key in enumerate(self.keys)}

    def different(self, other: HashRecord) -> tuple[str, ...]:
        """Keys of tensors whose hashes are not the same in both, or that only one has, parameters first."""
        if (self.keys, self.digests) == (other.keys, other.digests):
            return ()
        here, there = self.by_key(), other.by_key()
        return tuple(key for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key))


class HashFile:
    """Appends records to the file of a run, which a resume may have cut back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: tuple[str, ...] | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record, whole or not at all; nothing where an earlier part of the run ends with that of the same step.

        Args:
            record: "step", "epoch", "all", and "hashes" by key.

        Raises:
            OSError: the system refuses it.
        """
        if self._keys is None:
            self._keys, step = self._latest()
            if step == record["step"]:
                return
        keys = tuple(record["hashes"])
        lines = [{**record, "hashes": "".join(record["hashes"].values())}]
        if keys != self._keys:
            lines.insert(0, {"tensors": list(keys)})
        metrics_file.append(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        self._keys = keys

    def _latest(self) -> tuple[tuple[str, ...], int | None]:
        """The keys that an earlier part of the run has last, and its last step; nothing where there is none that can be read."""
        try:
            records = read_hashes(self._path)
            *_, (keys, _) = _lines(self._path, read_bytes(self._path))
        except (DataError, OSError, ValueError):
            return (), None
        return keys, max(records, default=None)


def read_hashes(path: Path) -> dict[int, HashRecord]:
    """All complete records of a file, by step; none where there is no file. A last line that a kill has torn is left out.

    Raises:
        DataError: another line is no record.
    """
    if not path.exists():
        return {}
    records = (_record(keys, line) for keys, line in _lines(path, read_bytes(path)) if line is not None)
    return {record.step: record for record in records}


def _record(keys: tuple[str, ...], line: Mapping[str, Any]) -> HashRecord:
    return HashRecord(line["step"], keys, line["hashes"], str(line.get("all", "")))


def _lines(path: Path, content: bytes) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any] | None]]:
    """(keys, record) of each complete line; no record in a line that has keys."""
    keys: tuple[str, ...] = ()
    *lines, _torn = content.split(b"\n")
    for number, text in enumerate(lines, 1):
        line = json_object(text) or {}
        tensors = line.get("tensors")
        if isinstance(tensors, list) and all(isinstance(key, str) for key in tensors):
            keys = tuple(tensors)
            yield keys, None
        elif _is_record(line, keys):
            yield keys, line
        else:
            raise DataError(f"Line {number} of {path} holds no hashes of {len(keys)} tensors; delete the line.")


def _is_record(line: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    step, digests = line.get("step"), line.get("hashes")
    return isinstance(step, int) and isinstance(digests, str) and len(digests) == DIGITS * len(keys)
