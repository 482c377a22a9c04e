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
_LINE, _MOST_CHECKS, _LOG_LINES = 400, 10, 12  # printed of a failed stage: characters of a line, checks, last lines of the log
_CHARACTERS = 10_000  # printed of all failed stages
_LOG_BYTES = 1 << 20  # of the published log, which has the end of each stage's output


@dataclass(frozen=True)
class Stage:
    """One stage: `run(settings, report)` of the module `name` in benchmarks.gpu.

    limit: most seconds on a GPU. rehearsal: most seconds on the emulated device.
    """

    name: str
    limit: float
    rehearsal: float = 60

    def function(self) -> Callable[[Settings, StageReport], None]:
        """Import the stage's module and return its function."""
        function: Callable[[Settings, StageReport], None] = import_module(f"benchmarks.gpu.{self.name}").run
        return function


#: Limits are at least twice the seconds of an H100 (benchmarks/results/gpu/h100.json); `peer` has what they leave of 9 minutes.
STAGES = (
    Stage("ladder", 30, rehearsal=120),  # compiles all sources
    Stage("facts", 10),
    Stage("build", 20),
    Stage("kernels", 35),
    Stage("training", 30, rehearsal=90),
    Stage("speed", 45),
    Stage("peer", 255),
    Stage("links", 10),
    Stage("ranks", 60, rehearsal=120),
    Stage("pixels", 15),
    Stage("sanitizer", 15),
    Stage("tests", 5, rehearsal=400),
)


def run_here(stage: Stage, settings: Settings) -> None:
    """Run a stage in this process. Its report has the status with which it ended."""
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
    """Run a stage in a process of its own for at most `limit` seconds. Return its JSON with the status."""
    path = settings.out / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--run-here", stage.name, *settings.arguments()]
    command += ["--limit", f"{limit:.1f}"]
    begin = time.monotonic()
    with (settings.out / f"{stage.name}.log").open("w") as log:
        code = _run(command, settings, limit, log)
    ended = f"stopped after its limit of {limit:.0f} s" if code is None else f"ended with code {code}, see {stage.name}.log"
    content: dict[str, Any] = {"stage": stage.name, "device": settings.device, "status": RUNNING, "summary": "", "checks": []}
    with contextlib.suppress(OSError, json.JSONDecodeError):
        content = json.loads(path.read_text())
    if content["status"] == RUNNING or (code != 0 and content["status"] != FAILED):  # or it died after its report
        content["status"] = FAILED
        content["summary"] = "; ".join(filter(None, (ended, content["summary"])))
    content["seconds"] = round(time.monotonic() - begin, 1)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return content


def _run(command: Sequence[str], settings: Settings, limit: float, log: Any) -> int | None:
    """Return the process's exit code; None if its limit has ended it, and all processes that it had started with it."""
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=settings.environment(),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return None


def _end(process: subprocess.Popen) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def run_all(stages: Sequence[Stage], settings: Settings, total: float, after: Callable[[list[dict[str, Any]]], None]) -> None:
    """Run all stages in turn, also after failures. Skip the rest if the ladder makes no device.

    Args:
        total: seconds for all; stages that have none left are skipped. after: takes the JSON of all so far after each stage.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    end, contents = time.monotonic() + total, list[dict[str, Any]]()
    for stage in stages:
        left = end - time.monotonic() - _GRACE_SECONDS
        limit = min(left, stage.rehearsal if settings.emulated else stage.limit)
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


def setup_failure(settings: Settings, text: str) -> dict[str, Any]:
    """Return the JSON of a failed stage "setup". text: what could not be installed."""
    report = StageReport(settings.out / "setup.json", "setup", settings.device)
    report.check("all that was carried is installed", False, text)
    report.finish()
    return report.content


def _no_device(contents: Sequence[dict[str, Any]]) -> bool:
    """Return whether the ladder ran and made no device. One that cannot be imported has no checks and shows nothing."""
    checks = [check for content in contents if content["stage"] == "ladder" for check in content["checks"]]
    return bool(checks) and not any(check["name"] == "device" and check["passed"] for check in checks)


def table(contents: Sequence[dict[str, Any]]) -> str:
    """Return one or more lines for each stage, at most 80 columns wide."""
    lines = [f"{'stage':<10}{'status':<15}{'s':>4}  {'checks':>7}  "]
    for content in contents:
        passed = sum(check["passed"] for check in content["checks"])
        checks = f"{passed}/{len(content['checks'])}"
        head = f"{content['stage']:<10}{content['status']:<15}{content['seconds']:>4.0f}  {checks:>7}  "
        lines += textwrap.wrap(head + content["summary"], _WIDTH, subsequent_indent=" " * 12) or [head]
    return "\n".join(lines)


def failures(contents: Sequence[dict[str, Any]], out: Path) -> str:
    """Return the failed checks of each failed stage and the last lines of its log, in 10,000 characters at most."""
    failed = [content for content in contents if content["status"] == FAILED]
    return "\n".join(_failure(content, out / f"{content['stage']}.log", _CHARACTERS // len(failed) - 1) for content in failed)


def _failure(content: dict[str, Any], log: Path, characters: int) -> str:
    """Return the failed checks, and the end of the log in the half of `characters`, or more, that they leave."""
    failed = [check for check in content["checks"] if not check["passed"]]
    lines = [f"==== {content['stage']}: {content['summary']}"[:_LINE]]
    lines += [f"  {check['name']}: {check['text']}"[:_LINE] for check in failed[:_MOST_CHECKS]]
    tail = "".join(f"\n  | {line}"[:_LINE] for line in _end_of(log, 1 << 16).decode(errors="replace").splitlines()[-_LOG_LINES:])
    head = "\n".join(lines)
    head = head[: max(characters // 2, characters - len(tail))]
    return head + tail[max(0, len(tail) - (characters - len(head))) :]


def _end_of(path: Path, size_bytes: int) -> bytes:
    """Return the last bytes of a file; none where it is missing."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size_bytes))
        return file.read()


def publish(folder: Path, out: Path, contents: Sequence[dict[str, Any]]) -> None:
    """Write all results to one file gpu-check.json and the end of all output, 1 MiB at most, to gpu-check.log, below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.json").write_text(json.dumps(list(contents), indent=1) + "\n")
    heads = [f"==== {content['stage']}.log\n".encode() for content in contents]
    share = (_LOG_BYTES - sum(map(len, heads))) // max(1, len(contents)) - 1
    logs = (_end_of(out / f"{content['stage']}.log", share) for content in contents)
    (folder / "gpu-check.log").write_bytes(b"".join(head + log + b"\n" for head, log in zip(heads, logs, strict=True)))
