"""The choice of a kernel set, a dtype, a precision, and a rank's GPU.

A rank's device is a GPU of its node, or the device that an environment variable names. CuPy is imported only after the
environment states which GPUs this process may use.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.backend.cuda import libraries
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.backend.operators import KernelSet
from hpctrain.core.errors import BackendError, MissingLibraryError

if TYPE_CHECKING:
    from hpctrain.backend.onednn.kernel_set import OnednnKernelSet

#: environment variable for developers: MODULE or MODULE:ARGUMENT, whose `make_device` returns the device to use instead of a GPU
DEVICE_VARIABLE = "HPCTRAIN_CUDA_DEVICE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OTHERWISE = "or set backend to onednn or numpy, which compute on the CPU"


@dataclass(frozen=True)
class NodePlace:
    """Position of a rank on its node.

    Attributes:
        ranks: number of ranks of the job.
        local_rank: number of this rank among the node's ranks.
        local_ranks: number of ranks on the node.
    """

    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1


def make_device(precision: Precision, place: NodePlace) -> Device:
    """Return this rank's device for computation in `precision`.

    A rank that sees one GPU uses it, since schedulers may assign one GPU to each rank. A rank that sees several GPUs uses the one
    whose index is the rank's number on the node.

    Raises:
        BackendError: there is no device, it does not compute in `precision`, or `DEVICE_VARIABLE` names none. The message states
            the remedy.
    """
    named = os.environ.get(DEVICE_VARIABLE)
    if named is not None:
        return _named_device(named)
    device = _gpu(place)
    wanted = "float32" if precision == "tf32" else precision
    if wanted == "float64":
        raise BackendError(
            f"Backend cuda does not compute in float64 on {device.name}; set dtype to float32, or backend to numpy."
        )
    if wanted not in device.dtypes:
        major, minor = device.capability
        raise BackendError(
            f"{device.name} does not compute in {wanted}: its compute capability is {major}.{minor}, and bfloat16 needs "
            "8.0; set precision to float32."
        )
    return device


def missing(place: NodePlace) -> str | None:
    """Return the reason why no GPU can be used here, as a sentence; None if one can. `DEVICE_VARIABLE` is ignored."""
    try:
        _gpu(place)
    except BackendError as error:
        return str(error)
    return None


def machine_fault(name: str, precision: str) -> str | None:
    """Return the reason why this machine cannot compute with this backend and precision, as a sentence; None if it can.

    A device that `DEVICE_VARIABLE` names can compute in every precision.
    """
    if name in ("cuda", "auto") and DEVICE_VARIABLE in os.environ:
        return None
    no_gpu = missing(NodePlace()) if name in ("cuda", "auto") else None
    if no_gpu is not None and (name == "cuda" or precision == "tf32"):
        return f"The training needs a GPU, and none can be used here. {no_gpu}"
    if name == "onednn" or (precision == "bfloat16" and no_gpu is not None):
        try:
            kernels = _onednn()
            if precision == "bfloat16":
                _with_bfloat16(kernels)
        except BackendError as error:
            return f"The training cannot run here: {error}"
    return None


def cupy_is_installed() -> bool:
    """Return whether CuPy is installed, which suggests that the user expects a GPU to be used."""
    return importlib.util.find_spec("cupy") is not None


def _named_device(value: str) -> Device:
    """Return the device that `make_device(argument)` of the module named by `DEVICE_VARIABLE` returns.

    Raises:
        BackendError: the module does not exist, has no `make_device`, or rejects the argument.
    """
    name, _, argument = value.partition(":")
    try:
        make = importlib.import_module(name).make_device
    except (ImportError, AttributeError, ValueError) as error:
        raise BackendError(
            f"{DEVICE_VARIABLE} is {value!r}, which names no module with a function make_device ({error}); name one, such as "
            "hpctrain_testing.emulator, or unset the variable to use a GPU."
        ) from error
    try:
        device: Device = make(argument)
    except ValueError as error:
        raise BackendError(f"{DEVICE_VARIABLE} is {value!r}: {error}") from error
    return device


def _gpu(place: NodePlace) -> Device:
    if not cupy_is_installed():
        raise BackendError(
            "Backend cuda needs CuPy, which is not installed; install hpctrain[gpu13] for CUDA 13, or hpctrain[gpu12] for "
            f"CUDA 12, {_OTHERWISE}."
        )
    narrow(os.environ, place)
    from hpctrain.backend.cuda.cupy_device import CupyDevice, gpu_count

    try:
        count = gpu_count()
    except BackendError as error:
        raise BackendError(
            f"CUDA cannot be used here ({error}); if an NVIDIA driver for its version is missing, install one, {_OTHERWISE}."
        ) from error
    if not count:
        shown = repr(os.environ[_VISIBLE]) if _VISIBLE in os.environ else "not set"
        raise BackendError(
            f"CUDA finds no GPU for this process ({_VISIBLE} is {shown}); request one from the scheduler, for example by "
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
    """Restrict CUDA_VISIBLE_DEVICES to this rank's GPU if it lists several, for all threads and libraries of the process.

    Raises:
        BackendError: the variable lists several GPUs, but fewer than there are ranks on the node.
    """
    entries = [entry.strip() for entry in environ.get(_VISIBLE, "").split(",") if entry.strip()]
    if len(entries) > 1:
        environ[_VISIBLE] = entries[gpu_index(len(entries), place)]


def gpu_index(count: int, place: NodePlace) -> int:
    """Return the index of a rank's GPU among the `count` that it sees.

    Raises:
        BackendError: there are several GPUs, but fewer than there are ranks on the node.
    """
    if count == 1:
        return 0
    if place.local_ranks > count:
        raise BackendError(
            f"The {place.local_ranks} ranks of this node see only {count} GPUs; start at most {count} ranks per node, "
            f"{_OTHERWISE}."
        )
    return place.local_rank


_log = logging.getLogger(__name__)

NAMES = ("auto", "numpy", "onednn", "cuda")
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Backend:
    """A kernel set with its dtype and description.

    Attributes:
        name: name of the kernel set, never "auto".
        dtype: dtype of activations: "float32", "float64" or "bfloat16".
        description: description for users, such as "onednn, float32".
        versions: versions of this backend's libraries, recorded by a run in addition to the versions that all runs record.
    """

    name: str
    dtype: str
    kernels: KernelSet
    description: str
    versions: Mapping[str, str] = field(default_factory=dict)


def make_backend(
    name: str = "auto", dtype: str = "float32", precision: str = "float32", place: NodePlace | None = None
) -> Backend:
    """Return the backend of this name.

    For dtype "float32", "auto" selects a GPU if one can be used, otherwise oneDNN if its library loads, otherwise NumPy. It never
    selects NumPy for precision "bfloat16". For dtype "float64", it selects NumPy. The choice is logged.

    Args:
        dtype: dtype of parameters, and of activations at precision "float32": "float32" or "float64".
        precision: precision of products, for dtype "float32". "tf32" rounds their factors; "bfloat16" rounds all activations.
            "tf32" requires cuda. "bfloat16" with onednn requires a processor that multiplies bfloat16.
        place: position of this rank on its node, which selects its GPU; default: a single rank.

    Raises:
        BackendError: the name is unknown, the backend does not compute in the dtype or precision, or a library is missing.
    """
    place = place or NodePlace()
    _check(name, dtype, precision)
    if name == "auto":
        name = _choose(dtype, precision, place)
    if name == "cuda":
        return _cuda(dtype, precision, place)
    wanted = "bfloat16" if precision == "bfloat16" else dtype
    if name == "numpy":
        from hpctrain.backend.numpy.kernel_set import NumpyKernelSet

        kernels: KernelSet = NumpyKernelSet()
    else:
        kernels = _with_bfloat16(_onednn()) if wanted == "bfloat16" else _onednn()
    if wanted not in kernels.dtypes:
        raise BackendError(f"Backend {name} computes in {' or '.join(kernels.dtypes)}, not in {wanted}; set backend to numpy.")
    return Backend(name, wanted, kernels, f"{name}, {wanted}")


def _check(name: str, dtype: str, precision: str) -> None:
    if name not in NAMES:
        raise BackendError(f"There is no backend {name!r}; the backends are {', '.join(NAMES)}.")
    if dtype not in ("float32", "float64"):
        raise BackendError(f"No backend computes in {dtype}; set dtype to float32 or float64.")
    if precision not in PRECISIONS:
        raise BackendError(f"There is no precision {precision!r}; the precisions are {', '.join(PRECISIONS)}.")
    fault = precision_fault(name, dtype, precision)
    if fault is not None:
        raise BackendError(fault)


def precision_fault(name: str, dtype: str, precision: str) -> str | None:
    """Return the error message if the names of backend, dtype and precision are incompatible; None if they are compatible."""
    if precision == "float32":
        return None
    if dtype != "float32":
        return f"precision is {precision}, which requires dtype float32; for dtype {dtype}, set precision to float32."
    if precision == "tf32" and name not in ("cuda", "auto"):
        return "precision is tf32, which only backend cuda supports; set precision to float32, or backend to cuda."
    return None


def _choose(dtype: str, precision: str, place: NodePlace) -> str:
    if dtype != "float32":
        _log.info("Backend numpy: no other backend computes in %s.", dtype)
        return "numpy"
    no_gpu = missing(place)
    if no_gpu is None:
        _log.debug("Backend cuda.")
        return "cuda"
    if precision == "tf32":
        raise BackendError(f"precision is tf32, which only backend cuda supports; set it to float32, or use a GPU. {no_gpu}")
    # NumPy is never chosen for bfloat16, in which it is slower than in float32.
    reason = None if precision == "bfloat16" else _onednn_missing()
    name, remarks = ("onednn", []) if reason is None else ("numpy", [reason])
    if cupy_is_installed():
        remarks.append(no_gpu)
    if remarks:
        _log.info("Backend %s: %s", name, " ".join(remarks))
    else:
        _log.debug("Backend %s.", name)
    return name


def _onednn_missing() -> str | None:
    """Return the reason why oneDNN cannot be used, as a sentence; None if it can."""
    from hpctrain.backend.onednn.kernel_set import available

    return available()


def _onednn() -> OnednnKernelSet:
    from hpctrain.backend.onednn.kernel_set import OnednnKernelSet

    reason = _onednn_missing()
    if reason is not None:
        raise BackendError(f"Backend onednn cannot be used: {reason} Set backend to numpy, which runs everywhere.")
    return OnednnKernelSet()


def _with_bfloat16(kernels: OnednnKernelSet) -> OnednnKernelSet:
    """Return the kernel set, after checking that the processor multiplies bfloat16.

    Raises:
        BackendError: the processor does not multiply bfloat16.
    """
    if not kernels.multiplies_bfloat16:
        raise BackendError(
            "precision is bfloat16, which oneDNN cannot multiply on this processor: it needs the instructions AVX512_BF16 or "
            "AMX, and ONEDNN_MAX_CPU_ISA must not forbid them; set precision to float32, or backend to numpy for a slow "
            "reference."
        )
    return kernels


def _cuda(dtype: str, precision: str, place: NodePlace) -> Backend:
    from hpctrain.backend.cuda.kernel_set import CudaKernelSet
    from hpctrain.backend.cuda.runtime import CudaRuntime

    wanted: Precision = "float64" if dtype == "float64" else next(known for known in PRECISIONS if known == precision)
    device = make_device(wanted, place)
    runtime = CudaRuntime(device, device.stream("compute"), wanted)
    return Backend("cuda", runtime.dtype, CudaKernelSet(runtime), f"cuda on {device.name}, {wanted}", device.versions)
