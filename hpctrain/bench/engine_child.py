"""A process that runs training steps of our engine when it is told to; `interleaved.py` has the protocol and its other side."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from typing import IO

from hpctrain.bench.engine_step import EngineStep, timed, workload
from hpctrain.bench.interleaved import Turn
from hpctrain.launch.process_memory import peak_resident_bytes


def serve(step: EngineStep, asked: IO[str]) -> None:
    """Step as the lines say, until they end."""
    for line in asked:
        before = time.process_time()
        wall, cpu, losses = timed(step, json.loads(line)["steps"])
        finite = all(map(math.isfinite, losses))
        turn = Turn(wall, cpu, finite, losses[-1], before, time.process_time(), peak_resident_bytes())
        print(json.dumps(asdict(turn)), flush=True)


def main(arguments: list[str]) -> int:
    """Serve steps of the workload that the first argument, JSON, describes; gives the exit code."""
    settings = json.loads(arguments[0])
    task = workload(settings["model"], settings["batch"], settings["pixels"], settings["options"])
    step = EngineStep(task, settings["backend"])
    facts = {"version": step.backend, "parameters": step.parameters, "arena_bytes": step.program.activation_bytes}
    print(json.dumps(facts), flush=True)
    serve(step, sys.stdin)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
