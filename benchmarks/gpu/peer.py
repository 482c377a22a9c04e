"""A stage: PyTorch's training steps on the same GPU at the same batches, plain and compiled, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport

_PROGRAM = Path(__file__).parents[1] / "gpu_peer.py"
_SKIP_CODE = 77
#: (model, batches, mode of torch.compile), the most telling first: the stage's limit may cut the last ones off
RUNS: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("resnet50", (256, 32), ""),
    ("resnet50", (256, 32), "default"),
    ("resnet50", (32, 256), "reduce-overhead"),
    ("vgg16", (64,), ""),
    ("vgg16", (64,), "default"),
)


def run(settings: Settings, report: StageReport) -> None:
    """Time every variant. On the emulated device PyTorch's CPU takes one small step, to prove that the program runs."""
    runs: Sequence[tuple[str, tuple[int, ...], str]] = RUNS
    extra: tuple[str, ...] = ()
    if settings.emulated:
        runs, extra = (("resnet20", (2,), ""),), ("--device", "cpu", "--pixels", "32", "--repeats", "1", "--steps", "1")
    rows: list[dict[str, Any]] = []
    for model, batches, compiled in runs:
        rows += time_peer(model, batches, compiled, extra)
        report.add("runs", rows)
        for row in rows[-len(batches) :]:
            name = f"{row['model']} {row['batch']}{f' compiled ({compiled})' if compiled else ''}"
            report.check(f"torch {name}", "images_per_second" in row and row["loss"] == row["loss"], row.get("failure", ""))
            if "images_per_second" in row:
                report.note(f"{name}: {row['images_per_second']:.0f}/s")


def time_peer(model: str, batches: Sequence[int], compiled: str, extra: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All that the peer's process says of each batch.

    Raises:
        SkippedError: PyTorch or its GPU is not here.
    """
    command = [sys.executable, str(_PROGRAM), "--model", model, "--batch", *map(str, batches), *extra]
    done = subprocess.run([*command, *(["--compile", compiled] if compiled else [])], capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode == _SKIP_CODE:
        raise SkippedError(done.stdout.strip())
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    facts = {"model": model, "compiled": compiled, "failure": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return rows + [{**facts, "batch": batch} for batch in batches[len(rows) :]]
