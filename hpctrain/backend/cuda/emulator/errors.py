"""The error of the emulated device."""

from __future__ import annotations


class EmulatedDeviceError(AssertionError):
    """A mistake in a kernel or in the order of work, which a GPU may not find: a defect of this package."""
