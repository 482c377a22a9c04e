"""How long operations wait for their posting, and what that costs: steps under each progress mode, in turn.

    python -m benchmarks.posting vgg16 --pixels 224 --batch 4 --rate 1gbit     # 2 hosts of one core; needs root and iproute2
    python -m benchmarks.posting vgg16 --shared-memory --cores 2               # ranks on this machine, each with this many cores
    python -m benchmarks.posting --report benchmarks/results/posting-vgg16.json

An operation may start once what it comes after is complete, which the program sees at its next look only. So its delay is counted
from the last look at which it could not start yet: an upper limit, the same for every mode.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab import Lab, missing, take_down_at_termination
from benchmarks.overlap import jobs
from benchmarks.pairs import ratio
from benchmarks.shapes import SHAPES, Shape
from hpctrain.bench.interleaved import machine_facts
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import find_mpiexec

_ROOT = Path(__file__).resolve().parent.parent
_MODES = ("test", "thread", "posting")
_COLUMNS = ("step_seconds", "exposed_seconds", "messages_seconds", "thread_seconds", "cpu_seconds", "delay_seconds")


def markdown(result: Mapping[str, Any]) -> str:
    """A table of medians over the rounds, in ms; the step also as a ratio to that of mode `test`, with its interval."""
    rounds: Mapping[str, Sequence[Mapping[str, float]]] = result["rounds"]
    shape = result["shape"]
    usual = [turn["step_seconds"] for turn in rounds["test"]]
    lines = [
        f"{shape['family']}-{shape['depth']} x {shape['width']:g}, {shape['pixels']} px, batch {shape['batch']} a rank, "
        f"{result['averager']}, {result['ranks']} ranks, {result['link']}; ms per step, medians of {len(usual)} rounds",
        "",
        "| progress | step | of test | exposed | messages | thread | CPU | delays, sum | operations | delay of one | operator |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, turns in rounds.items():
        median = {name: float(np.median([turn[name] for turn in turns])) for name in turns[0]}
        step, *others = (f"{median[name] * 1e3:.1f}" for name in _COLUMNS)
        of_test = ratio([turn["step_seconds"] for turn in turns], usual)
        one = [f"{median[name] * 1e3:.2f}" for name in ("delay_of_operation_seconds", "operator_seconds")]
        cells = [mode, step, str(of_test), *others, f"{median['operations']:.0f}", *one]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=SHAPES)
    parser.add_argument("--rate", default="1gbit", help="of the links, as tc writes it")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--shared-memory", action="store_true", help="on this machine, without links")
    parser.add_argument("--ranks", type=int, default=2, help="with --shared-memory")
    parser.add_argument("--cores", type=int, default=1, help="of a rank, with --shared-memory")
    parser.add_argument("--averager", default="sharded")
    parser.add_argument("--options", default="{}", help="of the averager, as JSON")
    parser.add_argument("--modes", default=",".join(_MODES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="traced steps of a turn, after one that is not")
    parser.add_argument("--pixels", type=int)
    parser.add_argument("--batch", type=int, help="images per rank")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, nargs="+", help="print the report of earlier runs' JSON; runs nothing")
    chosen = parser.parse_args(arguments)
    if not chosen.report:
        if chosen.model is None:
            parser.error(f"name a model: {', '.join(SHAPES)}")
        chosen.modes = list(dict.fromkeys(["test", *chosen.modes.split(",")]))
    return chosen


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """All rounds; written to a file."""
    take_down_at_termination()
    reason = None if chosen.shared_memory else missing()
    if reason is not None:
        raise SystemExit(reason)
    usual = SHAPES[chosen.model]
    shape = Shape(**usual.as_dict() | {"batch": chosen.batch or usual.batch, "pixels": chosen.pixels or usual.pixels})
    with jobs(chosen.timeout) as (directory, running):
        settings, out = directory / "settings.json", directory / "result.json"
        values = {"shape": shape.as_dict(), "averager": chosen.averager, "options": json.loads(chosen.options)}
        values |= {"modes": chosen.modes, "rounds": chosen.rounds, "steps": chosen.steps, "out": str(out)}
        settings.write_text(json.dumps(values))
        command = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.posting_ranks", str(settings)]
        if chosen.shared_memory:
            launcher = find_mpiexec()
            assert launcher is not None, "there is no mpiexec"
            threads = ["env", f"OMP_NUM_THREADS={max(1, chosen.cores - 1)}"]
            bound = [launcher, "-bind-to", f"core:{chosen.cores}", "-n", str(chosen.ranks), *threads]
            running.start("job", [*bound, *command])
            running.wait("job")
        else:
            with Lab(chosen.hosts, chosen.rate) as lab:
                running.start("job", lab.mpiexec(command))
                running.wait("job")
        result: dict[str, Any] = json.loads(out.read_text())
    link = f"shared memory, {chosen.cores} cores a rank" if chosen.shared_memory else f"{chosen.rate} between hosts of one core"
    result |= {"shape": shape.as_dict(), "averager": chosen.averager, "link": link, "machine": machine_facts()}
    path = chosen.out or _ROOT / "benchmarks/results" / f"posting-{chosen.model}.json"
    write_json(path, result)
    print(f"written: {path}", flush=True)
    return result


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where all was measured."""
    chosen = parse(arguments)
    results = [json.loads(path.read_text()) for path in chosen.report] if chosen.report else [measure(chosen)]
    for result in results:
        print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
