"""Fine-tuning by hpctrain and by PyTorch from the same weights, and by hpctrain from random ones: test accuracy by epoch.

    python -m benchmarks.finetune configs/finetune-resnet18.yaml init.weights=FILE data.train=... --work DIRECTORY --seeds 1 2
    python -m benchmarks.finetune --work DIRECTORY --out finetune.json --plot finetune.png   # of what is done; runs nothing

Trainings go seed by seed, each to its end in DIRECTORY/<who>-<seed>; one whose directory is there is not made again. PyTorch has
the very batches of our loader (see `finetune_peer`). Differences are of pairs with the same seed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import plots
from benchmarks.large_batch import Curve, read
from hpctrain.core.text import counted
from hpctrain.storage.atomic_write import write_json

OURS, PEER, RANDOM = "hpctrain", "torch", "random"
LABELS = {OURS: "hpctrain", PEER: "PyTorch, same weights and batches", RANDOM: "hpctrain, random weights"}

#: trainer -> seed -> test accuracy by epoch, as shares
Accuracies = Mapping[str, Mapping[str, Sequence[float]]]


def command(who: str, file: str, overrides: Sequence[str], seed: int, output: Path) -> list[str]:
    """The arguments of one training, after those that start Python."""
    words = [file, *overrides, f"seed={seed}"]
    if who == PEER:
        return ["-m", "benchmarks.finetune_peer", *words, "--out", str(output)]
    return ["-m", "hpctrain", "train", *words, *(["init={}"] if who == RANDOM else []), f"output={output}"]


def curve_in(directory: Path) -> Curve | None:
    """The curve of a training in its directory: the peer's own, or a run's below it; None where there is none."""
    runs = [path.parent for path in (*directory.glob("metrics.jsonl"), *directory.glob("*/metrics.jsonl"))]
    return read(max(runs)) if runs else None


def collect(work: Path) -> dict[str, dict[str, list[float]]]:
    """The accuracies of all trainings in a directory that tested as many epochs as the longest one."""
    curves: dict[tuple[str, str], Curve] = {}
    for directory in sorted(path for path in work.iterdir() if path.is_dir()):
        who, _, seed = directory.name.rpartition("-")
        curve = curve_in(directory)
        if who in LABELS and curve is not None and curve.accuracies:
            curves[who, seed] = curve
    last = max((curve.last for curve in curves.values()), default=0)
    result: dict[str, dict[str, list[float]]] = {}
    for (who, seed), curve in curves.items():
        if curve.last == last:
            result.setdefault(who, {})[seed] = [curve.accuracies[epoch] for epoch in range(1, last + 1)]
    return result


def markdown(done: Accuracies) -> str:
    """The last test accuracy of each training, and the difference of the pairs with the peer's, in points."""
    seeds = sorted({seed for of_trainer in done.values() for seed in of_trainer}, key=int)
    lines = [f"| training | {' | '.join(f'seed {seed}' for seed in seeds)} |", f"|---|{'---:|' * len(seeds)}"]
    for who in (one for one in LABELS if one in done):
        cells = [f"{100 * done[who][seed][-1]:.2f}" if seed in done[who] else "" for seed in seeds]
        lines.append(f"| {LABELS[who]} | {' | '.join(cells)} |")
    apart = differences(done)
    if apart:
        lines.append(f"\nhpctrain less PyTorch in {counted(len(apart), 'pair')}, mean: {100 * mean(apart):+.2f} points")
    return "\n".join(lines) + "\n"


def differences(done: Accuracies) -> list[float]:
    """Our last test accuracy less the peer's, for each seed that both have."""
    ours, peer = done.get(OURS, {}), done.get(PEER, {})
    return [ours[seed][-1] - peer[seed][-1] for seed in ours if seed in peer]


def plot(done: Accuracies, path: Path) -> None:
    """Test accuracy over epochs, a line for each training.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    colours = dict(zip(LABELS, ("C0", "C1", "C2"), strict=True))
    with plots.panels(path, 1, 7, 4.5) as (axes,):
        for who, of_seeds in done.items():
            for number, (_, values) in enumerate(sorted(of_seeds.items())):
                label = LABELS[who] if number == 0 else None
                style = "--" if who == PEER else "-"
                epochs = range(1, len(values) + 1)
                axes.plot(epochs, [100 * value for value in values], style, marker=".", color=colours[who], label=label)
        axes.set(xlabel="epoch", ylabel="test accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend()


def run(file: str, overrides: Sequence[str], seeds: Sequence[int], work: Path) -> None:
    """Make the trainings that are not there yet.

    Raises:
        RuntimeError: one failed.
    """
    for seed in seeds:
        for who in LABELS:
            output = work / f"{who}-{seed}"
            if output.exists():
                continue
            words = [sys.executable, *command(who, file, overrides, seed, output)]
            if subprocess.run(words, check=False).returncode:
                raise RuntimeError(f"A training failed: {shlex.join(words)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="the configuration; without it nothing is run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all trainings")
    parser.add_argument("--work", type=Path, required=True, help="where the trainings' directories go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--note", default="", help="written next to the results: the conditions of the measurement")
    parser.add_argument("--out", type=Path, help="a file of results")
    parser.add_argument("--plot", type=Path, help="an image; needs matplotlib")
    chosen = parser.parse_args(arguments)
    if chosen.file is not None:
        run(chosen.file, chosen.overrides, chosen.seeds, chosen.work)
    done = collect(chosen.work)
    results: dict[str, Any] = {"conditions": chosen.note, "test_accuracy_by_epoch": done}
    print(markdown(done), end="")
    if chosen.out is not None:
        write_json(chosen.out, results)
    if chosen.plot is not None:
        plot(done, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
