"""CUDA sources built for this CPU: a shared library each, kept in a cache by content."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from hpctrain.backend.cuda import sources_rest
from hpctrain.core.errors import BackendError

_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_LANGUAGE = ("-x", "c++", "-std=c++17", "-DON_CPU", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fno-strict-aliasing")
_LIBRARY = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")  # the latter refuses switches of stacks
_FLAGS = (*_LANGUAGE, *_LIBRARY)


def compiler() -> str | None:
    """The C++ compiler; None where there is none."""
    return shutil.which("g++")


@cache
def library(source: str) -> ctypes.PyDLL:
    """The library of kernels/<source>.cu. Calls of it hold Python's lock: it runs one kernel at a time."""
    return build(sources_rest.text(source))


def build(text: str) -> ctypes.PyDLL:
    """The library of a CUDA source's text, compiled where the cache has none.

    Raises:
        BackendError: there is no compiler, or it refuses the source; the message holds what it says.
    """
    target = _target(text)
    if not target.exists():
        _compile(text, target)
    return ctypes.PyDLL(str(target))


def prepare(texts: Iterable[str]) -> None:
    """Fill the cache with the libraries of many sources. Of several processes that do so, one builds and the others wait.

    Raises:
        BackendError: as `build`.
    """
    with _lock(), ThreadPoolExecutor(os.cpu_count()) as pool:
        missing = {target: text for text in texts if not (target := _target(text)).exists()}
        list(pool.map(_compile, missing.values(), missing.keys()))


def _target(text: str) -> Path:
    headers = (path.read_text() for path in _HEADERS)
    key = "\0".join((text, *headers, *_FLAGS, str(compiler()), platform.machine()))
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


@cache
def _folder() -> Path:
    """The cache; nobody else can have put a library there."""
    folder = Path(tempfile.gettempdir()) / f"hpctrain-cuda-on-cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BackendError(f"{folder} belongs to another user; the emulated device keeps its kernels there: set TMPDIR.")
    return folder


@contextmanager
def _lock() -> Iterator[None]:
    with (_folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(text: str, target: Path) -> None:
    command = compiler()
    if command is None:
        raise BackendError("The emulated device builds its kernels with g++, which is not here; install it (package g++).")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        arguments = (*_FLAGS, f"-I{Path(__file__).parent}", str(source), "-o", str(built))
        done = subprocess.run([command, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise BackendError(f"g++ refuses a CUDA source: {done.stderr[:2000]}")
        built.replace(target)
