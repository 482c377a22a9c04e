"""The cost of flight records and the heartbeat: processor time of an event, times the events of a step, over the step.

    python -m benchmarks.flight                # ResNet-20 on 2 ranks, made-up images; a minute
    python -m benchmarks.flight --report       # Markdown of the file of results; runs nothing

A share of a thousandth cannot be seen in the time of steps on a machine that others use. So each kind of event is timed alone,
and counted in the records of a real job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.bench.interleaved import machine_facts
from hpctrain.flight.autopsy import records_in
from hpctrain.flight.heartbeat import Heartbeat
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.runs.directory import RunDirectory
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import run_job

OUT = Path(__file__).resolve().parent / "results" / "flight.json"
_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "cifar10-resnet20.yaml"
_EVENTS = 20_000
_RANKS = 2
_STEPS = 60
_BATCH = 256
_ROUNDS = 9


def cost_seconds(event: Callable[[], object]) -> list[float]:
    """Processor time of one event, in turns."""
    turns = []
    for _ in range(_ROUNDS):
        begin = time.thread_time()
        for _ in range(_EVENTS):
            event()
        turns.append((time.thread_time() - begin) / _EVENTS)
    return turns


def costs(folder: Path) -> dict[str, list[float]]:
    """Seconds of each kind of event, with the ring in a file."""
    recorder = FlightRecorder()
    recorder.join(0, _RANKS, 1, 300.0)
    recorder.keep_in(folder)
    queue = recorder.queue_of("all gradients", range(_RANKS))

    def operation() -> None:
        number = recorder.queued(queue, "layer3.2.conv2.weight", 4711)
        recorder.started(number, "reduce-scatter of 36864 elements")
        recorder.done(number)

    def wait() -> None:
        with recorder.waiting("layer3.2.conv2.weight", 1):
            pass

    def phases() -> None:
        recorder.step(1, 2)
        recorder.phase("a training step")
        recorder.phase("data loading")

    heartbeat = Heartbeat(recorder, deadline_seconds=1e9, abort=lambda code: None, rank=0)
    return {
        "operation": cost_seconds(operation),
        "wait": cost_seconds(wait),
        "phases of a step": cost_seconds(phases),
        "look of the heartbeat": cost_seconds(heartbeat.look),
    }


def events_of_a_step(folder: Path) -> dict[str, float]:
    """Operations of a step of rank 0, and its seconds, from a real job."""
    arguments = [
        str(_CONFIG),
        "data={train: synthetic}",
        f"batch={_BATCH}",
        f"output={folder}",
        "epochs=1",
        "evaluate.every_epochs=0",
    ]
    outcome = run_job(
        _RANKS, ["-m", "hpctrain", "train", *arguments, "--steps", str(_STEPS), "--progress", "none"], timeout_seconds=300
    )
    if outcome.code:
        raise SystemExit(outcome.output)
    (run,) = folder.iterdir()
    record = records_in(run / "flight")[0]
    steps = [operation.posted_ns for operation in record.operations if operation.purpose == "step message"]
    begin, end = steps[len(steps) // 3], steps[-1]
    inside = sum(begin <= operation.posted_ns < end for operation in record.operations)
    number = sum(begin <= posted < end for posted in steps)
    assert RunDirectory.open(run).metrics()
    return {"operations": inside / number, "seconds": (end - begin) * 1e-9 / number}


def measure() -> dict[str, Any]:
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        events = events_of_a_step(Path(folder) / "runs")
        of_event = costs(Path(folder) / "costs")
    medians = {name: statistics.median(turns) for name, turns in of_event.items()}
    # Each operation is waited for at most once; the heartbeat looks once a second.
    per_step = (
        events["operations"] * (medians["operation"] + medians["wait"])
        + medians["phases of a step"]
        + events["seconds"] * medians["look of the heartbeat"]
    )
    return {
        "machine": machine_facts(),
        "job": f"ResNet-20, batch {_BATCH}, {_RANKS} ranks",
        "event_seconds": of_event,
        "step": events,
        "seconds_of_a_step": per_step,
        "share": per_step / events["seconds"],
    }


def markdown(results: dict[str, Any]) -> str:
    """A table of the costs, and the share of a step."""
    lines = ["| event | microseconds |", "|---|---|"]
    for name, turns in results["event_seconds"].items():
        lines.append(f"| {name} | {statistics.median(turns) * 1e6:.2f} [{min(turns) * 1e6:.2f}, {max(turns) * 1e6:.2f}] |")
    step = results["step"]
    lines.append("")
    lines.append(
        f"{results['job']}: {step['operations']:.0f} operations in a step of {step['seconds'] * 1e3:.1f} ms: at most "
        f"{results['seconds_of_a_step'] * 1e6:.0f} microseconds, {results['share']:.3%} of it."
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="print the report as Markdown; run nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    if not chosen.report:
        write_json(chosen.out, measure())
    print(markdown(json.loads(chosen.out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
