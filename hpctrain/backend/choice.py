"""The choice of what computes: a kernel set, a dtype and a precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.backend.cuda import choose
from hpctrain.backend.cuda.choose import NodePlace
from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.operators import KernelSet
from hpctrain.core.errors import BackendError
from hpctrain.log import get_logger

_log = get_logger(__name__)

NAMES = ("auto", "numpy", "onednn", "cuda")
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Backend:
    """A kernel set and what it computes in.

    Attributes:
        name: of the kernel set, never "auto".
        dtype: of activations: "float32", "float64" or "bfloat16".
        kernels: makes the operators and allocates their memory.
        description: what computes, in words for people.
        versions: of libraries that a run records beside those of all runs.
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
        dtype: "float32" or "float64": of parameters, and of activations at precision "float32".
        precision: of the products, beside dtype float32: "tf32" rounds their factors, "bfloat16" all activations. Backend cuda.
        place: of this rank on its node, to find its GPU; alone by default.

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
    """The sentence that refuses a precision beside a backend and a dtype; None where they fit, as far as names tell."""
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
    no_gpu = choose.missing(place)
    if no_gpu is None:
        _log.info("Backend cuda.")
        return "cuda"
    if precision != "float32":
        raise BackendError(f"precision is {precision}, in which only backend cuda computes; others do with float32. {no_gpu}")
    reason = _onednn_missing()
    name, remarks = ("onednn", []) if reason is None else ("numpy", [reason])
    if choose.cupy_is_installed():
        remarks.append(no_gpu)
    _log.info("Backend %s%s", name, ": " + " ".join(remarks) if remarks else ".")
    return name


def _onednn_missing() -> str | None:
    """Why oneDNN cannot be used; None where it can."""
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
    from hpctrain.backend.kernels.cuda.runtime import CudaRuntime

    wanted: Precision = "float64" if dtype == "float64" else next(known for known in PRECISIONS if known == precision)
    device = choose.make_device(wanted, place)
    runtime = CudaRuntime(device, device.stream("compute"), wanted)
    return Backend("cuda", runtime.dtype, CudaKernelSet(runtime), f"cuda on {device.name}, {wanted}", device.versions)
