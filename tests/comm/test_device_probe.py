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


def test_last_lines() -> None:
    assert device_probe.last_line("a\n b \n\n") == "b"
    assert device_probe.last_line("\n") == "it said nothing"


@pytest.mark.job
@pytest.mark.slow
def test_what_the_process_says_is_told_whatever_becomes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says its word and ends; or MPI ends it, with or without words of GPUs; or it does not end."""

    def says(*words: str, code: int = 0) -> None:
        program = f"import sys; print({chr(10).join(words)!r}); sys.exit({code})"
        monkeypatch.setattr(device_probe, "_COMMAND", ("-c", program))

    says("aware")
    assert device_probe.trial() == AWARE
    says("first", "Fatal error in MPI_Sendrecv", code=11)
    assert device_probe.trial() == f"{UNAWARE}: Fatal error in MPI_Sendrecv"
    says("abort", device_probe.GTL_WORDS, code=1)
    assert device_probe.trial() == f"abort\n{device_probe.GTL_WORDS}"
    monkeypatch.setattr(device_probe, "_COMMAND", ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert device_probe.trial() == f"{UNAWARE}: it said nothing"
    monkeypatch.setattr(device_probe, "_COMMAND", ("-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(device_probe, "_SECONDS", 0.2)
    assert device_probe.trial() == f"{UNAWARE}: TimeoutExpired"


@pytest.mark.job
@pytest.mark.slow
def test_the_process_is_an_mpi_job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beneath a launcher, whose ranks it must not disturb: without CuPy it says that it has tried nothing."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_FD", "999")
    found = device_probe.trial()
    assert found in (UNTRIED, AWARE) or found.startswith(UNAWARE)
    assert choose.cupy_is_installed() or found == UNTRIED
