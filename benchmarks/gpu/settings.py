"""All that the stages of `gpu_check` are told, and the device that they work on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.backend.cuda import choose
from hpctrain.backend.cuda.choose import NodePlace
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.backend.cuda.emulator.device import EmulatedDevice

EMULATED_SEED = 2  # random orders of blocks and threads


class NotBuiltYetError(Exception):
    """A stage needs a part of the package that is not there; the message names it."""


class SkippedError(Exception):
    """A stage cannot run here; the message says why."""


@dataclass(frozen=True)
class Settings:
    """device: "cuda", a GPU, or "emulated", this CPU, with sizes that it bears. out: folder of the results."""

    device: Literal["cuda", "emulated"]
    out: Path

    @property
    def emulated(self) -> bool:
        return self.device == "emulated"

    def arguments(self) -> list[str]:
        """For the command line of a stage's process."""
        return ["--device", self.device, "--out", os.fspath(self.out)]

    def environment(self) -> Mapping[str, str]:
        """The environment of a stage's process: which device the package takes."""
        inherited = {name: value for name, value in os.environ.items() if name != choose.DEVICE_VARIABLE}
        return inherited | ({choose.DEVICE_VARIABLE: f"emulated:{EMULATED_SEED}"} if self.emulated else {})

    def make_device(self) -> Device:
        """
        Raises:
            BackendError: there is no GPU that can be used.
        """
        return EmulatedDevice(EMULATED_SEED) if self.emulated else choose.make_device("float32", NodePlace())

    def precisions(self) -> tuple[Precision, ...]:
        """In which operators are checked: a GPU's kernels have no float64."""
        return ("float64", "float32", "bfloat16") if self.emulated else ("float32", "tf32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `Settings` come from."""
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results")
