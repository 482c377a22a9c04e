"""Stage `sanitizer`: compute-sanitizer watches all kernels of our own: accesses out of bounds, then races in shared memory."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

from benchmarks.gpu.child import watch
from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport

_SANITIZER = "compute-sanitizer"
_ERROR_CODE = 86
TOOLS = ("memcheck", "racecheck")


def run(settings: Settings, report: StageReport) -> None:
    """Run the program without a sanitizer, which shows whether it fails by itself, then under each tool."""
    program = [sys.executable, "-m", "benchmarks.gpu.small_cases", *settings.arguments()]
    check_program("alone", program, report)
    if settings.emulated:
        raise SkippedError("the emulated device has guard pages and random orders instead")
    if shutil.which(_SANITIZER) is None:
        raise SkippedError(f"{_SANITIZER} is not here")
    for tool in TOOLS:
        # Libraries handle errors of their own calls: a call that fails is no fault of a kernel.
        options = ["--tool", tool, "--error-exitcode", str(_ERROR_CODE), "--print-limit", "20", "--report-api-errors", "no"]
        check_program(tool, [_SANITIZER, *options, *program], report)


def check_program(name: str, command: Sequence[str], report: StageReport) -> None:
    """Check that a program ends with code 0; if not, the check has the last 500 characters of its output."""
    print(f"---- {name}", flush=True)
    done = watch(command)
    summary = re.findall(r"ERROR SUMMARY.*|RACECHECK SUMMARY.*|^\d+ cases$", done.stdout, re.MULTILINE)
    text = "; ".join(summary) if done.returncode == 0 else f"code {done.returncode}: {done.stdout.strip()[-500:]}"
    report.check(f"small cases, {name}", done.returncode == 0, text)
    report.note(f"{name}: {summary[-1] if summary else f'code {done.returncode}'}")
