"""Every oneDNN primitive of a step with its own time, as the library itself reports it (its "verbose" lines on stdout)."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from hpctrain.backend.kernels.onednn.library import load

_PREFIX = "onednn_verbose,exec,"
_FIELDS = 9  # engine, kind, implementation, propagation, memory, attributes, auxiliary, problem, milliseconds


@dataclass(frozen=True)
class PrimitiveTime:
    """One execution of a primitive.

    kind: such as "convolution". implementation: such as "brgconv:avx512_core". propagation: such as "forward_training".
    memory: its formats. problem: the shape, as oneDNN writes it.
    """

    kind: str
    implementation: str
    propagation: str
    memory: str
    problem: str
    seconds: float


def profile(run: Callable[[], object], steps: int) -> list[list[PrimitiveTime]]:
    """The primitives that `run` executed, by step.

    Standard output of the whole process goes to a file meanwhile. oneDNN measures without its own printing.
    """
    library = load()
    found = []
    for _ in range(steps):
        with tempfile.TemporaryFile("w+") as file:
            with _stdout_to(file):
                library.dnnl_set_verbose(1)
                try:
                    run()
                finally:
                    library.dnnl_set_verbose(0)
            file.seek(0)
            found.append(list(parse(file)))
    return found


def parse(lines: Iterable[str]) -> Iterator[PrimitiveTime]:
    """The executions among oneDNN's lines."""
    for line in lines:
        if not line.startswith(_PREFIX):
            continue
        fields = line.removeprefix(_PREFIX).strip().split(",")
        # an implementation's name may hold commas, nothing else does
        extra = len(fields) - _FIELDS
        assert extra >= 0, line
        implementation = ",".join(fields[2 : 3 + extra])
        propagation, memory, _, _, problem, milliseconds = fields[3 + extra :]
        yield PrimitiveTime(fields[1], implementation, propagation, memory, problem, float(milliseconds) / 1e3)


@contextmanager
def _stdout_to(file: IO[str]) -> Iterator[None]:
    flush_c = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush_c(None)
    kept = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        flush_c(None)
        os.dup2(kept, 1)
        os.close(kept)
