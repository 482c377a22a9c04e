"""The CUDA sources of this package: their names, their self-contained texts, and their binaries by NVRTC.

Compilers receive a text that includes no other files. Binaries are cached in the user's cache directory. CuPy's own compiler is
not used: it appends `-ftz=true`, which flushes subnormal numbers to zero, and it needs the headers of CUDA's runtime, which come
in a separate package.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain.core.errors import BackendError
from hpctrain.core.files import read_bytes, user_directory
from hpctrain.storage.atomic_write import write_bytes

FOLDER = Path(__file__).parent

_INCLUDE = re.compile(r'#include "([\w.]+)"')


def names() -> tuple[str, ...]:
    """Return the names of all sources, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.cu")))


@cache
def text(name: str, folder: Path = FOLDER) -> str:
    """Return <folder>/<name>.cu with each of this package's headers inserted once. Other include directives are unchanged.

    `#line` directives make compilers report the line numbers of the files.
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


#: NVRTC's options for all kernels, to which `binary` adds the architecture
OPTIONS = ("-std=c++17", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
_LOG_LINES = 6  # number of lines of the compiler's log in an error

Library = Any  # cupy_backends.cuda.libs.nvrtc; it has no types


def binary(nvrtc: Library, name: str, text: str, capability: tuple[int, int], environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the binary of a CUDA source for a compute capability, from the cache, or compiled and then cached.

    If the GPU is newer than NVRTC, the binary is PTX of NVRTC's newest architecture, which the driver compiles. The cache is the
    folder `kernels` in `$XDG_CACHE_HOME/hpctrain` (~/.cache/hpctrain). Without access to it, each process compiles.

    Args:
        nvrtc: CuPy's module nvrtc.
        name: name of the source, for messages.
        text: source without include directives.
        capability: (major, minor) compute capability of the GPU.
        environ: environment, which determines the cache directory.

    Raises:
        BackendError: NVRTC supports no architecture that the GPU runs, or cannot compile the source. In the latter case, the
            message has the first lines of NVRTC's log.
    """
    wanted = 10 * capability[0] + capability[1]
    known = [int(number) for number in nvrtc.getSupportedArchs()]
    older = [number for number in known if number <= wanted]
    if not older:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise BackendError(
            f"NVRTC {version} compiles for compute capability {min(known) / 10} and above, but this GPU has {wanted / 10}; "
            "install hpctrain[gpu12], whose NVRTC supports older GPUs."
        )
    kind = "sm" if wanted in known else "compute"
    options = (*OPTIONS, f"-arch={kind}_{max(older)}")
    key = "\0".join((text, *options, repr(nvrtc.getVersion())))
    directory = user_directory("XDG_CACHE_HOME", ".cache", environ)
    path = None if directory is None else directory / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.{kind}"
    with contextlib.suppress(OSError):
        if path is not None and (cached := read_bytes(path, own=True)):
            return cached
    compiled = _compile(nvrtc, name, text, options, kind)
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, compiled)
    return compiled


def _compile(nvrtc: Library, name: str, text: str, options: tuple[str, ...], kind: str) -> bytes:
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            lines = [line for line in nvrtc.getProgramLog(program).splitlines() if line.strip()]
            raise BackendError(f"NVRTC cannot compile the source {name}.cu ({error}): {'; '.join(lines[:_LOG_LINES])}") from error
        return bytes(nvrtc.getCUBIN(program) if kind == "sm" else nvrtc.getPTX(program))
    finally:
        nvrtc.destroyProgram(program)
