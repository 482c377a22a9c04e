"""The choice of what computes: a kernel set, a dtype, a precision, and a rank's GPU.

A rank's device is a GPU of its node, or the device that the environment names. Nothing here imports CuPy before the
environment says which GPUs this process may use.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from hpctrain.backend.cuda import libraries
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.backend.operators import KernelSet
from hpctrain.core.errors import BackendError, MissingLibraryError
from hpctrain.core.log import get_logger

#: set by developers: MODULE or MODULE:ARGUMENT, whose function `make_device` makes a device that takes the place of a GPU
DEVICE_VARIABLE = "HPCTRAIN_CUDA_DEVICE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OTHERWISE = "or set backend to onednn or numpy, which compute on the CPU"


@dataclass(frozen=True)
class NodePlace:
    """A rank and its node. ranks: ranks of the job. local_rank: number of the rank on the node. local_ranks: ranks on it."""

    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1


def make_device(precision: Precision, place: NodePlace) -> Device:
    """Return this rank's device, which computes in that precision.

    A rank that sees one GPU takes it: schedulers may give each rank its own. One that sees several takes that of its number on
    the node.

    Raises:
        BackendError: there is none, or it does not; the sentence says what to do.
    """
    named = os.environ.get(DEVICE_VARIABLE)
    if named is not None:
        return _named_device(named)
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
    """Return the reason why no GPU can be used here, as a sentence; None if one can. Looks for GPUs only."""
    try:
        _gpu(place)
    except BackendError as error:
        return str(error)
    return None


def cupy_is_installed() -> bool:
    """Return whether CuPy is installed: a user may then expect that a GPU is used."""
    return importlib.util.find_spec("cupy") is not None


def _named_device(value: str) -> Device:
    """Return the device of the module that `DEVICE_VARIABLE` names, made by `make_device(argument)` of that module.

    Raises:
        BackendError: there is no such module, it makes no devices, or it refuses the argument.
    """
    name, _, argument = value.partition(":")
    try:
        make = importlib.import_module(name).make_device
    except (ImportError, AttributeError, ValueError) as error:
        raise BackendError(
            f"{DEVICE_VARIABLE} is {value!r}; it must name a module that makes a device, such as hpctrain_testing.emulator "
            f"({error}), or not be set if a GPU is to be used."
        ) from error
    try:
        device: Device = make(argument)
    except ValueError as error:
        raise BackendError(f"{DEVICE_VARIABLE} is {value!r}: {error}") from error
    return device


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
        cudnn = libraries.library()
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
    """Return the GPU of a rank among `count` that it sees.

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


_log = get_logger(__name__)

NAMES = ("auto", "numpy", "onednn", "cuda")
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Backend:
    """A kernel set and what it computes in.

    Attributes:
        name: name of the kernel set, never "auto".
        dtype: dtype of activations: "float32", "float64" or "bfloat16".
        kernels: kernel set, which makes the operators and allocates their memory.
        description: description for users, such as "onednn, float32".
        versions: versions of the libraries that a run records in addition to those of all runs.
    """

    name: str
    dtype: str
    kernels: KernelSet
    description: str
    versions: Mapping[str, str] = field(default_factory=dict)


def make_backend(
    name: str = "auto", dtype: str = "float32", precision: str = "float32", place: NodePlace | None = None
) -> Backend:
    """Return the backend of that name.

    "auto" selects a GPU if one can be used, else oneDNN for float32 if its library loads, else NumPy, and logs its choice.

    Args:
        dtype: dtype of parameters, and of activations at precision "float32": "float32" or "float64".
        precision: precision of products, for dtype float32: "tf32" rounds their factors, "bfloat16" all activations (cuda only).
        place: place of this rank on its node, to find its GPU; by default it is alone.

    Raises:
        BackendError: an unknown name, a dtype or precision that the backend cannot compute in, or a library that is not there.
    """
    place = place or NodePlace()
    _check(name, dtype, precision)
    if name == "auto":
        name = _choose(dtype, precision, place)
    if name == "cuda":
        return _cuda(dtype, precision, place)
    kernels = _numpy() if name == "numpy" else _onednn()
    if dtype not in kernels.dtypes:
        raise BackendError(
            f"The {name} backend computes in {' or '.join(kernels.dtypes)}, not in {dtype}; backend numpy computes in {dtype}."
        )
    return Backend(name, dtype, kernels, f"{name}, {dtype}")


def _check(name: str, dtype: str, precision: str) -> None:
    if name not in NAMES:
        raise BackendError(f"There is no backend {name!r}; the backends are {', '.join(NAMES)}.")
    if dtype not in ("float32", "float64"):
        raise BackendError(f"No backend computes in {dtype}; the dtypes are float32 and float64.")
    if precision not in PRECISIONS:
        raise BackendError(f"There is no precision {precision!r}; the precisions are {', '.join(PRECISIONS)}.")
    fault = precision_fault(name, dtype, precision)
    if fault is not None:
        raise BackendError(fault)


def precision_fault(name: str, dtype: str, precision: str) -> str | None:
    """Return the sentence that refuses a precision for a backend and a dtype; None if they fit, as far as names say."""
    if precision == "float32":
        return None
    if dtype != "float32":
        return f"precision is {precision}, which goes with dtype float32 only; for dtype {dtype} leave it at float32."
    if name not in ("cuda", "auto"):
        return f"precision is {precision}, in which only backend cuda computes; set precision to float32, or backend to cuda."
    return None


def _choose(dtype: str, precision: str, place: NodePlace) -> str:
    if dtype != "float32":
        _log.info("Backend numpy: the only one that computes in %s.", dtype)
        return "numpy"
    no_gpu = missing(place)
    if no_gpu is None:
        _log.info("Backend cuda.")
        return "cuda"
    if precision != "float32":
        raise BackendError(f"precision is {precision}, in which only backend cuda computes; others do with float32. {no_gpu}")
    reason = _onednn_missing()
    name, remarks = ("onednn", []) if reason is None else ("numpy", [reason])
    if cupy_is_installed():
        remarks.append(no_gpu)
    _log.info("Backend %s%s", name, ": " + " ".join(remarks) if remarks else ".")
    return name


def _onednn_missing() -> str | None:
    """Return the reason why oneDNN cannot be used; None if it can."""
    from hpctrain.backend.onednn.kernel_set import available

    return available()


def _numpy() -> KernelSet:
    from hpctrain.backend.numpy.kernel_set import NumpyKernelSet

    return NumpyKernelSet()


def _onednn() -> KernelSet:
    from hpctrain.backend.onednn.kernel_set import OnednnKernelSet

    reason = _onednn_missing()
    if reason is not None:
        raise BackendError(f"Backend onednn cannot be used: {reason} Backend numpy works everywhere.")
    return OnednnKernelSet()


def _cuda(dtype: str, precision: str, place: NodePlace) -> Backend:
    from hpctrain.backend.cuda.kernel_set import CudaKernelSet
    from hpctrain.backend.cuda.runtime import CudaRuntime

    wanted: Precision = "float64" if dtype == "float64" else next(known for known in PRECISIONS if known == precision)
    device = make_device(wanted, place)
    runtime = CudaRuntime(device, device.stream("compute"), wanted)
    return Backend("cuda", runtime.dtype, CudaKernelSet(runtime), f"cuda on {device.name}, {wanted}", device.versions)
