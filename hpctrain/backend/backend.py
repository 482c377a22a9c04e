"""The choice of what computes: a kernel set and a dtype."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.errors import BackendError
from hpctrain.log import get_logger

_log = get_logger(__name__)

NAMES = ("auto", "numpy", "onednn")


@dataclass(frozen=True)
class Backend:
    """A kernel set and the dtype of everything that it computes.

    Attributes:
        name: of the kernel set, never "auto".
        dtype: "float32" or "float64".
        kernels: makes the operators and allocates their memory.
    """

    name: str
    dtype: str
    kernels: KernelSet


def make_backend(name: str = "auto", dtype: str = "float32") -> Backend:
    """The backend of that name; "auto" takes oneDNN for float32 where its library loads, else NumPy, and logs which.

    Raises:
        BackendError: an unknown name, a dtype that the backend cannot compute in, or a library that is not there.
    """
    if name not in NAMES:
        raise BackendError(f"There is no backend {name!r}; the backends are {', '.join(NAMES)}.")
    if dtype not in ("float32", "float64"):
        raise BackendError(f"No backend computes in {dtype}; the dtypes are float32 and float64.")
    if name == "auto":
        name = _choose(dtype)
    kernels = _numpy() if name == "numpy" else _onednn()
    if dtype not in kernels.dtypes:
        raise BackendError(
            f"The {name} backend computes in {' or '.join(kernels.dtypes)}, not in {dtype}; backend numpy computes in {dtype}."
        )
    return Backend(name, dtype, kernels)


def _choose(dtype: str) -> str:
    if dtype != "float32":
        _log.info("Backend numpy: the only one that computes in %s.", dtype)
        return "numpy"
    reason = _onednn_missing()
    if reason is None:
        _log.info("Backend onednn.")
        return "onednn"
    _log.info("Backend numpy: %s", reason)
    return "numpy"


def _onednn_missing() -> str | None:
    """Why oneDNN cannot be used; None where it can."""
    from hpctrain.backend.kernels.onednn.kernel_set import available

    return available()


def _numpy() -> KernelSet:
    from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet

    return NumpyKernelSet()


def _onednn() -> KernelSet:
    from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet

    reason = _onednn_missing()
    if reason is not None:
        raise BackendError(f"Backend onednn cannot be used: {reason} Backend numpy works everywhere.")
    return OnednnKernelSet()
