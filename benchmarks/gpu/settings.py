"""The settings of all stages of `gpu_check`, and the device that they work on.

The process that starts the stages imports this file and nothing of hpctrain, so that it can report a broken hpctrain.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hpctrain.backend.cuda.device import Device, Precision

_DEVICE_VARIABLE = "HPCTRAIN_CUDA_DEVICE"  # hpctrain.backend.choice.DEVICE_VARIABLE
EMULATED_SEED = 2  # random orders of blocks and threads


class NotBuiltYetError(Exception):
    """A stage needs a part of the package that is not there; the message names it."""


class SkippedError(Exception):
    """A stage cannot run here; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What a stage is run with.

    device: "cuda" for a GPU, or "emulated" for this CPU, with smaller sizes. out: folder of the results. limit: seconds after
    which the stage is stopped.
    """

    device: Literal["cuda", "emulated"]
    out: Path
    limit: float = math.inf

    @property
    def emulated(self) -> bool:
        return self.device == "emulated"

    def arguments(self) -> list[str]:
        """Return the arguments of a stage's process that name the device and the folder."""
        return ["--device", self.device, "--out", os.fspath(self.out)]

    def environment(self) -> Mapping[str, str]:
        """Return the environment of a stage's process, which names hpctrain's device and leaves output unbuffered."""
        inherited = {name: value for name, value in os.environ.items() if name != _DEVICE_VARIABLE} | {"PYTHONUNBUFFERED": "1"}
        return inherited | ({_DEVICE_VARIABLE: f"hpctrain_testing.emulator:{EMULATED_SEED}"} if self.emulated else {})

    def make_device(self) -> Device:
        """Make the device of the settings.

        Raises:
            BackendError: there is no GPU that can be used.
        """
        from hpctrain.backend import choice
        from hpctrain_testing.emulator.device import EmulatedDevice

        return EmulatedDevice(EMULATED_SEED) if self.emulated else choice.make_device("float32", choice.NodePlace())

    def precisions(self) -> tuple[Precision, ...]:
        """Return the precisions in which operators are checked; a GPU's kernels have no float64."""
        return ("float64", "float32", "bfloat16") if self.emulated else ("float32", "tf32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `Settings`."""
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results")
