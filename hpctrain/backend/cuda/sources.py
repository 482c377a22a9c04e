"""The CUDA sources of this package: which there are, and their text in one piece for compilers that read no other files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)


def names() -> tuple[str, ...]:
    """Names of all sources, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.cu")))


@cache
def text(name: str) -> str:
    """kernels/<name>.cu with the headers beside it put in, each once."""
    done: set[str] = set()

    def put_in(match: re.Match[str]) -> str:
        header = FOLDER / match[1]
        if match[1] in done or not header.exists():
            return "" if match[1] in done else match[0]
        done.add(match[1])
        return _INCLUDE.sub(put_in, header.read_text())

    return _INCLUDE.sub(put_in, (FOLDER / f"{name}.cu").read_text())
