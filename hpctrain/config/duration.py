"""Durations as people write them: "3h50m", "00:50:00", or a number of seconds."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

#: in place of a duration: until the end of the Slurm job
SLURM: Literal["slurm"] = "slurm"

_UNITS = re.compile(r"(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m(?:in)?)?(?:([\d.]+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-(?=\d+:\d+:))?(?:(\d+):)?(\d+):(\d\d)")
_SECONDS = (86_400, 3_600, 60, 1)


def parse_duration(text: str) -> float:
    """Seconds of a text.

    Raises:
        ValueError: it is none.
    """
    compact = "".join(text.split()).lower()
    match = _CLOCK.fullmatch(compact) or (_UNITS.fullmatch(compact) if compact else None)
    if match is None:
        return float(compact)
    return sum(unit * float(part) for unit, part in zip(_SECONDS, match.groups(), strict=True) if part)


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
