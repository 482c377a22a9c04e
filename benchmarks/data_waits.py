"""Waits for data in trainings, by cache and by threads that make batches; and how fast those threads are alone.

    python -m benchmarks.data_waits --out data-waits.json                   # ResNet-20, 2 ranks, made-up images
    python -m benchmarks.data_waits --train data/cifar10/train.h5 --rounds 5

All cases are trained in turn in every round. Of each epoch a run records how long its steps were and how long they waited for
data; epochs from the second on count, when memory holds all samples. The stages alone are what `hpctrain bench data` tells,
with the crops of large images, of which one thread makes few.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pairs import interval
from hpctrain.bench.interleaved import machine_facts
from hpctrain.data.writer import write_data_file
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import clean_environment, find_mpiexec

CONFIG = Path(__file__).parents[1] / "configs" / "cifar10-resnet20.yaml"
LARGE = Path(__file__).parents[1] / "configs" / "imagenet-resnet50.yaml"
_SHAPE, _CLASSES = (32, 32, 3), 10


@dataclass(frozen=True)
class Case:
    """A training that is measured. cache: `data.cache` as the command line takes it. threads: that make a batch."""

    cache: str
    threads: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"data.cache={self.cache} data.threads={self.threads}"


@dataclass(frozen=True)
class Waits:
    """Sums over the epochs from the second on, means over ranks but for the last.

    seconds: of all steps. waited_seconds: for data in them. most_waited_seconds: of the rank that waited longest in each epoch.
    file_samples: that all ranks have read from the data file in these epochs.
    """

    steps: int
    seconds: float
    waited_seconds: float
    most_waited_seconds: float
    file_samples: int

    @property
    def share(self) -> float:
        """The share of the time of steps."""
        return self.waited_seconds / self.seconds

    @property
    def most_share(self) -> float:
        """The same of the ranks that waited longest."""
        return self.most_waited_seconds / self.seconds


def waits_of(lines: Iterable[str]) -> Waits:
    """The waits of a run from its metrics file.

    Raises:
        ValueError: the run has no second epoch.
    """
    records = [json.loads(line) for line in lines]
    later = [record for record in records if record["kind"] == "data" and record["epoch"] >= 2]
    reads = [record["file_samples"] for record in records if record["kind"] == "reads"]  # counted since the start
    if not later:
        raise ValueError("The run has recorded no epoch from the second on; give --epochs 2 or more.")
    sums = {name: sum(record[name] for record in later) for name in ("steps", "seconds", "waited_seconds", "most_waited_seconds")}
    return Waits(**sums, file_samples=reads[-1] - reads[0])


def write_made_up(path: Path, images: int) -> None:
    """A data file of noise in the shape of CIFAR-10's images."""
    random = np.random.default_rng(1)
    pixels, labels = random.integers(0, 256, (images, *_SHAPE), np.uint8), random.integers(0, _CLASSES, images)
    write_data_file(path, images, _SHAPE, [f"class {number}" for number in range(_CLASSES)], [(pixels, labels)])


def train(case: Case, path: Path, folder: Path, chosen: argparse.Namespace) -> Waits:
    """Train one case once.

    Raises:
        RuntimeError: the training failed; the message contains its output.
    """
    overrides = [
        f"data.train={path}",
        "data.test=",
        f"data.cache={case.cache}",
        f"data.threads={case.threads}",
        f"epochs={chosen.epochs}",
        f"batch={chosen.batch}",
        f"output={folder}",
        "checkpoint.every_epochs=0",
        "schedule=constant",
    ]
    command = [find_mpiexec() or "mpiexec", "-n", str(chosen.ranks), sys.executable, "-m", "mpi4py", "-m", "hpctrain", "train"]
    done = subprocess.run(
        [*command, str(CONFIG), *overrides], env=clean_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{case.name}: {done.stderr[-2000:]}")
    [metrics] = folder.glob("*/metrics.jsonl")
    return waits_of(metrics.read_text().splitlines())


def stages(threads: Sequence[int], large: Sequence[str]) -> dict[str, Any]:
    """The stages of large images alone, by `hpctrain bench data`.

    large: overrides of the configuration.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    words = ["bench", "data", str(LARGE), "data.train=synthetic", "data.test=", *large, "--no-step", "--json"]
    command = [sys.executable, "-m", "hpctrain", *words, "--threads", ",".join(map(str, threads))]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(rounds: Mapping[str, Sequence[Waits]]) -> str:
    """Markdown: shares of the steps' time in per cent, medians over rounds."""
    lines = [
        "| case | rounds | a step, s | waits, % | of the slowest rank, % | samples from the file |",
        "|---|---|---|---|---|---|",
    ]
    for name, waits in rounds.items():
        step = interval([one.seconds / one.steps for one in waits])
        shares = [interval([100 * share for share in of]) for of in ([w.share for w in waits], [w.most_share for w in waits])]
        most = max(one.file_samples for one in waits)
        lines.append(f"| {name} | {len(waits)} | {step.median:.4f} | {shares[0]} | {shares[1]} | {most:,} |")
    return "\n".join(lines)


def rates(found: Mapping[str, Any]) -> str:
    """Markdown: images per second of whole batches by threads, and the speed-up over the least number."""
    whole = {one["threads"]: one["images_per_second"] for one in found["stages"] if one["stage"] == "whole batches"}
    least = whole[min(whole)]
    lines = ["| data.threads | images/s | over one |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {count} | {rate:,.0f} | {rate / least:.2f} |" for count, rate in sorted(whole.items()))])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="data file; by default made-up images")
    parser.add_argument("--images", type=int, default=10_000, help="made-up images")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="values of data.threads")
    parser.add_argument("--caches", nargs="+", default=["false", "true"], help="values of data.cache")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", nargs="*", default=["data.synthetic.height=256", "data.synthetic.width=256"], help="overrides")
    parser.add_argument("--out", type=Path, help="JSON of all rounds")
    chosen = parser.parse_args(arguments)
    cases = [Case(cache, threads) for cache in chosen.caches for threads in chosen.threads]
    found: dict[str, list[Waits]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="hpctrain-waits-") as folder:
        path = chosen.train or Path(folder) / "train.h5"
        if chosen.train is None:
            write_made_up(path, chosen.images)
        for number in range(chosen.rounds):
            for place, case in enumerate(cases):
                found[case.name].append(train(case, path.absolute(), Path(folder) / f"{number}-{place}", chosen))
    print(table(found), end="\n\n")
    alone = stages(chosen.threads, chosen.large)
    print(rates(alone))
    if chosen.out is not None:
        waits = {name: [asdict(one) | {"share": one.share} for one in of] for name, of in found.items()}
        conditions = {
            "ranks": chosen.ranks,
            "batch": chosen.batch,
            "epochs": chosen.epochs,
            "train": str(chosen.train or "made up"),
        }
        write_json(chosen.out, {"machine": machine_facts(), **conditions, "waits": waits, "stages": alone})
    return 0


if __name__ == "__main__":
    sys.exit(main())
