"""Settings and versions of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: stands for a key that a run does not have
ABSENT = "-"


@dataclass(frozen=True)
class ComparedSetting:
    """One key. values: of each run."""

    key: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether runs have different values."""
        return len(set(self.values)) > 1


def side_by_side(of_runs: Sequence[Mapping[str, str]]) -> tuple[ComparedSetting, ...]:
    """All keys that a run has, in the order of their first appearance."""
    keys = dict.fromkeys(key for settings in of_runs for key in settings)
    return tuple(ComparedSetting(key, tuple(settings.get(key, ABSENT) for settings in of_runs)) for key in keys)


def differences(of_runs: Sequence[Mapping[str, str]]) -> tuple[ComparedSetting, ...]:
    """Those that differ."""
    return tuple(setting for setting in side_by_side(of_runs) if setting.differs)
