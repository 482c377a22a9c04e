"""Kernels of the emulated device: CUDA sources compiled for this CPU, and their launches.

Each source becomes a shared library, cached by content.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import Argument, DeviceArray, DeviceStream, Extent
from hpctrain.core.errors import BackendError
from hpctrain_testing.emulator.memory import EmulatedDeviceError

_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_LANGUAGE = ("-x", "c++", "-std=c++17", "-DON_CPU", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fno-strict-aliasing")
_LIBRARY = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")  # the latter refuses switches of stacks
_FLAGS = (*_LANGUAGE, *_LIBRARY)


def compiler() -> str | None:
    """Return the path of the C++ compiler; None if there is none."""
    return shutil.which("g++")


@cache
def library(source: str) -> ctypes.PyDLL:
    """Return the library of <source>.cu. Its calls hold Python's lock, as it runs one kernel at a time."""
    return build(sources.text(source))


def build(text: str) -> ctypes.PyDLL:
    """Return the library of a CUDA source, compiled unless it is in the cache.

    Raises:
        BackendError: there is no compiler, or it rejects the source; the message has the compiler's output.
    """
    target = _target(text)
    if not target.exists():
        _compile(text, target)
    return ctypes.PyDLL(str(target))


def prepare(texts: Iterable[str]) -> None:
    """Fill the cache with the libraries of many sources. If several processes call this, one compiles and the others wait.

    Raises:
        BackendError: as for `build`.
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
    """Return the cache directory. It must belong to this user, so that no other user can have put a library there."""
    folder = Path(tempfile.gettempdir()) / f"hpctrain-cuda-on-cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BackendError(
            f"{folder}, the kernel cache of the emulated device, belongs to another user; set TMPDIR to another directory."
        )
    return folder


@contextmanager
def _lock() -> Iterator[None]:
    with (_folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(text: str, target: Path) -> None:
    command = compiler()
    if command is None:
        raise BackendError("The emulated device builds its kernels with g++, which is not installed; install the package g++.")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        arguments = (*_FLAGS, f"-I{Path(__file__).parent}", str(source), "-o", str(built))
        done = subprocess.run([command, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise BackendError(f"g++ cannot compile a CUDA source: {done.stderr[:2000]}")
        built.replace(target)


#: limits of CUDA devices, by dimension
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = (1024, 1024, 64)
MOST_THREADS_OF_A_BLOCK = 1024

_TEXT_BYTES = 8192


class Enqueue(Protocol):
    """Callback that adds work to a stream. `keep_alive`: arrays whose memory stays in use until the work is done."""

    def __call__(
        self, stream: DeviceStream, action: Callable[[], None], text: str, keep_alive: Sequence[DeviceArray] = ()
    ) -> None: ...


class _Request(ctypes.Structure):
    """The struct cpu::Launch of launches.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("seed", ctypes.c_uint64),
        ("message", ctypes.c_char * 512),
    )


def pack_arguments(name: str, parameters: Sequence[str], arguments: Sequence[Argument]) -> list[bytes]:
    """Return the bytes of each argument.

    Args:
        parameters: types of the kernel's parameters: "int32", "float64", "bool", "pointer float32", "pointer void" (any), "bytes
            24".

    Raises:
        TypeError: the number or a type of the arguments does not fit the kernel, or an address is not aligned.
    """
    if len(parameters) != len(arguments):
        raise TypeError(f"{name} takes {len(parameters)} arguments, not {len(arguments)}.")
    return [_bytes(f"Argument {i} of {name}", *pair) for i, pair in enumerate(zip(parameters, arguments, strict=True))]


def _bytes(place: str, parameter: str, argument: Argument) -> bytes:
    kind, _, dtype = parameter.rpartition(" ")
    if argument is None or isinstance(argument, DeviceArray):
        if kind != "pointer":
            raise TypeError(f"{place} is a place in memory; the kernel takes {parameter}.")
        return bytes(8) if argument is None else _address(place, dtype, argument)
    if not isinstance(argument, np.generic):
        raise TypeError(f"{place} is {type(argument).__name__}; kernels take device arrays and NumPy scalars.")
    if kind == "pointer" and isinstance(argument, np.uint64):  # an address, as for CuPy
        return argument.tobytes()
    given = f"bytes {argument.nbytes}" if isinstance(argument, np.void) else str(argument.dtype)
    if given != parameter:
        raise TypeError(f"{place} is {given}; the kernel takes {parameter}.")
    return argument.tobytes()


def _address(place: str, dtype: str, array: DeviceArray) -> bytes:
    if dtype not in ("void", array.dtype) and {dtype, array.dtype} != {"bool", "uint8"}:
        raise TypeError(f"{place} is {array!r}; the kernel takes elements of {dtype}.")
    if array.pointer % array.itemsize:
        raise TypeError(f"{place} is {array!r}, which is not aligned to its elements.")
    return array.pointer.to_bytes(8, "little")


def _check_extents(name: str, grid: Extent, block: Extent) -> None:
    for what, extent, limits in (("grid", grid, MOST_BLOCKS), ("block", block, MOST_THREADS)):
        if not 1 <= len(extent) <= 3 or any(not 1 <= n <= limit for n, limit in zip(extent, limits, strict=False)):
            raise ValueError(f"{name} cannot be launched with the {what} {extent}; its dims are 1 to {limits}.")
    if math.prod(block) > MOST_THREADS_OF_A_BLOCK:
        raise ValueError(f"{name} cannot be launched with the block {block}: it has {math.prod(block)} threads, more than 1024.")


class CpuKernel:
    """One kernel of a built source; implements `DeviceKernel`.

    Args:
        library: library of the source. It holds Python's lock while a kernel runs.
        seed: callback that returns the seed for the orders of blocks and threads of the next launch.
        describe: callback that returns a clause about an address that a kernel must not access.
    """

    def __init__(
        self, library: ctypes.PyDLL, name: str, seed: Callable[[], int], enqueue: Enqueue, describe: Callable[[int], str]
    ) -> None:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        try:
            count = getattr(library, f"parameters_{name}")(text, ctypes.c_size_t(_TEXT_BYTES))
            self._launch = getattr(library, f"launch_{name}")
        except AttributeError:
            raise KeyError(f"The source has no kernel {name}, or does not export it.") from None
        self.parameters = text.value.decode().split("\n")[:-1]
        assert len(self.parameters) == count, f"{name} has too many parameters"
        self._name, self._seed, self._enqueue, self._describe = name, seed, enqueue, describe

    def __call__(self, stream: DeviceStream, grid: Extent, block: Extent, *arguments: Argument) -> None:
        packed = pack_arguments(self._name, self.parameters, arguments)
        _check_extents(self._name, grid, block)
        keep_alive = [argument for argument in arguments if isinstance(argument, DeviceArray)]
        self._enqueue(stream, partial(self._run, grid, block, packed), self._name, keep_alive)

    def _run(self, grid: Extent, block: Extent, packed: Sequence[bytes]) -> None:
        holders = [ctypes.create_string_buffer(raw, len(raw)) for raw in packed]
        pointers = (ctypes.c_void_p * len(holders))(*(ctypes.addressof(holder) for holder in holders))
        request = _Request(tuple(_three(grid)), tuple(_three(block)), self._seed(), b"")
        if self._launch(pointers, ctypes.byref(request)):
            message = request.message.decode()
            address = re.search(r"0x[0-9a-f]+(?= that is not)", message)
            raise EmulatedDeviceError(message + (f" ({self._describe(int(address[0], 16))})" if address else ""))


def _three(extent: Extent) -> Extent:
    return (*extent, 1, 1)[:3]
