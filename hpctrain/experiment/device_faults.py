"""The options that backend cuda does not take so far, each with its sentence.

They are asked for when a configuration is checked, and again where backend auto has taken a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.backend.operators import KernelSet
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.config.schema import Config
from hpctrain.core.yaml_source import KeyPath
from hpctrain.core.errors import ConfigError

_HOST_SETS = 'or backend to "onednn" or "numpy"'


def device_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of each option that the configured backend, cuda, does not take, or that others do not."""
    if config.backend == "cuda":
        yield from _faults(config)
    elif config.backend != "auto" and config.transport != "auto":
        yield ("transport",), transport_fault(config.transport)


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

    if config.transport == "nccl" and config.averager.name == "sparse":
        yield ("transport",), sparse_fault()
    if config.transport == "nccl" and config.on_lost_rank.shrinks:
        yield ("transport",), shrink_fault()


def transport_fault(transport: str) -> str:
    """The sentence that refuses a way between GPUs where none compute."""
    return f'transport is {transport}, which is a way between GPUs; set it to auto, or backend to "cuda".'


def sparse_fault() -> str:
    """The sentence that refuses NCCL beside an averager that chooses what travels on the host."""
    return "transport is nccl, but averager sparse chooses on the host what travels; set transport to auto, staged or mpi."


def shrink_fault() -> str:
    """The sentence that refuses NCCL where a run is to go on without lost ranks."""
    return (
        "transport is nccl, whose operations do not end when a rank is lost, and on_lost_rank is shrink; set transport to "
        "staged, or on_lost_rank to stop."
    )


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
