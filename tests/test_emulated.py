"""Tests of the emulated device start no compiler, and are skipped where there is none, but not in continuous integration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.backend.cuda.emulator import build
from hpctrain.errors import BackendError
from tests.support import emulated
from tests.support.emulated import EmulatedDevices


def _session(*fixtures: str) -> Any:
    return SimpleNamespace(items=[SimpleNamespace(fixturenames=fixtures), SimpleNamespace()])


def test_kernels_are_built_where_a_test_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(emulated, "prepare", lambda: built.append(True))
    EmulatedDevices().pytest_collection_finish(_session("tmp_path"))
    assert not built
    EmulatedDevices().pytest_collection_finish(_session("tmp_path", "emulated_device"))
    assert built


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("integration", [True, False])
def test_tests_without_kernels_are_skipped_or_fail(monkeypatch: pytest.MonkeyPatch, missing: bool, integration: bool) -> None:
    def refuse() -> None:
        raise BackendError("g++ refuses")

    monkeypatch.setattr(emulated, "prepare", refuse)
    monkeypatch.setattr(build, "compiler", lambda: None if missing else "g++")
    monkeypatch.setenv("CI", "true" if integration else "")
    devices = EmulatedDevices()
    devices.pytest_collection_finish(_session("emulated_device"))
    outcome = pytest.skip.Exception if missing and not integration else pytest.fail.Exception
    with pytest.raises(outcome, match=r"g\+\+"):
        devices.require()
