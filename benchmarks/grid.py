"""Whole training steps on process grids: batch, model and domain plans of one number of ranks, and halos that hide.

    python -m benchmarks.grid grids resnet18                   # all grids of 4 ranks on this machine, by shared memory
    python -m benchmarks.grid grids vgg16 --hosts 2 --rate 1gbit   # the same on 2 hosts of 2 ranks; needs root and iproute2
    python -m benchmarks.grid halos vgg16 --rate 1gbit         # 2 hosts, one core each: hidden halos against blocking ones
    python -m benchmarks.grid --report benchmarks/results/grid-halos-vgg16.json

All variants run in one job and take turns; a figure is the median over rounds of values from one round, with its bootstrap
interval of 95 %. If there are more ranks than cores, the report states it: such times compare variants, but are no speed-ups.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, take_down_at_termination
from benchmarks.overlap import jobs
from benchmarks.pairs import Interval, interval, paired, ratio
from benchmarks.shapes import SHAPES, Shape
from hpctrain.bench.interleaved import machine_facts
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import find_mpiexec

_ROOT = Path(__file__).resolve().parent.parent
_SPLIT = {"vgg16": "classifier.*", "resnet18": "fc", "resnet50": "fc"}
_FEATURES = {"vgg16": "features.*", "resnet18": "layer[12].*", "resnet50": "layer[12].*"}


def grids(model: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Variants by name: every divisor of the ranks as grid.rows, with one use for all layers and with a mixture."""
    found: dict[str, dict[str, Any]] = {}
    for rows in (n for n in range(1, ranks + 1) if ranks % n == 0):
        grid = f"{rows}x{ranks // rows}"
        if rows == 1:
            found[f"{grid} batch"] = {"rows": 1}
            continue
        for use in ("batch", "domain", "model"):
            found[f"{grid} {use}"] = {"rows": rows, "default": use}
        found[f"{grid} batch + model"] = {"rows": rows, "use": {_SPLIT[model]: "model"}}
        found[f"{grid} domain + batch + model"] = {"rows": rows, "use": {_FEATURES[model]: "domain", _SPLIT[model]: "model"}}
    return found


def halos(model: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Variants by name: images over all ranks; moves waited for at once, hidden in backward, and hidden in both passes."""
    domain = {"rows": ranks, "default": "domain"}
    return {
        "blocking": {**domain, "hides": False},
        "hidden backward": domain,
        "hidden": {**domain, "overlapped": True},
    }


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run the job; all turns of all ranks."""
    take_down_at_termination()
    shape = SHAPES[chosen.model]
    shape = Shape(**shape.as_dict() | {"batch": chosen.batch or shape.batch, "pixels": chosen.pixels or shape.pixels})
    ranks = chosen.hosts * chosen.ranks_per_host if chosen.rate else chosen.ranks
    variants = (grids if chosen.what == "grids" else halos)(chosen.model, ranks)
    with jobs(chosen.timeout) as (directory, running):
        out, path = directory / "result.json", directory / "settings.json"
        settings = {
            "shape": shape.as_dict(),
            "kernels": chosen.kernels,
            "variants": variants,
            "rounds": chosen.rounds,
            "steps": chosen.steps,
            "averager": averager_of(chosen),
            "deadline_seconds": 120.0,
            "out": str(out),
        }
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.grid_ranks", str(path)]
        if chosen.rate:
            with Lab(chosen.hosts, chosen.rate) as lab:
                running.start("job", lab.mpiexec(command, chosen.ranks_per_host))
                running.wait("job")
        else:
            launcher = find_mpiexec()
            assert launcher is not None, "install the package mpich into this environment"
            running.start("job", [launcher, "-n", str(ranks), *command])
            running.wait("job")
        result = json.loads(out.read_text())
    where = f"{chosen.hosts} hosts at {chosen.rate}" if chosen.rate else "shared memory"
    known: dict[str, Any] = {name: getattr(chosen, name) for name in ("what", "model", "kernels", "rounds")}
    known |= {"where": where, "averager": averager_of(chosen)}
    return {**known, "machine": machine_facts(), "variants": variants, **result}


def averager_of(chosen: argparse.Namespace) -> str:
    """Halos are measured next to an averager that sends nothing under forward and backward: the link is theirs alone."""
    return str(chosen.averager or ("blocking" if chosen.what == "halos" else "sharded"))


def column(turns: Sequence[Sequence[dict[str, Any]]], key: str) -> list[float]:
    """The mean over the ranks, by round."""
    return [sum(rank[key] for rank in each) / len(each) for each in turns]


def report(result: dict[str, Any]) -> str:
    """A table in Markdown."""
    ranks, cores = result["ranks"], result["machine"]["cores"]
    head = f"{result['model']} ({result['shape']['pixels']} px, {result['shape']['batch']} images per rank), {ranks} ranks, "
    head += f"{result['where']}, kernels {result['kernels']}, averager {result['averager']}, {result['mpi']}, "
    head += f"{result['rounds']} rounds, load {result['machine']['load']:.1f}"
    if ranks > cores:
        head += f"; {ranks} ranks on {cores} cores: oversubscribed, no speed-up is to be read from it"
    first = next(iter(result["turns"]))
    titles = (
        f"| variant | s a step | over {first} | waited s | in split groups s | split MB | all MB | link MB | activations MB |"
    )
    lines = [head, "", titles, "|---|" + "---|" * 8]
    base = column(result["turns"][first], "step_seconds")
    for name, turns in result["turns"].items():
        times = column(turns, "step_seconds")
        # The keys of results are those of stored files, older than the name of the split group.
        mega = [interval(column(turns, key)).median / 1e6 for key in ("row_bytes", "all_bytes", "link_bytes")]
        most = max(fact["activation_bytes"] for fact in result["facts"][name]) / 1e6
        waited, in_split_groups = (interval(column(turns, key)).median for key in ("waited_seconds", "row_waited_seconds"))
        lines.append(
            f"| {name} | {interval(times).median:.3f} | {ratio(base, times)} | {waited:.3f} | {in_split_groups:.3f} | "
            + " | ".join(f"{value:.2f}" for value in mega)
            + f" | {most:.0f} |"
        )
    if result["what"] == "halos":
        lines += ["", *(f"{name}: {hidden(result, name)} of the waits for halos are gone" for name in list(result["turns"])[1:])]
    return "\n".join(lines)


def hidden(result: dict[str, Any], name: str) -> Interval:
    """1 - waits for halos of this variant over those of the blocking one."""
    waits = [column(result["turns"][each], "row_waited_seconds") for each in ("blocking", name)]
    return paired(lambda before, after: 1 - after / before, *waits)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["grids", "halos"])
    parser.add_argument("model", nargs="?", choices=sorted(_SPLIT))
    parser.add_argument("--ranks", type=int, default=4, help="on this machine, without --rate")
    parser.add_argument("--rate", help="of shaped links, as tc writes it; none: shared memory")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--kernels", default="onednn", choices=["onednn", "numpy"])
    parser.add_argument("--averager", choices=["blocking", "sharded"], help="sharded for grids, blocking for halos by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, help="images per rank")
    parser.add_argument("--pixels", type=int)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, help="print the table of an earlier run; runs nothing")
    chosen = parser.parse_args(arguments)
    if chosen.report is None and chosen.model is None:
        parser.error("say what to measure and on which model: grids or halos, " + ", ".join(_SPLIT))
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    if chosen.report is not None:
        print(report(json.loads(chosen.report.read_text())))
        return 0
    result = measure(chosen)
    out = chosen.out or _ROOT / f"benchmarks/results/grid-{chosen.what}-{chosen.model}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    print(report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
