"""The texts of kernels: whole, by the rules, and under NVIDIA's compilers without warning and spill, within what GPUs have."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from hpctrain.backend.cuda import sources
from hpctrain.storage.atomic_write import write_text
from hpctrain_testing.emulator import kernels as build
from tests.support import nvrtc


def test_all_sources_are_listed() -> None:
    assert "elementwise" in sources.names()
    assert [f"{name}.cu" for name in sources.names()] == sorted(path.name for path in sources.FOLDER.glob("*.cu"))


@pytest.mark.parametrize("name", sources.names())
def test_no_header_of_ours_is_left_to_be_included(name: str) -> None:
    headers = {path.name for path in sources.FOLDER.glob("*.cuh")}
    assert not headers & set(re.findall(r'#include "(.*)"', sources.text(name)))
    assert sources.text(name).count("struct bf16 {") == 1


def test_a_header_is_put_in_once(tmp_path: Path) -> None:
    (tmp_path / "twice.cu").write_text('#include "common.cuh"\n#include "common.cuh"\n#include "elsewhere.h"\n')
    text = sources.text("twice", tmp_path)
    assert text.count("struct bf16 {") == 1
    assert '#include "elsewhere.h"' in text


#: what no source may hold, by the reason; common.cuh alone has the first two, for all
FORBIDDEN = {
    r"__shared__": "shared memory is declared by SHARED, which the emulated device fills with NaN",
    r"#include <": "compilers at run time have no standard headers",
    r"\batomic\w*\(": "sums have one order",
    r"__threadfence|cooperative_groups|\bvolatile\b": "blocks do not talk to each other",
    r"#pragma once": "a header becomes part of the main file, and compilers warn of it there",
    r"\bprintf\b|\bassert\b|\bmalloc\b|\bnew\b": "kernels neither print nor allocate",
    r"__launch_bounds__\((?!256\b|THREADS\b)": "blocks have 256 threads at most",
}


def broken_rules(text: str) -> list[str]:
    code = re.sub(r"//.*", "", text)
    return [reason for pattern, reason in FORBIDDEN.items() if re.search(pattern, code)]


@pytest.mark.parametrize("path", sorted(sources.FOLDER.glob("*.cu*")), ids=lambda path: path.name)
def test_sources_keep_the_rules_of_kernels(path: Path) -> None:
    allowed = list(FORBIDDEN.values())[:2] if path.name == "common.cuh" else []
    assert [reason for reason in broken_rules(path.read_text()) if reason not in allowed] == []


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("__shared__ float sums[32];", 1),
        ("#include <cstdint>", 1),
        ("atomicAdd(sum, 1.0f);", 1),
        ("__threadfence();", 1),
        ("__launch_bounds__(512) name", 1),
        ("__launch_bounds__(256, 4) name  // not atomicAdd(), no __shared__", 0),
    ],
)
def test_broken_rules_are_seen(line: str, broken: int) -> None:
    assert len(broken_rules(line)) == broken


@pytest.mark.parametrize("name", sources.names())
def test_every_line_is_named_as_in_its_file(name: str) -> None:
    files = {path.name: path.read_text().splitlines() for path in sources.FOLDER.glob("*.cu*")}
    file, number, seen = "", 0, 0
    for line in sources.text(name).splitlines():
        if mark := re.fullmatch(r'#line (\d+) "(.*)"', line):
            file, number = mark[2], int(mark[1])
        else:
            original = files[file][number - 1]
            assert line in (original, "" if original.startswith("#include") else original)
            number, seen = number + 1, seen + 1
    assert seen >= len(files[f"{name}.cu"]) + len(files["common.cuh"]) - 3


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
    """One compilation of all texts, which lie alone in a folder: no header of ours is next to them."""
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


@cache
def nvcc_version() -> str:
    assert NVCC is not None
    return subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=True).stdout


def nvcc_log(name: str, architecture: str, folder: Path) -> str:
    """Return the output of nvcc for a source, cached by content in the folder of the emulated device's kernels."""
    key = "\0".join((sources.text(name), architecture, *FLAGS, nvcc_version()))
    log = build._folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.log"
    if not log.exists():
        done = run_nvcc(folder, {name: sources.text(name)}, architecture)
        assert done.returncode == 0, done.stderr
        assert (folder / f"{name}.cubin").exists()
        write_text(log, done.stdout + done.stderr)
    return log.read_text()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.job
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_fits_a_gpu(architecture: str, tmp_path: Path) -> None:
    """Without warnings, spills, and more registers and shared memory than there are. The emulated device has all of them, too."""
    skip_without_nvcc(architecture)
    printed = "".join(nvcc_log(name, architecture, tmp_path) for name in sources.names())
    kernels = list(compiled(printed))
    assert len(kernels) == printed.count("Compiling entry function")
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
@pytest.mark.sample(2)
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
