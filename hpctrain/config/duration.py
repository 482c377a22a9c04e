"""Durations as people write them: "3h50m", "00:50:00", or a number of seconds."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from hpctrain.config.values import DECIMAL

#: in place of a duration: until the end of the Slurm job
SLURM: Literal["slurm"] = "slurm"

_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_UNITS = re.compile(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m(?:in)?)?(?:{_NUMBER}s)?")
# Slurm's forms: minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and days-hours:minutes:seconds.
_CLOCKS = (
    re.compile(r"()(?:([0-9]+):(?=[0-5]?[0-9]:))?([0-9]+):([0-5][0-9])"),
    re.compile(r"([0-9]+)-([01]?[0-9]|2[0-3])(?::([0-5][0-9])(?::([0-5][0-9]))?)?"),
)
_SECONDS = (86_400, 3_600, 60, 1)


def parse_duration(text: str) -> float:
    """Seconds of a text.

    Raises:
        ValueError: it is none.
    """
    compact = "".join(text.split()).lower()
    if is_bare_number(compact):
        return float(compact)
    match = next((found for clock in _CLOCKS if (found := clock.fullmatch(compact))), None) or _UNITS.fullmatch(compact)
    if match is None or not compact:
        raise ValueError(text)
    return sum(unit * float(part) for unit, part in zip(_SECONDS, match.groups(), strict=True) if part)


def is_bare_number(text: str) -> bool:
    """Return whether a duration has no unit. A configuration means seconds by such a number, users of Slurm mean minutes."""
    return DECIMAL.fullmatch("".join(text.split())) is not None


def _duration(value: Any) -> Any:
    if value is None or value == SLURM:
        return value
    try:
        seconds = math.nan if isinstance(value, bool) else parse_duration(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise PydanticCustomError(
            "duration_type", 'must be a time above 0, such as "3h50m", "00:50:00" or a number of seconds, or "slurm", or null'
        )
    return seconds


#: of a configuration: seconds, "slurm" or nothing; written in any of the ways above
Duration = Annotated[
    float | Literal["slurm"] | None,
    BeforeValidator(_duration),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}, {"type": "null"}]}),
]
