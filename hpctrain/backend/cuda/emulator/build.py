"""CUDA sources built for this CPU: a shared library each, kept in a cache by content."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from hpctrain.backend.cuda import sources
from hpctrain.errors import BackendError

_HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_FLAGS = ("-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-DON_CPU", "-Wno-unknown-pragmas", "-ffp-contract=off")


def compiler() -> str | None:
    """The C++ compiler; None where there is none."""
    return shutil.which("g++")


@cache
def library(source: str, *defines: str) -> ctypes.CDLL:
    """The library of kernels/<source>.cu; `defines` are names that the preprocessor knows."""
    return build(sources.text(source), *defines)


def build(text: str, *defines: str) -> ctypes.CDLL:
    """The library of a CUDA source's text.

    Raises:
        BackendError: there is no compiler, or it refuses the source; the message holds what it says.
    """
    flags = (*_FLAGS, *(f"-D{name}" for name in defines), f"-I{_HEADER.parent}")
    digest = hashlib.sha256("\0".join((text, _HEADER.read_text(), *flags)).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"hpctrain-cuda-on-cpu-{os.getuid()}"
    target = folder / f"{digest}.so"
    if not target.exists():
        _compile(text, flags, target)
    return ctypes.CDLL(str(target))


def _compile(text: str, flags: tuple[str, ...], target: Path) -> None:
    command = compiler()
    if command is None:
        raise BackendError("The emulated device builds its kernels with g++, which is not here; install it (package g++).")
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        done = subprocess.run([command, *flags, str(source), "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            raise BackendError(f"g++ refuses a CUDA source: {done.stderr[:2000]}")
        built.replace(target)
