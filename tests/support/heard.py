"""A reporter that remembers what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.train.metrics import Reporter


class Heard(Reporter):
    """Attributes: lines: said, in order. records: (kind, values), in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[tuple[str, Mapping[str, Any]]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        self.records.append((kind, values))
