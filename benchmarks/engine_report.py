"""The tables of `engine.py`'s JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.pairs import Interval, ratio


def report(content: Mapping[str, Any]) -> str:
    """One table per run, and above them the machine."""
    facts = ", ".join(f"{key} {value}" for key, value in content["machine"].items())
    return "\n\n".join([facts, *(table(run) for run in content["runs"])])


def table(run: Mapping[str, Any]) -> str:
    """Variants, fastest first: step time, images per second, how many times as fast as the best peer, memory."""
    best = best_peer(run)
    clock = "CPU time" if run["clock"] == "cpu" else "wall time"
    lines = [
        f"{run['network']}, batch {run['batch']}, {run['pixels']} px, {run['threads']} threads, {clock}, "
        f"{run['steps']} steps a round, load {run['load_before'][0]:.1f} to {run['load_after'][0]:.1f}, {run['seconds']:.0f} s"
    ]
    widths = "{:<20} {:>11} {:>10} {:>24} {:>9} {:>7} {:>7}  {}"
    lines.append(widths.format("variant", "ms/step", "images/s", f"speed / {best or '-'}", "peak MB", "memory", "rounds", ""))
    for name in sorted(run["variants"], key=lambda one: _median(run, one)):
        variant = run["variants"][name]
        if not variant["turns"]:
            lines.append(f"{name:<20} failed: {str(variant['failure']).splitlines()[-1][:100]}")
            continue
        seconds, peak = _median(run, name), peak_bytes(variant)
        speed = str(speedup(run, name, best)) if best is not None else "-"
        memory = f"{peak / peak_bytes(run['variants'][best]):.2f}" if best is not None else "-"
        rate = run["batch"] / seconds
        numbers = (f"{seconds * 1e3:.2f}", f"{rate:.2f}", speed, f"{peak / 1e6:.0f}", memory, str(len(variant["turns"])))
        lines.append(widths.format(name, *numbers, _note(run, variant)))
    return "\n".join(lines)


def _note(run: Mapping[str, Any], variant: Mapping[str, Any]) -> str:
    idle = variant["idle_cpu_seconds"] / max(1, len(variant["turns"]))
    notes = ["stopped early"] if variant["dropped"] else []
    if variant["failure"] is not None:
        notes.append("failed")
    if not all(turn["finite"] for turn in variant["turns"]):
        notes.append("LOSS NOT FINITE")
    if idle > 0.02 * run["seconds"] / max(1, len(run["variants"]) * len(variant["turns"])):
        notes.append(f"{idle * 1e3:.0f} ms of CPU time a round while others had their turn")
    if variant["first_seconds"] > 10 * _median_of(variant, "wall"):
        notes.append(f"first step {variant['first_seconds']:.0f} s")
    return ", ".join(notes)


def best_peer(run: Mapping[str, Any]) -> str | None:
    """The peer with the lowest median; None where none ran."""
    ran = [name for name in run["peers"] if run["variants"][name]["turns"]]
    return min(ran, key=lambda name: _median(run, name), default=None)


def speedup(run: Mapping[str, Any], name: str, peer: str) -> Interval:
    """How many times as fast as `peer`: median of the rounds' ratios, over the rounds that both ran."""
    theirs, own = (_seconds(run["variants"][each], run["clock"]) for each in (peer, name))
    rounds = min(len(theirs), len(own))
    return ratio(theirs[:rounds], own[:rounds])


def peak_bytes(variant: Mapping[str, Any]) -> int:
    """The most memory that the variant's process held."""
    return max((int(turn["peak_bytes"]) for turn in variant["turns"]), default=0)


def _seconds(variant: Mapping[str, Any], clock: str) -> list[float]:
    return [float(turn[f"{clock}_seconds"]) / variant["steps"] for turn in variant["turns"]]


def _median_of(variant: Mapping[str, Any], clock: str) -> float:
    found = _seconds(variant, clock)
    return float(np.median(found)) if found else float("inf")


def _median(run: Mapping[str, Any], name: str) -> float:
    return _median_of(run["variants"][name], run["clock"])
