"""Test accuracies of a configuration with several averagers, over seeds: what an averager that changes the optimisation costs.

    python -m benchmarks.accuracy configs/cifar10-resnet20-short.yaml epochs=10                    # all that the results lack
    python -m benchmarks.accuracy FILE epochs=10 --only sharded lazy --seeds 1 2 3 --ranks 2
    python -m benchmarks.accuracy FILE --add "rarer=averager={name: lazy, layers: 4}"              # a variant of your own
    python -m benchmarks.accuracy --report                                                         # Markdown; runs nothing

Each training is `hpctrain train FILE` with the overrides of its variant and its seed. They go seed by seed, so that a run that is
interrupted has compared all variants over the seeds that it was through with; the training that it was at resumes from its newest
checkpoint. Differences are of pairs with the same seed, with Student's 95 % interval of their mean.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hpctrain.runs.directory import runs, stored_checkpoints
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import find_mpiexec

_RESULTS = Path(__file__).resolve().parent / "results"
OUT, WORK = _RESULTS / "accuracy.json", _RESULTS / "accuracy-runs"
NAME = "accuracy"  # of all trainings; each has a directory of its own
BASE = "sharded"

#: by name, the overrides of a variant; the others are compared with BASE
VARIANTS: Mapping[str, tuple[str, ...]] = {
    BASE: ("averager=sharded",),
    "bfloat16": ("averager={name: sharded, wire: bfloat16}",),
    "float16": ("averager={name: sharded, wire: float16}",),
    "sparse": ("averager={name: sparse, density: 0.01, two_level: false}",),
    "lazy": ("averager=lazy",),
}

# The 97.5 % quantiles of Student's distribution for 1 to 9 degrees of freedom.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and half the width of its 95 % interval; infinite for one pair."""

    mean: float
    half_width: float
    pairs: int


def pending(variants: Iterable[str], seeds: Sequence[int], done: Mapping[str, Mapping[str, float]]) -> list[tuple[str, int]]:
    """(variant, seed) of each training that is still to be made, seed by seed."""
    names = list(variants)
    return [(name, seed) for seed in seeds for name in names if str(seed) not in done.get(name, {})]


def command(file: str, overrides: Sequence[str], seed: int, output: Path, ranks: int, *, resume: bool) -> list[str]:
    """The arguments of one training, after those that start Python."""
    words = ["-m", "hpctrain", "train", file, *overrides, f"seed={seed}", f"name={NAME}", f"output={output}"]
    return [*(["-m", "mpi4py"] if ranks > 1 else []), *words, *(["--resume", "auto"] if resume else [])]


def final_accuracy(records: Iterable[Mapping[str, Any]]) -> float | None:
    """The share of test images that the last evaluation got right; None where there was none."""
    evaluations = [record for record in records if record.get("kind") == "evaluation"]
    return float(evaluations[-1]["top1"]) if evaluations else None


def difference(values: Mapping[str, float], base: Mapping[str, float]) -> Difference | None:
    """The difference to the base, over the seeds that both have; None where there are none."""
    apart = [values[seed] - base[seed] for seed in values if seed in base]
    if not apart:
        return None
    if len(apart) == 1:
        return Difference(apart[0], math.inf, 1)
    quantile = _QUANTILES[min(len(apart) - 1, len(_QUANTILES)) - 1]
    return Difference(mean(apart), quantile * stdev(apart) / math.sqrt(len(apart)), len(apart))


def markdown(results: Mapping[str, Any]) -> str:
    """A table of test accuracies in percent, with the differences to the base in points."""
    done: Mapping[str, Mapping[str, float]] = results["accuracy"]
    seeds = sorted({seed for of_variant in done.values() for seed in of_variant}, key=int)
    heads = ("averager", *(f"seed {seed}" for seed in seeds), "mean", f"less {BASE}, points", "95 % interval")
    rows = [heads, ("---", *("---:" for _ in heads[1:]))]
    for name, values in done.items():
        if not values:
            continue
        cells = [f"{100 * values[seed]:.2f}" if seed in values else "" for seed in seeds]
        apart = None if name == BASE else difference(values, done.get(BASE, {}))
        points = ("", "") if apart is None else (f"{100 * apart.mean:+.2f}", _interval(apart))
        rows.append((name, *cells, f"{100 * mean(values.values()):.2f}", *points))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    words = " ".join([results["file"], *results["overrides"]])
    return f"`{words}`, {results['ranks']} ranks, test accuracy in %\n\n{table}\n"


