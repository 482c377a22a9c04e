"""A kernel of the emulated device: arguments checked against the kernel's parameters, then run on this CPU."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from hpctrain.backend.cuda.device import Argument, DeviceStream, Extent
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError

#: of CUDA devices, by dim
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = (1024, 1024, 64)
MOST_THREADS_OF_A_BLOCK = 1024

_TEXT_BYTES = 8192


class Enqueue(Protocol):
    """Adds work to a stream. `kept`: arrays whose memory stays in use until the work is done."""

    def __call__(self, stream: DeviceStream, action: Callable[[], None], text: str, kept: Sequence[DeviceArray] = ()) -> None: ...


class _Request(ctypes.Structure):
    """cpu::Launch of launches.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("seed", ctypes.c_uint64),
        ("message", ctypes.c_char * 512),
    )


def pack_arguments(name: str, parameters: Sequence[str], arguments: Sequence[Argument]) -> list[bytes]:
    """The bytes of each argument.

    Args:
        parameters: the kernel's, by type: "int32", "float64", "bool", "pointer float32", "pointer void" (any), "bytes 24".

    Raises:
        TypeError: a number of arguments or a type that the kernel does not have, or a place that is not aligned.
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
    if kind == "pointer" and isinstance(argument, np.uint64):  # an address, as CuPy takes it
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
    """One kernel of a built source. Implements `DeviceKernel`.

    Args:
        library: holds Python's lock while a kernel runs: it has one machine.
        seed: gives the seed for the orders of blocks and threads of the next launch.
        describe: a clause about an address that a kernel must not touch.
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
        kept = [argument for argument in arguments if isinstance(argument, DeviceArray)]
        self._enqueue(stream, partial(self._run, grid, block, packed), self._name, kept)

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
