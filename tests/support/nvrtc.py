"""NVIDIA's runtime compiler, which is what compiles the kernels on a machine with a GPU: of a wheel or of the system, if any."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from hpctrain.backend.cuda import sources

_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")


@cache
def load() -> ctypes.CDLL | None:
    """The library; None where there is none."""
    for folder in (Path(packages) / name for packages in sys.path for name in _FOLDERS):
        # The library opens its builtins by their bare name, which works where they are open already.
        for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
            libraries = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in folder.glob(name)]
        if libraries:
            return libraries[0]
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compile_source(library: ctypes.CDLL, text: str, architecture: str) -> tuple[int, str]:
    """The size of the binary (0 where there is none) and all that the compiler says."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert not library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    options = [option.encode() for option in (*sources.OPTIONS, f"-arch={architecture}")]
    flags = (ctypes.c_char_p * len(options))(*options)
    library.nvrtcCompileProgram(program, len(flags), flags)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    binary = 0 if library.nvrtcGetCUBINSize(program, ctypes.byref(size)) else size.value
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary, log.value.decode().strip()
