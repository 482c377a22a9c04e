"""The emulated device: a CPU that runs the CUDA sources of `hpctrain.backend.cuda` with the freedom of order of a GPU.

It is an instrument of tests and benchmarks. hpctrain never imports it; it imports only `hpctrain.backend`. Read `device.py`
first, then `streams.py`, which decides the order of work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain_testing.emulator.device import EmulatedDevice


def make_device(argument: str) -> EmulatedDevice:
    """Make the device for `HPCTRAIN_CUDA_DEVICE=hpctrain_testing.emulator[:SEED]`.

    Args:
        argument: seed of the orders of work; empty: 0.

    Raises:
        ValueError: the argument is not a seed.
    """
    from hpctrain_testing.emulator.device import EmulatedDevice

    if argument and not (argument.isdecimal() and argument.isascii() and len(argument) < 10):
        raise ValueError(f"the seed of an emulated device must be an integer of at most 9 digits, not {argument!r}.")
    return EmulatedDevice(int(argument or 0))
