"""The price of the same bits on any number of ranks: steps with shards next to `sharded`, and next to as many micro-batches.

    python -m benchmarks.exact                        # ResNet-18 at 64 px, 2 ranks: shared memory, then links of 1 Gb/s (as root)
    python -m benchmarks.exact --shared-memory        # without links
    python -m benchmarks.exact --report FILE...       # of what has been measured; runs nothing

Everything steps in turns in one job, as in `overlap.py`: the ordinary step; the step in as many micro-batches as a rank has
shards, which costs what smaller batches one after another do; and the step with shards, which runs these side by side and fixes
the order of sums.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import overlap
from benchmarks.pairs import ratio

_RESULTS = Path(__file__).resolve().parent / "results"
RANKS = 2
#: shards -> (step with shards, ordinary step in as many passes), as `overlap` names them
PAIRS: Mapping[int, tuple[str, str]] = {4: ("exact-4", "micro-2"), 8: ("exact-8", "micro-4")}
_ORDINARY = "sharded"


def markdown(run: Mapping[str, Any]) -> str:
    """A row for each number of shards: medians of ratios of pairs, with intervals of 95 %, and bytes over the ordinary step's."""
    columns = {name: [turn["step_seconds"] for turn in run["rounds"][name]] for name in _compared()}  # others are no steps
    sent = {name: sum(turn["payload_bytes"] for turn in run["rounds"][name]) for name in _compared()}
    lines = [
        f"{run['rate']}, {len(columns[_ORDINARY])} rounds",
        "",
        "| shards | with shards / ordinary | micro-batches / ordinary | with shards / micro-batches | bytes / ordinary |",
        "|---|---|---|---|---|",
    ]
    for shards, (exact, passes) in PAIRS.items():
        cells = (
            ratio(columns[exact], columns[_ORDINARY]),
            ratio(columns[passes], columns[_ORDINARY]),
            ratio(columns[exact], columns[passes]),
            f"{sent[exact] / sent[_ORDINARY]:.3f}",
        )
        lines.append(f"| {shards} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _compared() -> list[str]:
    return [_ORDINARY, *(name for pair in PAIRS.values() for name in pair)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where all was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shared-memory", action="store_true", help="without links")
    parser.add_argument("--report", type=Path, nargs="+", help="print the tables of earlier runs' JSON; runs nothing")
    chosen = parser.parse_args(arguments)
    for path in chosen.report or _measured(chosen):
        for run in json.loads(path.read_text())["runs"]:
            print(markdown(run))
    return 0


def _measured(chosen: argparse.Namespace) -> list[Path]:
    """The files of what has been measured now."""
    files = []
    for name, place in (("shared-memory", ["--shared-memory"]), ("1gbit", ["--rates", "1gbit"])):
        if chosen.shared_memory and name != "shared-memory":
            continue
        out = _RESULTS / f"exact-{chosen.model}-{name}.json"
        words = [chosen.model, *place, "--variants", ",".join(_compared()), "--rounds", str(chosen.rounds), "--steps", "2"]
        overlap.measure(overlap.parse([*words, "--out", str(out)]))
        files.append(out)
    return files


if __name__ == "__main__":
    sys.exit(main())
