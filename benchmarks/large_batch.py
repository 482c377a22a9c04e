"""Curves of trainings from their metrics: test accuracy and training loss by epoch, as for large batches with LARS and with SGD.

hpctrain train configs/quickstart-large-batch.yaml
hpctrain train configs/quickstart-large-batch-sgd.yaml
python -m benchmarks.large_batch RUN RUN --plot large-batch.png      # RUN: a directory under runs/
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks import plots


@dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
        name: of the configuration. losses: of training, by epoch. accuracies: of the test, by epoch, as shares.
    """

    name: str
    losses: dict[int, float]
    accuracies: dict[int, float]

    @property
    def last(self) -> int:
        """The last epoch that was tested.

        Raises:
            SystemExit: none was.
        """
        if not self.accuracies:
            raise SystemExit(f"The run {self.name} has tested no epoch; let it train for one, with data.test.")
        return max(self.accuracies)

    def reached(self, accuracy: float) -> int | None:
        """The first epoch with that test accuracy or more; None: none."""
        return min((epoch for epoch, value in self.accuracies.items() if value >= accuracy), default=None)


def read(run: Path) -> Curve:
    """The curve of a run's directory; of an epoch that a resumed run has done twice, the later record."""
    name = yaml.safe_load((run / "config.yaml").read_text())["name"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {record["epoch"]: record["loss"] for record in records if record["kind"] == "epoch"}
    accuracies = {record["epoch"]: record["top1"] for record in records if record["kind"] == "evaluation"}
    return Curve(name, losses, accuracies)


def markdown(curves: Sequence[Curve]) -> str:
    """A row for each training: its last and best test accuracy, and the epochs to half of the best of all, and to 9 tenths."""
    best = max(max(curve.accuracies.values(), default=0.0) for curve in curves)
    half, most = 0.5 * best, 0.9 * best
    lines = [
        f"| training | epochs | training loss | test accuracy | best | epochs to {half:.1%} | to {most:.1%} |",
        "|---|---|---|---|---|---|---|",
    ]
    for curve in curves:
        epochs = [curve.reached(target) for target in (half, most)]
        to_targets = " | ".join("never" if epoch is None else str(epoch) for epoch in epochs)
        loss = curve.losses.get(curve.last, float("nan"))
        accuracies = f"{curve.accuracies[curve.last]:.2%} | {max(curve.accuracies.values()):.2%}"
        lines.append(f"| {curve.name} | {curve.last} | {loss:.3f} | {accuracies} | {to_targets} |")
    return "\n".join(lines) + "\n"


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Test accuracy on the left and training loss on the right, over epochs.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    with plots.panels(path, 2, 5, 4) as (left, right):
        for curve in curves:
            left.plot(list(curve.accuracies), [100 * value for value in curve.accuracies.values()], marker=".", label=curve.name)
            right.plot(list(curve.losses), list(curve.losses.values()), marker=".", label=curve.name)
        left.set(xlabel="epoch", ylabel="test accuracy, %")
        right.set(xlabel="epoch", ylabel="training loss")
        left.legend(fontsize="small")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Test accuracy and training loss of trainings, by epoch.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of runs")
    parser.add_argument("--plot", type=Path, help="an image; needs matplotlib")
    chosen = parser.parse_args(arguments)
    curves = [read(run) for run in chosen.runs]
    print(markdown(curves), end="")
    if chosen.plot is not None:
        plot(curves, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
