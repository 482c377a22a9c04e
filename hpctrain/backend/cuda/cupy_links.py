"""Links between GPUs by NCCL, by way of CuPy. Beside `cupy_device` no other module imports cupy."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.device_messages import Peers
from hpctrain.core.errors import BackendError

_FIRST_WITH_SLICES = 23000  # NCCL 2.30 identifies devices by UUID; earlier ones by PCI bus, which slices of a GPU share


class CupyLinks:
    """Implements `DeviceLinks`. Making it is collective over the peers, and waits for them.

    Args:
        pointer: of the CUDA stream.

    Raises:
        BackendError: NCCL finds no way between the GPUs.
    """

    def __init__(self, peers: Peers, pointer: int) -> None:
        self._library: Any = _nccl()
        self._pointer = pointer
        self._types = {"float32": self._library.NCCL_FLOAT32, "float64": self._library.NCCL_FLOAT64}
        number, fault = None, None
        if peers.rank == 0:
            try:
                number = self._library.get_unique_id()
            except self._library.NcclError as error:  # which the others, who wait for the number, have to hear of
                fault = str(error)
        number, fault = peers.broadcast_object((number, fault))
        try:
            self._group: Any = None if fault is not None else self._library.NcclCommunicator(peers.size, number, peers.rank)
        except self._library.NcclError as error:
            fault = str(error)
        if fault is not None:
            raise BackendError(f"NCCL does not join the GPUs of these {peers.size} ranks ({fault}); set transport to staged.")

    @contextmanager
    def together(self) -> Iterator[None]:
        self._library.groupStart()
        try:
            yield
        finally:  # NCCL holds everything back until then, of later groups as well
            self._library.groupEnd()

    def send(self, array: DeviceArray, to: int) -> None:
        self._group.send(array.pointer, array.nbytes, self._library.NCCL_UINT8, to, self._pointer)

    def receive(self, array: DeviceArray, source: int) -> None:
        self._group.recv(array.pointer, array.nbytes, self._library.NCCL_UINT8, source, self._pointer)

    def broadcast(self, array: DeviceArray, root: int) -> None:
        self._group.broadcast(array.pointer, array.pointer, array.nbytes, self._library.NCCL_UINT8, root, self._pointer)

    def sum_to_all(self, array: DeviceArray) -> None:
        datatype = self._types[array.dtype]
        self._group.allReduce(array.pointer, array.pointer, array.size, datatype, self._library.NCCL_SUM, self._pointer)

    def sum_to_one(self, send: DeviceArray, recv: DeviceArray, root: int) -> None:
        datatype = self._types[send.dtype]
        self._group.reduce(send.pointer, recv.pointer, send.size, datatype, self._library.NCCL_SUM, root, self._pointer)

    def fault(self) -> str | None:
        try:
            self._group.check_async_error()
        except self._library.NcclError as error:
            return str(error)
        return None

    def abort(self) -> None:
        self._group.abort()


def nccl_fault(device: str) -> str | None:
    """Return the reason why NCCL cannot be used here, as a clause; None if it can.

    Args:
        device: name of this process's device; that of a slice of a GPU contains "MIG".
    """
    library = _nccl()
    if library is None:
        return "CuPy finds no NCCL, which comes with the package nvidia-nccl-cu12 or nvidia-nccl-cu13"
    if "MIG" in device and (version := int(library.get_version())) < _FIRST_WITH_SLICES:
        return f"NCCL {version // 10000}.{version // 100 % 100} takes all slices of a GPU (MIG) for one device (2.30 is needed)"
    return None


def _nccl() -> Any:
    """CuPy's module; None where its library is not there."""
    _load_wheel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in which CuPy tells of a library that is not there
        try:
            from cupy.cuda import nccl
        except ImportError:
            return None
    return nccl if nccl.available else None


def _load_wheel() -> None:
    """Load NCCL where a wheel has brought it, so that CuPy's module finds it by its name."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        return
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            with suppress(OSError):  # CuPy says what it misses
                ctypes.CDLL(os.fspath(library), mode=ctypes.RTLD_GLOBAL)
