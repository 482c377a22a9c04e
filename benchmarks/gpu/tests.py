"""Stage `tests` of a rehearsal: the tests of the backend in a GPU machine's versions of Python and of all packages."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from benchmarks.gpu.child import watch
from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.choice import DEVICE_VARIABLE

_TOP = Path(__file__).parents[2]
_ARGUMENTS = ("-q", "-m", "parallel[1] and not slow", "-r", "f", "tests/backend", "tests/benchmarks/gpu")


def run(settings: Settings, report: StageReport) -> None:
    """Run the tests of the backend and of these stages that are neither slow nor of several ranks."""
    if not settings.emulated:
        raise SkippedError("what the tests prove does not depend on the GPU; the rehearsal runs them")
    os.environ.pop(DEVICE_VARIABLE, None)  # each test chooses its device
    done = watch([sys.executable, "-m", "pytest", *_ARGUMENTS], cwd=_TOP)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    report.add("failed_tests", failed)
    report.check("the tests of the backend pass", done.returncode == 0, last)
    report.note(last)
