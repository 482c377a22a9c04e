"""The stages of `gpu_check`, each in a process of its own with a time limit, and the table at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import NotBuiltYetError, Settings, SkippedError
from benchmarks.gpu.stage_report import FAILED, NOT_BUILT, RUNNING, SKIPPED, StageReport

_GRACE_SECONDS = 5.0
_WIDTH = 80
_LINE, _MOST_CHECKS, _LOG_LINES = 400, 10, 8  # of what is printed of failures
_LOG_BYTES = 1 << 20  # of a stage's output, its end, in what is published


@dataclass(frozen=True)
class Stage:
    """name: also of its module below benchmarks.gpu, whose `run(settings, report)` is the stage. limit: seconds on a GPU."""

    name: str
    limit: float

    def function(self) -> Callable[[Settings, StageReport], None]:
        """The stage itself."""
        function: Callable[[Settings, StageReport], None] = import_module(f"benchmarks.gpu.{self.name}").run
        return function


STAGES = (
    Stage("ladder", 40),
    Stage("facts", 30),
    Stage("build", 60),
    Stage("kernels", 80),
    Stage("training", 80),
    Stage("speed", 90),
    Stage("peer", 200),
    Stage("links", 25),
    Stage("ranks", 90),
    Stage("pixels", 30),
    Stage("sanitizer", 70),
    Stage("tests", 60),
)
EMULATED_FACTOR = 10.0  # all limits on the emulated device


def run_here(stage: Stage, settings: Settings) -> None:
    """Run a stage in this process; its report says how it ended."""
    report = StageReport(settings.out / f"{stage.name}.json", stage.name, settings.device)
    try:
        stage.function()(settings, report)
    except SkippedError as error:
        report.finish(SKIPPED, str(error))
    except NotBuiltYetError as error:
        report.finish(NOT_BUILT, str(error))
    except Exception as error:
        report.finish(FAILED, f"{type(error).__name__}: {error}")
        raise
    else:
        report.finish()


def run_apart(stage: Stage, settings: Settings, limit: float) -> dict[str, Any]:
    """Run a stage in a process of its own for at most `limit` seconds; gives its JSON, which says how it ended."""
    path = settings.out / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--run-here", stage.name, *settings.arguments()]
    begin = time.monotonic()
    with (settings.out / f"{stage.name}.log").open("w") as log:
        ended = _run(command, settings, limit, log)
    content: dict[str, Any] = {"stage": stage.name, "device": settings.device, "status": RUNNING, "summary": "", "checks": []}
    with contextlib.suppress(OSError, json.JSONDecodeError):
        content = json.loads(path.read_text())
    if content["status"] == RUNNING:
        content["status"] = FAILED
        content["summary"] = "; ".join(filter(None, (ended, content["summary"])))
    content["seconds"] = round(time.monotonic() - begin, 1)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return content


def _run(command: Sequence[str], settings: Settings, limit: float, log: Any) -> str:
    """How the process ended, in words. All processes that it has started end with it."""
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=settings.environment(),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"stopped after its limit of {limit:.0f} s"
    return f"ended with code {code}, see {Path(log.name).name}"


def _end(process: subprocess.Popen) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def run_all(stages: Sequence[Stage], settings: Settings, total: float, after: Callable[[list[dict[str, Any]]], None]) -> None:
    """All stages in turn, whatever the ones before did; `after` is called with the JSON of all so far.

    total: seconds for all; stages that it does not reach are skipped.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    end, contents = time.monotonic() + total, list[dict[str, Any]]()
    for stage in stages:
        left = end - time.monotonic() - _GRACE_SECONDS
        limit = min(left, stage.limit * (EMULATED_FACTOR if settings.emulated else 1.0))
        reason = (
            "the ladder made no device" if _no_device(contents) else f"no time was left of {total:.0f} s" if limit < 1.0 else ""
        )
        if not reason:
            contents.append(run_apart(stage, settings, limit))
        else:
            report = StageReport(settings.out / f"{stage.name}.json", stage.name, settings.device)
            report.finish(SKIPPED, reason)
            contents.append(report.content)
        after(contents)


def _skipped(stage: Stage, settings: Settings, reason: str) -> dict[str, Any]:
    report = StageReport(settings.out / f"{stage.name}.json", stage.name, settings.device)
    report.finish(SKIPPED, reason)
    return report.content


def _no_device(contents: Sequence[dict[str, Any]]) -> bool:
    return any(not check["passed"] for content in contents[:1] for check in content["checks"] if check["name"] == "device")


def table(contents: Sequence[dict[str, Any]]) -> str:
    """A line or more for each stage, 80 columns."""
    lines = [f"{'stage':<10}{'status':<15}{'s':>4}  {'checks':>7}  "]
    for content in contents:
        passed = sum(check["passed"] for check in content["checks"])
        checks = f"{passed}/{len(content['checks'])}"
        head = f"{content['stage']:<10}{content['status']:<15}{content['seconds']:>4.0f}  {checks:>7}  "
        lines += textwrap.wrap(head + content["summary"], _WIDTH, subsequent_indent=" " * 12) or [head]
    return "\n".join(lines)


def failures(contents: Sequence[dict[str, Any]], out: Path) -> str:
    """Return every failed check with its text, and the last lines of the log of each failed stage: what is to be mended."""
    lines = []
    for content in contents:
        if content["status"] != FAILED:
            continue
        lines.append(f"==== {content['stage']}: {content['summary']}"[:_LINE])
        failed = [check for check in content["checks"] if not check["passed"]]
        lines += [f"  {check['name']}: {check['text']}"[:_LINE] for check in failed[:_MOST_CHECKS]]
        log = out / f"{content['stage']}.log"
        tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
        lines += [f"  | {line}"[:_LINE] for line in tail]
    return "\n".join(lines)


def publish(folder: Path, out: Path, contents: Sequence[dict[str, Any]]) -> None:
    """All results in one file gpu-check.json and all output in one file gpu-check.log, below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.json").write_text(json.dumps(list(contents), indent=1) + "\n")
    logs = (out / f"{content['stage']}.log" for content in contents)
    texts = (f"==== {path.name}\n{path.read_text(errors='replace')[-_LOG_BYTES:]}\n" for path in logs if path.exists())
    (folder / "gpu-check.log").write_text("".join(texts))
