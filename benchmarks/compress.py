"""Processor time of compressed messages, in one process and next to the sum of magnitudes of the same array.

    python -m benchmarks.compress                                        # float32, 10 million elements
    python -m benchmarks.compress --elements 1000000 --dtype float64 --out compress.json

Figures are medians of rounds in which all measure in turn; a ratio is of pairs of one round. `np.abs(x).sum()` is what an exact
rule for the cost of a selection is stated in: a pass that only counts takes at most three times as long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pairs import Interval, interval, ratio
from hpctrain.averaging.sixteen_bits import Cast16
from hpctrain.averaging.top_k import Selection, TopK, kept_at
from hpctrain.bench.interleaved import machine_facts
from hpctrain.storage.atomic_write import write_json

BASE = "np.abs(x).sum()"
DENSITIES = (0.001, 0.01, 0.1, 0.25)

Work = Callable[[], object]


def arrays(size: int, dtype: str) -> dict[str, np.ndarray]:
    """Kinds of arrays that selections find easy and hard."""
    numbers = np.random.default_rng(0)
    normal = numbers.standard_normal(size)
    scales = 10.0 ** np.repeat(numbers.integers(-5, 2, 100), size // 100 + 1)[:size]
    kinds = {
        "normal": normal,
        "layers of other scales": normal * scales,
        "heavy tails": normal * np.exp(3 * numbers.standard_normal(size)),
        "one in 1,000 not zero": np.where(numbers.random(size) < 0.001, normal, 0),
        "all zero": np.zeros(size),
    }
    return {name: values.astype(dtype) for name, values in kinds.items()}


def of_one_array(values: np.ndarray, densities: tuple[float, ...]) -> dict[str, Work]:
    """The things to be measured on an array, by name; the first is what all are compared with."""
    size, dtype = values.size, values.dtype.name
    passes = Selection(dtype)
    bits = values.view(passes.unsigned)
    median = int(np.median(bits & (passes.top - 1)))
    work: dict[str, Work] = {
        BASE: lambda: np.abs(values).sum(),
        "pass that counts one threshold": lambda: passes.counts(bits, (median,)),
        "pass that counts four": lambda: passes.counts(bits, (median, median + 1, median + 2, median + 3)),
        "np.argpartition of 1 %": lambda: np.argpartition(np.abs(values), size - kept_at(size, 0.01)),
    }
    for density in densities:
        work |= _of_top_k(values, TopK(size, dtype, kept_at(size, density)), f"top {density:.1%}")
    return work


def of_casts(values: np.ndarray) -> dict[str, Work]:
    """16-bit messages of an array, and what is added of a residual."""
    target, residual = values.copy(), np.zeros_like(values)
    work: dict[str, Work] = {BASE: lambda: np.abs(values).sum(), "residual: add": lambda: np.add(residual, values, out=residual)}
    for bits in ("bfloat16", "float16"):
        work |= _of_cast(values, target, Cast16(values.size, values.dtype.name, bits), bits)
    return work


def _of_top_k(values: np.ndarray, compressor: TopK, name: str) -> dict[str, Work]:
    message, target = np.empty(compressor.message_size, np.uint8), values.copy()
    return {
        f"{name}: compress": lambda: compressor.compress(values, message),
        f"{name}: add": lambda: compressor.add_to(message, target),
    }


def _of_cast(values: np.ndarray, target: np.ndarray, cast: Cast16, name: str) -> dict[str, Work]:
    message = np.empty(cast.message_size, np.uint8)
    return {
        f"{name}: compress": lambda: cast.compress(values, message),
        f"{name}: decompress": lambda: cast.decompress(message, target),
        f"{name}: add": lambda: cast.add_to(message, target),
    }


def measure(work: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of each, in all rounds; a round more comes first and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, run in work.items():
            begin = time.process_time()
            run()
            if number:
                seconds[name].append(time.process_time() - begin)
    return seconds


def table(title: str, seconds: Mapping[str, list[float]]) -> str:
    """Markdown: milliseconds, and the ratio to the first."""
    base = next(iter(seconds))
    lines = [f"{title}:", "", f"| | ms | over {base} |", "|---|---|---|"]
    for name, values in seconds.items():
        milliseconds = _scaled(interval(values), 1e3)
        lines.append(f"| {name} | {milliseconds} | {'' if name == base else ratio(values, seconds[base])} |")
    return "\n".join(lines)


def _scaled(value: Interval, factor: float) -> Interval:
    return Interval(factor * value.median, factor * value.low, factor * value.high)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON of all rounds")
    chosen = parser.parse_args(arguments)
    result: dict[str, Any] = {"elements": chosen.elements, "dtype": chosen.dtype, "machine": machine_facts(), "seconds": {}}
    kinds = arrays(chosen.elements, chosen.dtype)
    for kind, values in kinds.items():
        result["seconds"][kind] = measure(of_one_array(values, DENSITIES), chosen.rounds)
        print(table(f"{chosen.elements:,} {chosen.dtype}, {kind}", result["seconds"][kind]), end="\n\n", flush=True)
    result["seconds"]["16 bits"] = measure(of_casts(kinds["normal"]), chosen.rounds)
    print(table(f"{chosen.elements:,} {chosen.dtype} in 16 bits", result["seconds"]["16 bits"]))
    if chosen.out is not None:
        write_json(chosen.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
