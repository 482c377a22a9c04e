"""The CUDA sources under NVIDIA's compilers, which need no GPU: no warning, nothing spilled, shared memory that every GPU has."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.emulator import build
from tests.support import nvrtc

NVCC = shutil.which("nvcc")
NM = shutil.which("nm")
#: Turing, Ampere, Hopper, Blackwell
ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100"]
SHARED_BYTES = 48 << 10
REGISTERS = 1 << 16  # of a multiprocessor, which a block of THREADS has to fit
THREADS = 256

FLAGS = ("-std=c++17", "-cubin", "-Xptxas", "-v", "--Werror", "all-warnings")
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"[^\n]*\n[^\n]*Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Compiled:
    """The assembler's account of a kernel."""

    name: str
    spilled_bytes: int
    registers: int
    shared_bytes: int


def compiled(log: str) -> Iterator[Compiled]:
    """The kernels of a log of `nvcc -Xptxas -v`."""
    for match in ENTRY.finditer(log):
        spilled = int(match["stores"]) + int(match["loads"])
        yield Compiled(match["name"], spilled, int(match["registers"]), int(match["shared"] or 0))


def run_nvcc(folder: Path, texts: dict[str, str], architecture: str) -> subprocess.CompletedProcess[str]:
    """One compilation of all texts, which lie alone in a folder: no header of ours is beside them."""
    for name, text in texts.items():
        (folder / f"{name}.cu").write_text(text)
    assert NVCC is not None
    command = [NVCC, *FLAGS, f"-arch={architecture}", *(f"{name}.cu" for name in texts)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def skip_without_nvcc(architecture: str) -> None:
    if NVCC is None:
        pytest.skip("there is no nvcc to compile the kernels for a GPU")
    known = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if architecture not in known:
        pytest.skip(f"this nvcc compiles for {', '.join(known)}, not for {architecture}")


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_fits_a_gpu(architecture: str, tmp_path: Path) -> None:
    """Without warnings, spills, and more registers and shared memory than there are. The emulated device has all of them, too."""
    skip_without_nvcc(architecture)
    done = run_nvcc(tmp_path, {name: sources.text(name) for name in sources.names()}, architecture)
    assert done.returncode == 0, done.stderr
    kernels = list(compiled(done.stdout + done.stderr))
    assert len(kernels) == (done.stdout + done.stderr).count("Compiling entry function")
    assert {path.stem for path in tmp_path.glob("*.cubin")} == set(sources.names())
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
    assert [kernel for kernel in kernels if kernel.shared_bytes > SHARED_BYTES] == []
    assert [kernel for kernel in kernels if kernel.registers * THREADS > REGISTERS] == []
    assert {kernel.name for kernel in kernels} == on_the_emulated_device()


def on_the_emulated_device() -> set[str]:
    """Names of all kernels that tests can run, but those of float64, which GPUs are not given."""
    if not build.compiler() or not NM:
        pytest.skip("all kernels fit, but there is no g++ to say which of them the emulated device has")
    names: set[str] = set()
    for name in sources.names():
        symbols = subprocess.run([NM, "-D", build.library(name)._name], capture_output=True, text=True, check=True).stdout
        names |= set(re.findall(r" T launch_(\w+)$", symbols, re.MULTILINE))
    return {name for name in names if "f64" not in name.split("_")}


PLANTED = {
    "warning": 'extern "C" __global__ void kernel(float* x) { int unused; *x = 1; }',
    "spill": """
extern "C" __global__ void __launch_bounds__(256, 8) kernel(float* x) {
  float kept[64];
#pragma unroll
  for (int i = 0; i < 64; i++) kept[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i++) x[(63 - i) * 32 + threadIdx.x] = kept[i] * kept[63 - i];
}""",
    "shared": """
extern "C" __global__ void kernel(float* x) {
  __shared__ float all[3000];
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = all[threadIdx.x ^ 1];
}""",
}


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_planted_faults_are_seen(fault: str, tmp_path: Path) -> None:
    """So that the test above can fail: by what the compiler says, in the words of the compiler that is here."""
    skip_without_nvcc("sm_90")
    done = run_nvcc(tmp_path, {fault: PLANTED[fault]}, "sm_90")
    kernels = list(compiled(done.stdout + done.stderr))
    assert (done.returncode != 0) == (fault == "warning"), done.stderr
    assert [kernel.spilled_bytes > 0 for kernel in kernels] == ([] if fault == "warning" else [fault == "spill"])
    assert [kernel.shared_bytes for kernel in kernels] == {"warning": [], "spill": [0], "shared": [12000]}[fault]


@pytest.mark.slow
@pytest.mark.parametrize("name", sources.names())
def test_the_runtime_compiler_takes_the_text(name: str) -> None:
    """It has no standard headers and reads no files, on a GPU's machine as here."""
    library = nvrtc.load()
    if library is None:
        pytest.skip("there is no NVRTC (package nvidia-cuda-nvrtc) to compile the kernels as a GPU's machine does")
    for architecture in ARCHITECTURES:
        size, log = nvrtc.compile_source(library, sources.text(name), architecture)
        assert size > 0, log
        assert log == ""
