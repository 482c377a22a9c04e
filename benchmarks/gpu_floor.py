"""Arithmetic before any measurement: bytes, FLOP, launches and predicted time of a training step on a GPU.

    python -m benchmarks.gpu_floor resnet50 --batch 256 32
    python -m benchmarks.gpu_floor vgg16 --batch 64 --precision bfloat16 --device h200 --out FILE.json

Needs neither a GPU nor CUDA. Tables are added up by image size and by kind of kernel; the JSON has every layer's kernels, and the
predictions for all devices.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.devices import DEVICES
from benchmarks.gpu.floor import Clock, as_dict, step_of, tables
from hpctrain.models import catalogue
from hpctrain.storage.atomic_write import write_text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="resnet50", choices=catalogue.names(), metavar="MODEL")
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 32], help="images of a step")
    parser.add_argument("--precision", choices=("bfloat16", "tf32", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=tuple(DEVICES), default="h100")
    parser.add_argument("--out", type=Path, help="JSON file")
    chosen = parser.parse_args(arguments)
    if min(chosen.batch) < 1:
        parser.error(f"a batch of {min(chosen.batch)} images is empty; it must be at least 1")
    return chosen


def one_line_a_row(content: object) -> str:
    """JSON in which lists of plain values take one line."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\n\s*", " ", match[0]), text) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    devices = sorted(DEVICES, key=lambda name: name != chosen.device)  # the chosen one first
    clocks = [Clock(DEVICES[name], chosen.precision) for name in devices]
    steps = [step_of(chosen.model, batch, chosen.precision) for batch in chosen.batch]
    print("\n\n\n".join(tables(step, clocks[0]) for step in steps))
    if chosen.out is not None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(chosen.out, one_line_a_row({"steps": [as_dict(step, clocks) for step in steps]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
