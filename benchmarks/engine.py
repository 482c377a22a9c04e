"""Whole training steps of eight networks: our kernel sets against PyTorch, one process at a time in turn.

    python -m benchmarks.engine --peer-python PATH                       # all: 1 thread by CPU time, 2 threads by wall time
    python -m benchmarks.engine small-28 resnet20-32 --threads 1 --rounds 3 --peer-python PATH
    python -m benchmarks.engine --report benchmarks/results/engine.json  # the tables of an earlier run

A step is forward, loss, backward, momentum update and running statistics. PATH is a Python that has torch; each of its variants
(both memory formats, plain and with huge pages and the fused optimiser, with --compile also compiled) has a process of its own,
as have our kernel sets. Peers that are 25 % slower than the best one after three rounds stop there; all others run all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.before_after import NETS, Net
from benchmarks.engine_report import report
from benchmarks.interleaved import Rounds, Series, interleave, ours, peer, with_threads
from hpctrain.bench.machine import machine_facts
from hpctrain.storage.atomic_write import write_json

# name -> channels last, huge pages and fused optimiser, compiled
PEERS = {
    "torch": (False, False, False),
    "torch tuned": (False, True, False),
    "torch last": (True, False, False),
    "torch last tuned": (True, True, False),
}
COMPILED = {"torch compiled": (False, True, True), "torch last compiled": (True, True, True)}


def own_variants(chosen: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Our variants: name -> (backend, precision). Those of float32 have the backend's name."""
    pairs = [(backend, precision) for backend in chosen.backends for precision in chosen.precisions]
    return {backend if precision == "float32" else f"{backend} {precision}": (backend, precision) for backend, precision in pairs}


def commands(net: Net, threads: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """All variants: name -> (command, environment). Peers use autocast if one of our variants computes in bfloat16."""
    shape = {"model": net.model, "batch": net.batch, "pixels": net.pixels}
    plain = with_threads(os.environ, threads)
    found: dict[str, tuple[list[str], Mapping[str, str]]] = {
        name: (ours({**shape, "options": {}, "backend": backend, "precision": precision}), plain)
        for name, (backend, precision) in own_variants(chosen).items()
    }
    if chosen.peer_python is None:
        return found
    for name, (last, tuned, compile_it) in {**PEERS, **(COMPILED if chosen.compile else {})}.items():
        settings = {**shape, "threads": threads, "last": last, "fused": tuned, "compiled": compile_it}
        settings["autocast"] = "bfloat16" in chosen.precisions
        environment = {**plain, "THP_MEM_ALLOC_ENABLE": "1"} if tuned else plain
        found[name] = (peer(chosen.peer_python, settings), environment)
    return found


def measure(name: str, threads: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """All variants of one network with `threads` threads, as the JSON file stores them."""
    net = NETS[name] if chosen.batch is None else replace(NETS[name], batch=chosen.batch)
    clock = "cpu" if threads == 1 else "wall"
    variants = commands(net, threads, chosen)
    own = list(own_variants(chosen))
    peers = [variant for variant in variants if variant not in own]
    begin, load = time.perf_counter(), os.getloadavg()
    series = interleave(variants, Rounds(chosen.rounds, net.steps, clock=clock), peers)
    return {
        "network": name,
        **asdict(net),
        "threads": threads,
        "clock": clock,
        "load_before": load,
        "load_after": os.getloadavg(),
        "seconds": time.perf_counter() - begin,
        "ours": own,
        "peers": peers,
        "variants": {variant: as_dict(one) for variant, one in series.items()},
    }


def as_dict(series: Series) -> dict[str, Any]:
    """For JSON: all turns, nothing summed up."""
    return asdict(series)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETS), help=f"of {', '.join(NETS)}")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="1 is timed by the process's CPU time")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backends", nargs="+", default=["onednn", "numpy"])
    parser.add_argument("--precisions", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, help="images per step; default: those of the network")
    parser.add_argument("--peer-python", help="a Python that has torch; without it there is no peer")
    parser.add_argument("--compile", action="store_true", help="also torch.compile, which needs a C++ compiler and minutes")
    parser.add_argument("--out", type=Path, help="JSON file; written after every network")
    parser.add_argument("--report", type=Path, help="print the tables of this file and measure nothing")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.networks if name not in NETS]
    if unknown or chosen.rounds < 1 or min(chosen.threads) < 1:
        parser.error(f"unknown networks {unknown}, or rounds or threads below 1; the networks are {', '.join(NETS)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    if chosen.report is not None:
        print(report(json.loads(chosen.report.read_text())))
        return 0
    content: dict[str, Any] = {"machine": machine_facts(), "rounds": chosen.rounds, "runs": []}
    for name in chosen.networks:
        for threads in chosen.threads:
            content["runs"].append(measure(name, threads, chosen))
            print(report({**content, "runs": content["runs"][-1:]}), flush=True)
            if chosen.out is not None:
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                write_json(chosen.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
