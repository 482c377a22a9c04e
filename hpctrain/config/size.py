"""Sizes of memory and of files as people write them: "64GB", "16 GiB", or a number of bytes."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

#: in place of a size: chosen at the start
AUTO: Literal["auto"] = "auto"

_TEXT = re.compile(r"((?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e\+?[0-9]{1,2})?)(?:([kmgt])(i?)b?|b)?")
_MOST = 1 << 62
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes of a text; kB, MB, GB and TB are powers of 1000, KiB and so on of 1024.

    Raises:
        ValueError: it is none.
    """
    match = _TEXT.fullmatch("".join(text.split()).lower())
    if match is None:
        raise ValueError(text)
    number, unit, binary = match.groups()
    return round(float(number) * ((1024 if binary else 1000) ** _POWERS[unit] if unit else 1))


def _size(value: Any) -> Any:
    if value == AUTO:
        return value
    try:
        size = math.nan if isinstance(value, bool) else parse_size(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        size = math.nan
    if not 0 <= size < _MOST:
        raise PydanticCustomError(
            "size_type", 'must be "auto", or a size of 0 or more, such as "64GB", "16GiB" or a number of bytes'
        )
    return int(size)


#: of a configuration: bytes or "auto", written in any of the ways above
Size = Annotated[
    int | Literal["auto"],
    BeforeValidator(_size),
    WithJsonSchema({"anyOf": [{"const": AUTO}, {"type": "integer", "minimum": 0}, {"type": "string"}]}),
]
