"""The planner held to account: predictions of steps, made before they are measured, next to the steps' times.

    python -m benchmarks.planner_accuracy                        # all points; shaped links need root and iproute2; 50 minutes
    python -m benchmarks.planner_accuracy --links 1gbit --ranks 2 --networks vgg16 --rounds 3 --out part.json
    python -m benchmarks.planner_accuracy --report benchmarks/results/planner-accuracy.json    # runs nothing

Points that share a link and a number of ranks are one MPI job: it calibrates once, predicts all its points, writes that down, and
then steps them in turn, so that whatever else the machine does meets all alike. `planner_points.py` lists the points.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, LabError, missing, take_down_at_termination
from benchmarks.overlap import JobError, Jobs, jobs
from benchmarks.planner_points import NETWORKS, POINTS, SHARED_MEMORY, TRACED, Point, machines_of_points
from benchmarks.planner_report import report
from hpctrain.bench.interleaved import machine_facts
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import find_mpiexec

_ROOT = Path(__file__).resolve().parent.parent
_OUT = _ROOT / "benchmarks/results/planner-accuracy.json"
_HOSTS = 2


def chosen_points(chosen: argparse.Namespace) -> list[Point]:
    """The points asked for, in order."""
    return [
        point
        for point in POINTS
        if (not chosen.links or point.link in chosen.links)
        and (not chosen.ranks or point.ranks in chosen.ranks)
        and (not chosen.networks or point.network in chosen.networks)
        and (not chosen.averagers or point.averager in chosen.averagers)
        and (not chosen.plans or point.plan in chosen.plans)
    ]


def traced(which: str, point: Point) -> bool:
    """Whether a point is stepped with a trace. which: "named" ones, "all" or "none"."""
    return which == "all" or (which == "named" and point.name in TRACED)


def run_job(chosen: argparse.Namespace, link: str, ranks: int, points: Sequence[Point]) -> dict[str, Any]:
    """One MPI job: all points of a link and a number of ranks."""
    with jobs(chosen.timeout) as (directory, running):
        files = {name: directory / name for name in ("out", "predictions", "machine")}
        settings = {
            **{name: str(path) for name, path in files.items()},
            "points": [point.name for point in points],
            "rounds": chosen.rounds,
            "lead": chosen.lead,
            "steps": chosen.steps,
            "traced": [point.name for point in points if traced(chosen.traces, point)],
            "predicts": not chosen.measure_only,
            "cores": _HOSTS,
            "times": str(chosen.times / f"{link}-{ranks}.json") if chosen.times else "",
            "nice": chosen.nice,
        }
        path = directory / "settings.json"
        path.write_text(json.dumps(settings))
        _run(running, link, ranks, [sys.executable, "-m", "mpi4py", "-m", "benchmarks.planner_accuracy_ranks", str(path)])
        result: dict[str, Any] = json.loads(files["out"].read_text())
        known = {"link": link, "load": machine_facts()["load"]}
        if not chosen.measure_only:
            before = json.loads(files["predictions"].read_text())
            without_needless_tables(before["predictions"], result["traces"])
            known |= {"machine_file": files["machine"].read_text(), **before}
    kept = {key: value for key, value in result.items() if key not in known}
    kept["settings"] = {key: value for key, value in kept["settings"].items() if key not in {*files, "times"}}  # paths
    return {**known, **kept}


def without_needless_tables(predictions: dict[str, dict[str, Any]], traces: Container[str]) -> None:
    """Drop the simulated tables of points that were not traced: they would be most of the file."""
    for name, prediction in predictions.items():
        if name not in traces:
            prediction.pop("table", None)


def _run(running: Jobs, link: str, ranks: int, command: list[str]) -> None:
    if link == SHARED_MEMORY:
        launcher = find_mpiexec()
        if launcher is None:
            raise LabError("There is no mpiexec; install the package mpich into this environment.")
        running.start("job", [launcher, "-n", str(ranks), *command])
        running.wait("job")
        return
    with Lab(_HOSTS, link) as lab:
        running.start("job", lab.mpiexec(command, ranks // _HOSTS))
        running.wait("job")


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """All jobs with points that are asked for; the file is written after each."""
    take_down_at_termination()
    points = chosen_points(chosen)
    if not points:
        raise SystemExit("No point has what is asked for.")
    reason = missing()
    if reason is not None and any(point.link != SHARED_MEMORY for point in points):
        raise SystemExit(reason)
    result: dict[str, Any] = {
        "machine": machine_facts(),
        "networks": {name: asdict(network) for name, network in NETWORKS.items()},
        "runs": [],
    }
    for link, ranks in machines_of_points():
        here = [point for point in points if (point.link, point.ranks) == (link, ranks)]
        if not here:
            continue
        print(f"{link}, {ranks} ranks: {len(here)} points", flush=True)
        try:
            result["runs"].append(run_job(chosen, link, ranks, here))
        except JobError as failure:
            raise SystemExit(f"{link}, {ranks} ranks: {failure}") from None
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(chosen.out, result)
    print(f"written: {chosen.out}", flush=True)
    return result


def _words(text: str) -> list[str]:
    return text.split(",")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=_words, help=f"500mbit, 1gbit, 2gbit, {SHARED_MEMORY}; all by default")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in _words(text)], help="2, 4; both by default")
    parser.add_argument("--networks", type=_words, help=", ".join(NETWORKS))
    parser.add_argument("--averagers", type=_words)
    parser.add_argument("--plans", type=_words)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lead", type=int, default=1, help="untimed steps that open a turn")
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a turn")
    parser.add_argument("--measure-only", action="store_true", help="without calibration and predictions")
    parser.add_argument(
        "--traces", default="named", choices=["named", "all", "none"], help="points that are stepped with a trace"
    )
    parser.add_argument("--nice", type=int, default=0, help="of all processes; below 0 ahead of others on this machine")
    parser.add_argument("--times", type=Path, help="directory that keeps the operators' times")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds that one job may take")
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--report", type=Path, help="print the report of an earlier run; runs nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where all was measured."""
    chosen = parse(arguments)
    result = json.loads(chosen.report.read_text()) if chosen.report is not None else measure(chosen)
    print(report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
