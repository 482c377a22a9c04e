"""Bytes that a job reads from its data file, and memory that it takes, on several hosts of a laboratory.

    python -m benchmarks.cache_reads --out cache-reads.json          # as root: 2 hosts of 2 ranks, 3 epochs
    python -m benchmarks.cache_reads --megabytes-per-second 5        # the file on a slow file system

For each kind of cache a job reads all batches of some epochs, without a network. Bytes are those that system calls of all ranks
have read (/proc/self/io), less those of the look itself; memory is what the ranks of a host hold together (Pss) beyond what they
held before. A slow file system is a pause in each call that reads the file, as long as its bytes take at that speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hpctrain
from benchmarks.lab import Lab, take_down_at_termination
from hpctrain.data import readers
from hpctrain.data.writer import write_data_file
from tests.support.jobs import clean_environment

CACHES: dict[str, dict[str, Any]] = {
    "first_epoch": {"fill": "first_epoch"},
    "start": {"fill": "start"},
    "half, start": {"memory": 0, "fill": "start"},  # its memory follows from the file
    "none": {"memory": 0},
}
_SHAPE = (64, 64, 3)
_BATCH = 64


def _held_bytes() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024


def _read_bytes() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar"))


def _slow_down(bytes_per_second: float) -> None:
    """Let each call that reads the data file take as long as its bytes do."""
    preadv = os.preadv

    class SlowSystem:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def preadv(self, descriptor: int, buffers: list[memoryview], at: int) -> int:
            count = preadv(descriptor, buffers, at)
            time.sleep(count / bytes_per_second)
            return count

    readers.os = SlowSystem()  # type: ignore[assignment]


def rank(path: Path, cache: dict[str, Any], epochs: int, bytes_per_second: float | None) -> None:
    """One rank of the job: reads all batches; rank 0 prints the figures as JSON."""
    with hpctrain.start(batch=_BATCH) as job:
        if bytes_per_second is not None:
            _slow_down(bytes_per_second / job.size)
        model = hpctrain.Sequential({"flatten": hpctrain.Flatten(), "fc": hpctrain.Linear(int(np.prod(_SHAPE)), 4)})
        replica = job.replica(model, _SHAPE)
        job.world.allgather_object(None)
        look = -_read_bytes() + _read_bytes()
        held, looks, times = _held_bytes(), [_read_bytes()], [time.perf_counter()]
        loader = job.loader(replica, path, cache=cache)
        looks.append(_read_bytes())
        times.append(time.perf_counter())
        for epoch in range(epochs):
            for _ in loader.epoch(epoch):
                pass
            looks.append(_read_bytes())
            job.world.allgather_object(None)
            times.append(time.perf_counter())
        mine = [later - earlier - look for earlier, later in itertools.pairwise(looks)]
        of_ranks = job.world.allgather_object((mine, _held_bytes() - held, job.grid.node_of[job.rank]))
        memory = [0] * (max(node for *_, node in of_ranks) + 1)
        for _, more, node in of_ranks:
            memory[node] += more
        seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
        read = np.sum([read for read, *_ in of_ranks], axis=0).tolist()
        job.print(json.dumps({"read_bytes": read, "seconds": seconds, "node_bytes": memory}))


def measure(lab: Lab, path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of each kind of cache."""
    size_bytes = arguments.samples * int(np.prod(_SHAPE))
    found: dict[str, Any] = {}
    for name, cache in CACHES.items():
        chosen = cache | ({"memory": size_bytes // 2} if name.startswith("half") else {})
        options = ["--rank", json.dumps(chosen), "--file", str(path), "--epochs", str(arguments.epochs)]
        if arguments.megabytes_per_second is not None:
            options += ["--megabytes-per-second", str(arguments.megabytes_per_second)]
        command = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.cache_reads", *options]
        done = subprocess.run(
            lab.mpiexec(command, arguments.ranks_per_host), env=clean_environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        found[name] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        shares = " ".join(f"{count / size_bytes:.4f}" for count in found[name]["read_bytes"])
        times = " ".join(f"{seconds:.2f}" for seconds in found[name]["seconds"])
        memory = " ".join(f"{count / size_bytes:.3f}" for count in found[name]["node_bytes"])
        print(f"{name}: read at the start and in each epoch, in sizes of the file: {shares}; seconds {times}; memory {memory}")
    return {"file_bytes": size_bytes, "caches": found}


def main() -> None:
    """Run as a rank, or as the program that starts them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--megabytes-per-second", type=float)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    speed = None if arguments.megabytes_per_second is None else 1e6 * arguments.megabytes_per_second
    if arguments.rank is not None:
        rank(arguments.file, json.loads(arguments.rank), arguments.epochs, speed)
        return
    take_down_at_termination()
    with tempfile.TemporaryDirectory() as folder, Lab(arguments.hosts, None, "hpctrain-cache-") as lab:
        path = Path(folder) / "images.h5"
        generator = np.random.default_rng(1)
        images = generator.integers(0, 256, (arguments.samples, *_SHAPE), np.uint8)
        labels = generator.integers(0, 4, arguments.samples)
        write_data_file(path, len(images), _SHAPE, [f"class {number}" for number in range(4)], [(images, labels)])
        results = measure(lab, path, arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
