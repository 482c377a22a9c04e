"""The CUDA sources of this package: which there are, and their text in one piece for compilers that read no other files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"

_INCLUDE = re.compile(r'#include "([\w.]+)"')


def names() -> tuple[str, ...]:
    """Names of all sources, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.cu")))


@cache
def text(name: str, folder: Path = FOLDER) -> str:
    """<folder>/<name>.cu with the headers of kernels/ put in, each once; other headers stay as they are.

    Compilers name lines as they are in the files.
    """
    inserted: set[Path] = set()

    def lines(path: Path) -> Iterator[str]:
        yield f'#line 1 "{path.name}"'
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = _INCLUDE.fullmatch(line)
            header = FOLDER / include[1] if include else path
            if include is None or not header.exists():
                yield line
            elif header not in inserted:
                inserted.add(header)
                yield from lines(header)
                yield f'#line {number + 1} "{path.name}"'
            else:
                yield ""

    return "\n".join([*lines(folder / f"{name}.cu"), ""])
