"""The options that backend cuda does not take so far, each with its sentence.

They are asked for when a configuration is checked, and again where backend auto has taken a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.config.schema import Config
from hpctrain.config.source import KeyPath
from hpctrain.errors import ConfigError

_HOST_SETS = 'or backend to "onednn" or "numpy"'


def device_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of each option that the configured backend, cuda, does not take; none for other backends."""
    if config.backend == "cuda":
        yield from _faults(config)


def check_device(config: Config, kernels: KernelSet) -> None:
    """Refuse options that these kernels do not take. Not collective, and alike on every rank.

    Raises:
        ConfigError: the first of them.
    """
    if not kernels.arithmetic.on_host:
        for _, sentence in _faults(config):
            raise ConfigError(sentence)


def _faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    if config.data.mixing.mixes:
        yield ("data", "mixing"), mixing_fault("cuda")
    if config.progress in (ProgressMode.THREAD, ProgressMode.POSTING):
        yield ("progress",), progress_fault(config.progress)
    wire = config.averager.options.get("wire_parameters", "float32")
    if wire != "float32":
        yield ("averager", "wire_parameters"), wire_fault(wire)


def mixing_fault(kernels: str) -> str:
    """The sentence that refuses mixed images beside a kernel set whose loss takes one label of each sample."""
    return (
        f"data.mixing mixes the labels of images, which the loss of backend {kernels} does not take so far; set "
        f"data.mixing.mixup and data.mixing.cutmix to 0, {_HOST_SETS}."
    )


def progress_fault(mode: str) -> str:
    """The sentence that refuses a thread for messages beside a device, whose work one thread enqueues."""
    return (
        f"progress is {mode}, but one thread enqueues the work of backend cuda, copies of what travels included, and its kernels "
        f"need no core; set progress to auto or test, {_HOST_SETS}."
    )


def wire_fault(wire: str) -> str:
    """The sentence that refuses parameters in 16 bits beside a device."""
    return (
        f"averager.wire_parameters is {wire}, but on backend cuda parameters travel as they are so far; set it to float32, "
        f"{_HOST_SETS}."
    )
