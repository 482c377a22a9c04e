"""The time that checkpoints take from training: ResNet-50 in float32 with momentum, on a disk that is made slow.

    python -m benchmarks.checkpoint                      # without checkpoints, synchronous, asynchronous; some minutes
    python -m benchmarks.checkpoint --ranks 2 --layout sharded
    python -m benchmarks.checkpoint --report             # Markdown of the file of results; runs nothing

Every write sleeps until its bytes would be through at the given rate. A step's time is from its begin to the next one's, so that
it has all that a checkpoint delays; `save` is the part in which the program waits: drain, copy, and, where it is synchronous, the
write.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from hpctrain.bench.interleaved import machine_facts
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import run_job

OUT = Path(__file__).resolve().parent / "results" / "checkpoint.json"
_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "imagenet-resnet50.yaml"
MODES: dict[str, tuple[str, ...]] = {
    "none": ("checkpoint.every_epochs=0",),
    "synchronous": ("checkpoint.asynchronous=false",),
    "asynchronous": ("checkpoint.asynchronous=true",),
}
_FIRST_STEPS = 3  # that compile and fill caches

#: the program, with slow writes, and with the times of rank 0 in a file
_PROGRAM = """
import json, os, runpy, sys, time
from hpctrain.run.checkpoints import RunCheckpoints
from hpctrain.training.replica import Replica
from hpctrain.training.step import TrainingStep
rate, out = float(os.environ["BYTES_PER_SECOND"]), os.environ["TIMES"]
times = {"begins": [], "saves": [], "checks": [], "step_of_save": []}
write, run, save, alike = os.pwrite, TrainingStep.run, RunCheckpoints.save, Replica.require_alike
def slow(descriptor, data, at):
    begin = time.monotonic()
    count = write(descriptor, data, at)
    time.sleep(max(0.0, count / rate - (time.monotonic() - begin)))
    return count
def timed_run(self, *arguments):
    times["begins"].append(time.perf_counter())
    return run(self, *arguments)
def timed_save(self, position):
    begin = time.perf_counter()
    save(self, position)
    times["saves"].append(time.perf_counter() - begin)
    times["step_of_save"].append(position.global_step)
def timed_check(self, **options):
    begin = time.perf_counter()
    alike(self, **options)
    times["checks"].append(time.perf_counter() - begin)
os.pwrite, TrainingStep.run, RunCheckpoints.save, Replica.require_alike = slow, timed_run, timed_save, timed_check
try:
    runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
finally:
    if int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0) == 0:
        with open(out, "w") as file:
            json.dump(times, file)
"""


def run(mode: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """One training; times of rank 0."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(_PROGRAM)
        overrides = [
            "data={train: synthetic}",
            f"data.synthetic.height={chosen.size}",
            f"data.synthetic.width={chosen.size}",
            "backend=auto",
            f"batch={chosen.batch}",
            "grid={rows: 1}",
            "averager=overlap",
            f"output={folder}",
            "evaluate.every_epochs=0",
            f"checkpoint.layout={chosen.layout}",
            f"checkpoint.every_steps={0 if mode == 'none' else chosen.every}",
            *MODES[mode],
        ]
        steps = ["--steps", str(chosen.steps), "--progress", "none"]
        environment = {"BYTES_PER_SECOND": str(chosen.rate * 1e6), "TIMES": str(folder / "times.json")}
        arguments = ["program.py", "train", str(_CONFIG), *overrides, *steps]
        outcome = run_job(chosen.ranks, arguments, cwd=folder, env=environment, timeout_seconds=3600)
        if outcome.code:
            raise SystemExit(outcome.output)
        times: dict[str, Any] = json.loads((folder / "times.json").read_text())
    return times


def facts(times: dict[str, Any]) -> dict[str, float]:
    """Median and longest step, and the waits for checkpoints but the last one, which ends the run."""
    begins, saves = times["begins"], times["saves"][:-1]
    steps = [after - before for before, after in zip(begins[_FIRST_STEPS:-1], begins[_FIRST_STEPS + 1 :], strict=True)]
    return {
        "median_step": statistics.median(steps),
        "longest_step": max(steps),
        "mean_step": statistics.mean(steps),
        "median_save": statistics.median(saves) if saves else 0.0,
        "longest_save": max(saves, default=0.0),
    }


def markdown(results: dict[str, Any]) -> str:
    """A table of the modes."""
    lines = [
        f"{results['job']}",
        "",
        "| checkpoints | median step, s | mean step, s | longest step, s | longest wait in a save, s |",
        "|---|---|---|---|---|",
    ]
    for mode, times in results["times"].items():
        found = facts(times)
        cells = (found[key] for key in ("median_step", "mean_step", "longest_step", "longest_save"))
        lines.append(f"| {mode} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="0: one process without MPI")
    parser.add_argument("--layout", default="single", choices=["single", "sharded"])
    parser.add_argument("--rate", type=float, default=50.0, help="of the disk, in MB/s for each rank")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=15, help="steps from one checkpoint to the next")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="of the images, in pixels")
    parser.add_argument("--report", action="store_true", help="print the report as Markdown; run nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    if not chosen.report:
        size = f"images of {chosen.size} x {chosen.size}, batch {chosen.batch}"
        ranks = f"{max(1, chosen.ranks)} {'rank' if chosen.ranks < 2 else 'ranks'}"
        disk = f"{chosen.layout}, {chosen.rate:g} MB/s, every {chosen.every} steps"
        job = f"ResNet-50, float32 with momentum, {size}, {ranks}, {disk}"
        times = {mode: run(mode, chosen) for mode in MODES}
        write_json(chosen.out, {"machine": machine_facts(), "job": job, "times": times})
    print(markdown(json.loads(chosen.out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
