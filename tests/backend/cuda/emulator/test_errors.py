"""Mistakes that the emulated device finds are defects, shown with their traceback."""

from __future__ import annotations

from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.errors import HpctrainError


def test_it_is_not_an_error_of_the_user() -> None:
    assert issubclass(EmulatedDeviceError, AssertionError)
    assert not issubclass(EmulatedDeviceError, HpctrainError)
