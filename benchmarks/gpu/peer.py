"""Stage `peer`: PyTorch's training steps on the same GPU at the same batches, plain and compiled, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import watch
from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport

_PROGRAM = Path(__file__).parents[1] / "gpu_peer.py"
_SKIP_CODE = 77
#: (model, batches, mode of torch.compile or "" for none), the most informative first: the last ones are left out if the stage's
#: limit leaves no time for them. torch.compile takes about 40 s for each batch of ResNet-50.
RUNS: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("resnet50", (256, 32), ""),
    ("resnet50", (256, 32), "reduce-overhead"),
    ("resnet50", (256, 32), "default"),
    ("vgg16", (64,), ""),
    ("vgg16", (64,), "default"),
)
_RESERVE_SECONDS = 3.0  # of the stage's limit, to end the peer and to report


def run(settings: Settings, report: StageReport) -> None:
    """Time every variant. On the emulated device PyTorch's CPU takes one small step, to prove that the program runs."""
    end = time.monotonic() + settings.limit - _RESERVE_SECONDS
    runs: Sequence[tuple[str, tuple[int, ...], str]] = RUNS
    extra: tuple[str, ...] = ()
    if settings.emulated:
        runs, extra = (("resnet18", (2,), ""),), ("--device", "cpu", "--pixels", "32", "--repeats", "1", "--steps", "1")
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        report.add("runs", rows)
        name = name_of(row["model"], row["batch"], row["compiled"])
        report.check(f"torch {name}", "images_per_second" in row and row["loss"] == row["loss"], row.get("failure", ""))
        if "images_per_second" in row:
            report.note(f"{name}: {row['images_per_second']:.0f}/s")

    for model, batches, mode in runs:
        left_out += [name_of(model, batch, mode) for batch in time_peer(model, batches, mode, end, add, extra)]
    if left_out:
        report.add("left_out", left_out)
        report.note(f"no time for {', '.join(left_out)}")


def name_of(model: str, batch: int, mode: str) -> str:
    """Return the name of a variant in reports."""
    return f"{model} {batch}{f' compiled ({mode})' if mode else ''}"


def time_peer(
    model: str,
    batches: Sequence[int],
    mode: str,
    end: float,
    add: Callable[[dict[str, Any]], None],
    extra: Sequence[str] = (),
) -> Sequence[int]:
    """Call `add` with the figures of each batch as soon as the peer prints them. Return the batches that it had no time for.

    Args:
        end: value of `time.monotonic()` at which the process is killed. add: takes a row of figures. extra: arguments.

    Raises:
        SkippedError: this machine has no PyTorch, or PyTorch finds no GPU.
    """
    left = list(batches)

    def on_line(line: str) -> None:
        if line.startswith('{"model"'):  # a warning of another process may follow in the same line
            left.pop(0)
            add(json.JSONDecoder().raw_decode(line)[0])

    command = [sys.executable, str(_PROGRAM), "--model", model, "--batch", *map(str, batches), *extra]
    try:
        seconds = max(0.0, end - time.monotonic())
        done = watch([*command, *(["--compile", mode] if mode else [])], seconds=seconds, on_line=on_line)
    except subprocess.TimeoutExpired:
        return left
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode == _SKIP_CODE:
        raise SkippedError(lines[-1])
    for batch in left:
        add({"model": model, "compiled": mode, "failure": lines[-1], "batch": batch})
    return ()
