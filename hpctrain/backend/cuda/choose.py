"""The choice of a rank's device: a GPU of its node, or the emulated one where a developer asks for it.

Nothing here imports CuPy before the environment says which GPUs this process may use.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass

from hpctrain.backend.cuda import cudnn_graphs
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.core.errors import BackendError, MissingLibraryError

#: set by developers: "emulated" or "emulated:SEED" computes on this CPU what a GPU would compute
DEVICE_VARIABLE = "HPCTRAIN_CUDA_DEVICE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OTHERWISE = "or set backend to onednn or numpy, which compute on the CPU"


@dataclass(frozen=True)
class NodePlace:
    """A rank among those that share the GPUs of its node. ranks: of the job. local_ranks: of the node."""

    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1


def make_device(precision: Precision, place: NodePlace) -> Device:
    """This rank's device, which computes in that precision.

    A rank that sees one GPU takes it: schedulers may give each rank its own. One that sees several takes that of its number on
    the node.

    Raises:
        BackendError: there is none, or it does not; the sentence says what to do.
    """
    seed = emulated_seed(os.environ)
    if seed is not None:
        from hpctrain_testing.emulator.device import EmulatedDevice

        return EmulatedDevice(seed)
    device = _gpu(place)
    wanted = "float32" if precision == "tf32" else precision
    if wanted == "float64":
        raise BackendError(f"{device.name} is not used for float64, {_OTHERWISE}, or dtype to float32.")
    if wanted not in device.dtypes:
        major, minor = device.capability
        raise BackendError(
            f"{device.name} does not compute in {wanted}: its compute capability is {major}.{minor}, bfloat16 needs 8.0; "
            "set precision to float32."
        )
    return device


def missing(place: NodePlace) -> str | None:
    """Why no GPU can be used here, in one sentence; None where one can. The emulated device does not count."""
    try:
        _gpu(place)
    except BackendError as error:
        return str(error)
    return None


def cupy_is_installed() -> bool:
    """True where somebody may expect a GPU to be used."""
    return importlib.util.find_spec("cupy") is not None


def emulated_seed(environ: MutableMapping[str, str]) -> int | None:
    """The seed of the emulated device that the environment asks for; None where it asks for none.

    Raises:
        BackendError: it asks for something else.
    """
    value = environ.get(DEVICE_VARIABLE)
    if value is None:
        return None
    match = re.fullmatch(r"emulated(?::(\d{1,9}))?", value)
    if match is None:
        raise BackendError(
            f"{DEVICE_VARIABLE} is {value!r}; it must be emulated, or emulated:SEED with a whole number, "
            "or not be set where a GPU is to be used."
        )
    return int(match[1] or 0)


def _gpu(place: NodePlace) -> Device:
    if not cupy_is_installed():
        raise BackendError(
            "Backend cuda needs CuPy, which is not installed; install hpctrain[gpu13] for CUDA 13, or hpctrain[gpu12], "
            f"{_OTHERWISE}."
        )
    narrow(os.environ, place)
    from hpctrain.backend.cuda.cupy_device import CupyDevice, gpu_count

    try:
        count = gpu_count()
    except BackendError as error:
        raise BackendError(
            f"Backend cuda needs a driver of NVIDIA that runs its CUDA ({error}); install it, {_OTHERWISE}."
        ) from error
    if not count:
        shown = repr(os.environ[_VISIBLE]) if _VISIBLE in os.environ else "not set"
        raise BackendError(
            f"CUDA shows no GPU to this process ({_VISIBLE} is {shown}); ask the scheduler for one, such as by "
            f"--gpus-per-task=1, {_OTHERWISE}."
        )
    device = CupyDevice(gpu_index(count, place))
    try:
        cudnn = cudnn_graphs.library()
    except MissingLibraryError as error:
        raise BackendError(str(error)) from error
    device.versions = {**device.versions, "cudnn": str(cudnn.backend_version_string())}
    return device


def narrow(environ: MutableMapping[str, str], place: NodePlace) -> None:
    """Leave one of several GPUs in CUDA_VISIBLE_DEVICES, that of the rank's number: other threads and libraries see no other.

    Raises:
        BackendError: there are fewer than ranks on the node.
    """
    entries = [entry.strip() for entry in environ.get(_VISIBLE, "").split(",") if entry.strip()]
    if len(entries) > 1:
        environ[_VISIBLE] = entries[gpu_index(len(entries), place)]


def gpu_index(count: int, place: NodePlace) -> int:
    """The GPU of a rank among `count` that it sees.

    Raises:
        BackendError: there are several, but fewer than ranks on the node.
    """
    if count == 1:
        return 0
    if place.local_ranks > count:
        raise BackendError(
            f"This node shows {count} GPUs to each of its {place.local_ranks} ranks; start at most {count} ranks on a node, "
            f"{_OTHERWISE}."
        )
    return place.local_rank
