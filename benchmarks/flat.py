"""Thousands of steps on 2 ranks: memory, descriptors, threads and operations among ranks must not grow.

python -m benchmarks.flat                # 3,000 steps; half a minute
python -m benchmarks.flat --steps 100000
python -m benchmarks.flat --report       # Markdown of the file of results; runs nothing
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.bench.interleaved import machine_facts
from hpctrain.data.writer import write_data_file
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import run_job

OUT = Path(__file__).resolve().parent / "results" / "flat.json"
RANKS = 2
STEPS = 3000
#: steps before which a process may still grow
BEGIN = 500
_EVERY = 250
_STEPS_OF_AN_EPOCH = 50
_BATCH = 8
#: that memory may grow by: less than 500 bytes a step
GROWTH_BYTES = 1_000_000

# Uncached images, flight records, metrics, evaluations and checkpoints: all that a run does again and again.
_CONFIG = f"""
name: flat
seed: 7
model: {{name: small, channels: [4, 6], hidden: 9}}
data: {{train: train.h5, test: train.h5, cache: false}}
batch: {_BATCH}
optimizer: {{name: sgd, lr: 0.001, momentum: 0.9}}
schedule: constant
evaluate: {{every_epochs: 10}}
checkpoint: {{every_epochs: 10}}
metrics: {{interval_seconds: 0.5}}
"""


def measure(folder: Path, steps: int) -> dict[str, dict[str, dict[str, int]]]:
    """Looks at the processes of a training, by rank and step."""
    random, samples = np.random.default_rng(0), _BATCH * _STEPS_OF_AN_EPOCH
    images = random.integers(0, 256, (samples, 9, 8, 1), dtype=np.uint8)
    write_data_file(folder / "train.h5", samples, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, samples))])
    (folder / "flat.yaml").write_text(_CONFIG)
    program = str(Path(__file__).with_name("flat_ranks.py"))
    words = [program, str(folder / "looks"), str(steps), str(_EVERY), "train", "flat.yaml"]
    epochs = -(-steps // _STEPS_OF_AN_EPOCH)
    outcome = run_job(RANKS, [*words, f"epochs={epochs}"], cwd=folder, timeout_seconds=60 + 0.1 * steps)
    if outcome.code:
        raise RuntimeError(outcome.output)
    return {str(rank): json.loads((folder / f"looks-{rank}.json").read_text()) for rank in range(RANKS)}


def growth(looks: dict[str, dict[str, int]], begin: int = BEGIN) -> dict[str, int]:
    """The most that each figure of a rank grew by since the look at step `begin`.

    How many operations are under way depends on the moment; those that never end would be in every look, so the least counts.
    """
    first = looks[str(begin)]
    later = [values for step, values in looks.items() if int(step) > begin]
    most = {name: max(values[name] for values in later) - first[name] for name in first}
    return most | {"outstanding": min(values["outstanding"] for values in later) - first["outstanding"]}


def is_flat(grown: dict[str, int]) -> bool:
    """Whether nothing has grown, memory by less than it may."""
    counts = [grown[name] for name in ("descriptors", "threads", "outstanding")]
    return max(counts) <= 0 and grown["own_bytes"] <= GROWTH_BYTES


def markdown(results: dict[str, Any]) -> str:
    """A table of the ranks at the first and the last look."""
    lines = ["| rank | step | own memory, MB | descriptors | threads | operations |", "|---|---|---|---|---|---|"]
    for rank, looks in results["ranks"].items():
        for step in (str(BEGIN), max(looks, key=int)):
            values = looks[step]
            counts = " | ".join(str(values[name]) for name in ("descriptors", "threads", "outstanding"))
            lines.append(f"| {rank} | {step} | {values['own_bytes'] / 1e6:.2f} | {counts} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--report", action="store_true", help="print the report as Markdown; run nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    if chosen.report:
        print(markdown(json.loads(chosen.out.read_text())))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = measure(Path(folder), chosen.steps)
    results = {"machine": machine_facts(), "steps": chosen.steps, "ranks": ranks}
    write_json(chosen.out, results)
    print(markdown(results))
    grown = {rank: growth(looks) for rank, looks in ranks.items()}
    print(f"grown since step {BEGIN}: {grown}")
    return 0 if all(map(is_flat, grown.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
