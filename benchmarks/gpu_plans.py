"""Plans of cuDNN for every convolution of every model, on GPUs that are not here. `make gpu-plans` installs what this needs.

    python -m benchmarks.gpu_plans --out FILE.json
    python -m benchmarks.gpu_plans --models resnet50 --batch 64 --devices h100

Plans are made by the package's own code from each device's properties (benchmarks/gpu/properties: from data sheets, not read from
a device), for training at the models' own image sizes: deterministic and in a bounded workspace. So cuDNN has checked that the
engine supports the convolution, and compiled it where engines are compiled at run time. Nothing is run, so speed and results
remain unknown. Ends with 1 where a convolution has no plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks.gpu.convolutions import convolutions, random_convolutions
from hpctrain.backend.cuda.device import ConvolutionKey, Precision
from hpctrain.backend.cuda.libraries import WORKSPACE_LIMIT_BYTES, CudnnPlans, describe, library
from hpctrain.core.errors import BackendError
from hpctrain.models import catalogue
from hpctrain.storage.atomic_write import write_text

PROPERTIES = Path(__file__).parent / "gpu" / "properties"
PRECISIONS: tuple[Precision, ...] = tuple(precision for precision in get_args(Precision) if precision != "float64")


@dataclass(frozen=True)
class Outcome:
    """The plan of one convolution on one device; `failure` is the sentence that says why there is none."""

    key: ConvolutionKey
    seconds: float
    plan: str = ""
    workspace_bytes: int = 0
    failure: str = ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    devices = sorted(path.stem for path in PROPERTIES.glob("*.json"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(catalogue.names()), choices=catalogue.names(), metavar="MODEL")
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 32], help="images of a step")
    parser.add_argument("--devices", nargs="+", default=devices, choices=devices)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="convolutions of random geometry next to these")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def keys_of(models: Iterable[str], batches: Iterable[int], precision: Precision) -> list[ConvolutionKey]:
    """All convolutions of these models, each once."""
    return list({key: None for model in models for batch in batches for key in convolutions(model, batch, precision)})


def plan(plans: CudnnPlans, key: ConvolutionKey) -> Outcome:
    """The outcome for one convolution."""
    start = time.perf_counter()
    try:
        chosen = plans.plan(key)
    except BackendError as error:
        return Outcome(key, time.perf_counter() - start, failure=str(error))
    return Outcome(key, time.perf_counter() - start, chosen.name, chosen.workspace_bytes)


def row(device: str, precision: str, of: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One line of the table."""
    return {
        "device": device,
        "precision": precision,
        "of": of,
        "convolutions": len(outcomes),
        "without_plan": sum(bool(outcome.failure) for outcome in outcomes),
        "largest_workspace_bytes": max((outcome.workspace_bytes for outcome in outcomes), default=0),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 2),
        "slowest_seconds": round(max((outcome.seconds for outcome in outcomes), default=0.0), 2),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    titles = f"{'convolutions':>13}{'without plan':>14}{'workspace':>11}{'seconds':>9}{'slowest':>9}"
    lines = [f"{'device':8}{'precision':11}{'of':10}{titles}"]
    for one in rows:
        lines.append(
            f"{one['device']:8}{one['precision']:11}{one['of']:10}{one['convolutions']:13}{one['without_plan']:14}"
            f"{one['largest_workspace_bytes'] / 2**20:7.0f} MiB{one['seconds']:9.2f}{one['slowest_seconds']:9.2f}"
        )
    return "\n".join(lines)


def as_lines(content: dict[str, Any]) -> str:
    """JSON in which every entry of a list or table takes one line."""
    blocks = []
    for name, value in content.items():
        if isinstance(value, dict):
            text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "\n }"
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
        else:
            text = json.dumps(value)
        blocks.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    rows: list[dict[str, Any]] = []
    engines: dict[str, dict[str, Any]] = defaultdict(dict)
    failures: list[str] = []
    for precision in chosen.precisions:
        wanted = {"models": keys_of(chosen.models, chosen.batch, precision)}
        if chosen.random:
            wanted["random"] = random_convolutions(chosen.random, precision)
        for device in chosen.devices:
            plans = CudnnPlans(properties=json.loads((PROPERTIES / f"{device}.json").read_text()))
            for of, keys in wanted.items():
                outcomes = [plan(plans, key) for key in keys]
                rows.append(row(device, precision, of, outcomes))
                failures += [f"{device}: {outcome.failure}" for outcome in outcomes if outcome.failure]
                for outcome in outcomes if of == "models" else ():
                    engine = outcome.plan.partition("_")[0] or None
                    engines[describe(outcome.key)][device] = [engine, outcome.workspace_bytes]
    print("\n".join([table(rows), *failures]))
    if chosen.out is not None:
        content = {
            "cudnn": library().backend_version_string(),
            "models": chosen.models,
            "batches": chosen.batch,
            "workspace_limit_bytes": WORKSPACE_LIMIT_BYTES,
            "rows": rows,
            "without_plan": failures,
            "engine_and_workspace_bytes": engines,
        }
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(chosen.out, as_lines(content))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