def _interval(apart: Difference) -> str:
    if math.isinf(apart.half_width):
        return ""
    return f"[{100 * (apart.mean - apart.half_width):+.2f}, {100 * (apart.mean + apart.half_width):+.2f}]"


def variants_of(only: Sequence[str], add: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The chosen variants, the base first.

    Args:
        only: names; all of `VARIANTS` where it is empty. add: "name=overrides", the overrides as a shell splits them.

    Raises:
        ValueError: an unknown name, or one without overrides.
    """
    known = dict(VARIANTS)
    for text in add:
        name, _, words = text.partition("=")
        if not name or not words:
            raise ValueError(f"{text!r} is no variant; write name=overrides, such as rarer=averager={{name: lazy, layers: 4}}.")
        known[name] = tuple(shlex.split(words)) if "{" not in words else (words,)
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(f"There is no variant {unknown[0]}; there are {', '.join(known)}.")
    return {name: words for name, words in known.items() if not only or name == BASE or name in only}


def read(path: Path, task: Mapping[str, Any]) -> dict[str, Any]:
    """The results so far; empty ones where there is no file.

    Raises:
        ValueError: they are of another configuration, of other overrides or ranks.
    """
    if not path.exists():
        return {**task, "accuracy": {}}
    stored: dict[str, Any] = json.loads(path.read_text())
    different = [key for key, value in task.items() if stored[key] != value]
    if different:
        key = different[0]
        raise ValueError(f"{path} has results of {key} {stored[key]}, and {task[key]} is asked for; give another --out.")
    return stored


def train(file: str, overrides: Sequence[str], seed: int, output: Path, ranks: int) -> float:
    """Train, or go on with a training that was interrupted; give its test accuracy.

    Raises:
        RuntimeError: the training failed, or evaluated nothing.
    """
    resume = any(stored_checkpoints(run.checkpoints) for run in runs(output, NAME))
    words = [sys.executable, *command(file, overrides, seed, output, ranks, resume=resume)]
    if ranks > 1:
        launcher = find_mpiexec()
        if launcher is None:
            raise RuntimeError("There is no mpiexec; install the package mpich into this environment.")
        words = [launcher, "-n", str(ranks), *words]
    if subprocess.run(words, check=False).returncode:
        raise RuntimeError(f"A training failed: {shlex.join(words)}")
    newest = next(iter(runs(output, NAME)), None)
    accuracy = None if newest is None else final_accuracy(newest.metrics())
    if accuracy is None:
        raise RuntimeError(f"The training in {output} has no evaluation; set data.test in {file}.")
    return accuracy


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="the configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all trainings")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--add", action="append", default=[], metavar="NAME=OVERRIDES", help="another variant")
    parser.add_argument("--out", type=Path, default=OUT, help="the file of results")
    parser.add_argument("--work", type=Path, default=WORK, help="where the trainings' directories go")
    parser.add_argument("--report", action="store_true", help="print the table and run nothing")
    chosen = parser.parse_args(arguments)
    if chosen.file is None and not chosen.report:
        parser.error("give a configuration, or --report")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    chosen = parse(arguments)
    try:
        if chosen.report:
            print(markdown(json.loads(chosen.out.read_text())))
            return 0
        variants = variants_of(chosen.only, chosen.add)
        results = read(chosen.out, {"file": chosen.file, "overrides": chosen.overrides, "ranks": chosen.ranks})
        done = results["accuracy"]
        for name, seed in pending(variants, chosen.seeds, done):
            output = chosen.work / f"{name}-{seed}"
            overrides = (*chosen.overrides, *variants[name])
            done.setdefault(name, {})[str(seed)] = train(chosen.file, overrides, seed, output, chosen.ranks)
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(chosen.out, results)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
