"""The cost of a record of hashes: processor time on one rank that holds a whole model, next to that of SHA-256 of as many bytes.

    python -m benchmarks.hashes                # ResNet-20 and ResNet-50; seconds
    python -m benchmarks.hashes --report       # Markdown of the file of results; runs nothing

The records are taken of a model with momentum by `blocking` on one rank, which holds all; P ranks share the elements out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import MODELS, task_of
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.bench.interleaved import machine_facts
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.storage.atomic_write import write_json
from hpctrain.training.state_hashes import StateHashes
from hpctrain.training.weight_watch import CheckCadence
from tests.support.training import replica_of

OUT = Path(__file__).resolve().parent / "results" / "hashes.json"
_ROUNDS = 9


def record_seconds(name: str) -> dict[str, Any]:
    """Times of records of a model's hashes and, in turn with them, of SHA-256 over as many bytes in one piece."""
    comm = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=300, abort=comm.abort)
    replica = replica_of(replace(task_of(name), checks=CheckCadence()), comm, engine, Blocking)
    hashes = StateHashes(replica)
    elements = sum(2 * group.size for group in replica.network.groups.values()) + replica.network.statistics.size
    values = np.random.default_rng(0).integers(0, 256, 4 * elements, dtype=np.uint8)
    tensors = len(hashes.take())
    pairs = [(_seconds(hashes.take), _seconds(lambda: hashlib.sha256(values).digest())) for _ in range(_ROUNDS)]
    return {"elements": elements, "tensors": tensors, "record": [a for a, _ in pairs], "sha256": [b for _, b in pairs]}


def _seconds(event: Callable[[], object]) -> float:
    begin = time.thread_time()
    event()
    return time.thread_time() - begin


def measure(names: Sequence[str]) -> dict[str, Any]:
    """Measure the models."""
    return {"machine": machine_facts(), "models": {name: record_seconds(name) for name in names}}


def markdown(results: dict[str, Any]) -> str:
    """A line for each model."""
    lines = [
        "| model | elements | tensors | a record, ms | SHA-256 of as much, ms |",
        "|---|---|---|---|---|",
    ]
    for name, values in results["models"].items():
        record, sha = (statistics.median(values[key]) * 1e3 for key in ("record", "sha256"))
        lines.append(f"| {name} | {values['elements']:,} | {values['tensors']} | {record:.1f} | {sha:.1f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="print the report as Markdown; run nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="by default all")
    chosen = parser.parse_args(arguments)
    if not chosen.report:
        write_json(chosen.out, measure(chosen.models))
    print(markdown(json.loads(chosen.out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
