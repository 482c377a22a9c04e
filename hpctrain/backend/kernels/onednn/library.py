"""Finding oneDNN's shared library, and whether this machine can use it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

ENVIRONMENT_VARIABLE = "HPCTRAIN_ONEDNN_LIBRARY"
OLDEST_MAJOR = 3
_FILE_NAME = f"libdnnl.so.{OLDEST_MAJOR}"


class Version(ctypes.Structure):
    """dnnl_version_t."""

    _fields_ = (
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("hash", ctypes.c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    )


def candidates() -> list[str]:
    """Where the library may lie, most wanted first: the environment's word, this Python's prefix, the dynamic loader's own paths.

    A bare name is the loader's to look up. `ctypes.util.find_library` would start ldconfig, gcc and ld for each look, also in
    every rank after MPI has started.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return [named]
    in_prefixes = dict.fromkeys(str(Path(prefix) / "lib" / _FILE_NAME) for prefix in (sys.prefix, sys.base_prefix))
    return [*(path for path in in_prefixes if Path(path).exists()), _FILE_NAME]


def load() -> ctypes.CDLL:
    """The library.

    Raises:
        OSError: absent, of another version than 3, or not loadable; the message says for each place why.
    """
    failures = []
    for path in candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            failures.append(f"{path}: {error}")
            continue
        major = version(library).major
        if major == OLDEST_MAJOR:
            return library
        failures.append(f"{path} has version {major}, not {OLDEST_MAJOR}")
    raise OSError("; ".join(failures))


def version(library: ctypes.CDLL) -> Version:
    """The version that dnnl_version() gives."""
    library.dnnl_version.restype = ctypes.POINTER(Version)
    result: Version = library.dnnl_version().contents
    return result


def processor_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """Instruction sets of the first processor; empty where the system does not tell."""
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def available() -> str | None:
    """None where oneDNN can be used here; else one sentence that says why not."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        return f"oneDNN kernels need Linux on x86-64, this is {sys.platform} on {machine}."
    if "avx2" not in processor_flags():
        return "oneDNN kernels need a processor with AVX2, this one has none."
    try:
        load()
    except OSError as error:
        return f"The oneDNN library cannot be loaded ({error}); install onednn-cpu-gomp or set {ENVIRONMENT_VARIABLE}."
    return None
