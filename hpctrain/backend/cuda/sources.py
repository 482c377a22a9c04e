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
def text(name: str, folder: Path = FOLDER) -> str:
    """<folder>/<name>.cu with the headers of kernels/ put in, each once; other headers stay as they are."""
    inserted: set[str] = set()

    def put_in(match: re.Match[str]) -> str:
        header = FOLDER / match[1]
        if match[1] in inserted or not header.exists():
            return "" if match[1] in inserted else match[0]
        inserted.add(match[1])
        return _INCLUDE.sub(put_in, header.read_text())

    return _INCLUDE.sub(put_in, (folder / f"{name}.cu").read_text())
