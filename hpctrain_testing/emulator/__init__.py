"""The emulated device: a CPU that runs the CUDA sources of `hpctrain.backend.cuda` as a GPU might.

An instrument of tests and benchmarks: hpctrain never imports it, it imports `hpctrain.backend` alone. Read `device.py` first,
then `streams.py`, which decides in which order work is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain_testing.emulator.device import EmulatedDevice


def make_device(argument: str) -> EmulatedDevice:
    """Make the device that `HPCTRAIN_CUDA_DEVICE=hpctrain_testing.emulator[:SEED]` names.

    Args:
        argument: the seed of the orders in which work is done; empty: 0.

    Raises:
        ValueError: it is no seed.
    """
    from hpctrain_testing.emulator.device import EmulatedDevice

    if argument and not (argument.isdecimal() and argument.isascii() and len(argument) < 10):
        raise ValueError(f"the seed of an emulated device is a whole number of at most 9 digits, not {argument!r}.")
    return EmulatedDevice(int(argument or 0))
