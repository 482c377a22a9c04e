"""Faults planted into a copy of the project: gpu_check runs in it to its end, and its report and last lines name the fault."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

_TOP = Path(__file__).parents[3]


@dataclass(frozen=True)
class Fault:
    """stage: that fails. words: name the fault. arguments: of gpu_check. file: of the copy, in which `new` replaces `old`."""

    name: str
    stage: str
    words: tuple[str, ...]
    arguments: tuple[str, ...]
    file: str = ""
    old: str = ""
    new: str = ""


FAULTS = (
    Fault("no driver", "ladder", ("device: ",), ("--device", "cuda", "--only", "ladder", "build")),
    Fault(
        "a source that does not compile",
        "build",
        ("source pool: ", "nonsense"),
        ("--device", "emulated", "--only", "build"),
        "hpctrain/backend/cuda/pool.cu",
        "#include",
        "nonsense;\n#include",
    ),
    Fault(
        "a plan that fails",
        "build",
        ("plans of resnet20 2 float32: ", "no engine for it"),
        ("--device", "emulated", "--only", "build"),
        "hpctrain_testing/emulator/device.py",
        "    def convolution(self, key: ConvolutionKey) -> NumpyConvolution:\n",
        "    def convolution(self, key: ConvolutionKey) -> NumpyConvolution:\n        raise ValueError('no engine for it')\n",
    ),
    Fault(
        "a stage that hangs",
        "links",
        ("stopped after its limit", "waits_for_ever"),
        ("--device", "emulated", "--only", "links", "--limit", "11"),
        "benchmarks/gpu/links.py",
        "def run(settings: Settings, report: StageReport) -> None:\n",
        "def waits_for_ever():\n    import time\n    time.sleep(600)\n\n\n"
        "def run(settings: Settings, report: StageReport) -> None:\n    waits_for_ever()\n",
    ),
    Fault("pip that fails", "setup", ("'broken'", "pip cannot install"), ("--device", "emulated", "--only", "facts")),
    Fault(
        "a package that cannot be imported",
        "facts",
        ("ImportError: no such package", "hpctrain/core/errors.py"),
        ("--device", "emulated", "--only", "facts"),
        "hpctrain/core/errors.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\nraise ImportError('no such package')\n",
    ),
)


@pytest.mark.sample(2)
@pytest.mark.job
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_by_the_report_and_by_the_last_lines(fault: Fault, tmp_path: Path) -> None:
    copy, wheels = tmp_path / ".proj", tmp_path / "wheels"
    for folder in ("hpctrain", "hpctrain_testing", "benchmarks"):
        shutil.copytree(_TOP / folder, copy / folder, ignore=shutil.ignore_patterns("results"))
    wheels.mkdir()
    if fault.file:
        text = (copy / fault.file).read_text()
        assert fault.old in text
        (copy / fault.file).write_text(text.replace(fault.old, fault.new, 1))
    if fault.name.startswith("pip"):
        (wheels / "broken-1.0-py3-none-any.whl").write_text("no archive")
    out = "out" if fault.file else str(tmp_path / "elsewhere" / "out")  # of the folder that it is called in, or whole
    names = {"PYTHON": sys.executable, "WHEELS": str(wheels), "OUT": out, "CUDA_VISIBLE_DEVICES": ""}
    if fault.stage != "build":  # its folder of temporary files has the compiled kernels
        names["TMPDIR"] = str(tmp_path)
    command = ["bash", "benchmarks/gpu_check.sh", *fault.arguments]
    done = subprocess.run(command, env={**os.environ, **names}, capture_output=True, text=True, cwd=copy)
    assert done.returncode == 1, done.stdout + done.stderr
    contents = {content["stage"]: content for content in json.loads((copy / out / "gpu-check.json").read_text())}
    assert [name for name, content in contents.items() if content["status"] == "failed"] == [fault.stage]
    last = done.stdout[-10_000:].partition(f"==== {fault.stage}: ")[2]
    for word in fault.words:
        assert word in last
    if fault.stage == "ladder":
        assert contents["build"]["summary"] == "the ladder made no device"
    assert (copy / out / "gpu-check.log").exists()
    assert not list(tmp_path.glob("tmp.*")), "the temporary folder is left"
