"""`hpctrain --version`: what would run here. Loads MPI and the kernels, and starts neither."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from hpctrain.core.errors import MissingLibraryError
from hpctrain.version import __version__

_PACKAGES = ("numpy", "mpi4py", "h5py", "cupy-cuda12x", "cupy-cuda13x")


def versions() -> str:
    """The versions of hpctrain and its packages, the MPI library and the kernel sets, in four lines."""
    packages = [f"{name} {number}" for name in _PACKAGES if (number := _installed(name))]
    return "\n".join(
        [
            f"hpctrain {__version__}",
            f"Python {platform.python_version()}, {', '.join(packages)}",
            f"MPI: {_mpi()}",
            f"kernels: {_kernels()}",
        ]
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _mpi() -> str:
    from hpctrain.comm import mpi

    try:
        return mpi.library()
    except MissingLibraryError as error:
        return f"none. {error}"


def _kernels() -> str:
    from hpctrain.backend.onednn import binding
    from hpctrain.backend.onednn.kernel_set import available

    reason = available()
    if reason is not None:
        return f"numpy. oneDNN cannot be used: {reason}"
    number = binding.version(binding.load())
    return f"onednn {number.major}.{number.minor}.{number.patch}, numpy"
