"""The process that tries MPI's messages from a GPU's memory; here without a GPU, or with one that is made up."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda import choose
from hpctrain.comm import device_probe, mpi
from hpctrain.comm.device_probe import AWARE, UNAWARE, UNTRIED
from hpctrain.errors import BackendError, MissingLibraryError


class _Device:
    """A device whose memory is this process's."""

    def __init__(self, index: int) -> None:
        self.memory: list[np.ndarray] = []

    def allocate(self, size_bytes: int) -> SimpleNamespace:
        self.memory.append(np.zeros(size_bytes, np.uint8))
        return SimpleNamespace(pointer=self.memory[-1].ctypes.data, number=len(self.memory) - 1)

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def pinned(self, size_bytes: int) -> np.ndarray:
        return np.zeros(size_bytes, np.uint8)

    def upload(self, stream: object, target: SimpleNamespace, source: np.ndarray) -> None:
        self.memory[target.number][...] = source

    def download(self, stream: object, target: np.ndarray, source: SimpleNamespace) -> None:
        target[...] = self.memory[source.number]


class _NoDevice:
    def __init__(self, index: int) -> None:
        raise BackendError("GPU 0 cannot be used: no driver.")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in place of the one that imports CuPy."""
    module = ModuleType("hpctrain.backend.cuda.cupy_device")
    module.CupyDevice = _Device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(choose, "cupy_is_installed", lambda: True)
    monkeypatch.setattr(mpi, "world", lambda seconds: None)
    return module


def test_messages_that_arrive_are_compared(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_probe.outcome() == AWARE  # through MPI itself: this process's memory is what it can take
    monkeypatch.setattr(mpi, "send_to_itself", lambda *words: None)
    assert device_probe.outcome() == f"{UNAWARE}: the bytes that arrived are others"


def test_a_gpu_that_cannot_be_used_is_told(cupy: Any) -> None:
    cupy.CupyDevice = _NoDevice
    assert device_probe.outcome() == f"{UNAWARE}: GPU 0 cannot be used: no driver."


def test_nothing_is_tried_without_mpi_or_cupy(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "cupy_is_installed", lambda: False)
    assert device_probe.outcome() == UNTRIED

    def missing(seconds: float) -> None:
        raise MissingLibraryError("There is none.")

    monkeypatch.setattr(mpi, "world", missing)
    assert device_probe.outcome() == UNTRIED
