"""LARS with every rank doing its part of norms and update, against every rank doing all: CPU time of a step.

    python -m benchmarks.lars                                  # ResNet-50 and VGG-16 on 1 to 4 ranks; about five minutes
    python -m benchmarks.lars resnet50 --ranks 1 2 --rounds 9
    python -m benchmarks.lars --report                         # Markdown of what has been measured; runs nothing

The parallel tensor operator of Shi et al. (arXiv 2010.10458) assigns each rank its part of the ratios of layers. Here each owns a
part of every slice: it sums squares of that part, a few small allreduces complete the norms, and it updates the part. A rank that
averages by allreduce does all of it. Both are measured without averaging, in turns, on one thread a rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pairs import interval, ratio
from hpctrain.bench.interleaved import machine_facts
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import clean_environment, find_mpiexec

OUT = Path(__file__).resolve().parent / "results" / "lars.json"
NETWORKS: Mapping[str, tuple[str, int]] = {"resnet50": ("resnet", 50), "vgg16": ("vgg", 16)}
_ALL, _PART = "every rank all", "own part"


def run(name: str, ranks: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """The rounds of one network on `ranks` ranks.

    Raises:
        SystemExit: there is no mpiexec. subprocess.SubprocessError: a rank failed.
    """
    launcher = find_mpiexec()
    if launcher is None:
        raise SystemExit("There is no mpiexec; install the package mpich into this environment.")
    family, depth = NETWORKS[name]
    with tempfile.TemporaryDirectory() as directory:
        path, out = Path(directory) / "settings.json", Path(directory) / "result.json"
        settings = {"family": family, "depth": depth, "kernels": chosen.kernels, "steps": chosen.steps, "rounds": chosen.rounds}
        path.write_text(json.dumps({**settings, "out": str(out)}))
        command = [launcher, "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m", "benchmarks.lars_ranks", str(path)]
        subprocess.run(command, check=True, timeout=chosen.timeout, env=clean_environment())
        return {"network": name, "ranks": ranks, "settings": settings, "machine": machine_facts(), **json.loads(out.read_text())}


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table: a row for each network and number of ranks, milliseconds of CPU time of a step, medians and 95 % intervals."""
    head = (
        "| network | parameters | ranks | messages | LARS, every rank all, ms | LARS, own part, ms | all / own part "
        "| of the own part, norms, ms | SGD, own part, ms |"
    )
    lines = [head, "|---" * 9 + "|"]
    for one in sorted(runs, key=lambda one: (one["network"], one["ranks"])):
        turns = {name: [1e3 * turn["cpu_seconds"] for turn in measured] for name, measured in one["rounds"].items()}
        whole, parts, plain = turns[f"lars, {_ALL}"], turns[f"lars, {_PART}"], turns[f"sgd, {_PART}"]
        norms = interval([a - b for a, b in zip(parts, plain, strict=True)])
        facts = one["facts"]
        messages = facts["messages"] if one["ranks"] > 1 else 0
        cells = (
            one["network"],
            f"{facts['parameters']:,}",
            one["ranks"],
            messages,
            *(str(interval(values)) for values in (whole, parts)),
            str(ratio(whole, parts)),
            str(norms),
            str(interval(plain)),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="CPU time of LARS with sharded norms and update, against all of it on every rank."
    )
    parser.add_argument("networks", nargs="*", choices=[[], *NETWORKS], help="networks; all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of turns")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a turn")
    parser.add_argument("--kernels", default="onednn", help="the backend whose arithmetic is measured")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one job may take")
    parser.add_argument("--out", type=Path, default=OUT, help="the file of results")
    parser.add_argument("--report", action="store_true", help="print the table of what has been measured")
    chosen = parser.parse_args(arguments)
    stored: list[dict[str, Any]] = json.loads(chosen.out.read_text()) if chosen.out.exists() else []
    measured = {(one["network"], one["ranks"]): one for one in stored}
    for name in () if chosen.report else chosen.networks or NETWORKS:
        for ranks in chosen.ranks:
            measured[name, ranks] = run(name, ranks, chosen)
            write_json(chosen.out, list(measured.values()))
    print(markdown(list(measured.values())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
