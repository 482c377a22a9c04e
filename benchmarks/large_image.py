"""An image too large for one rank: VGG-16's features at batch 1, on one rank and split over several, under one memory limit.

    python -m benchmarks.large_image --pixels 1024 --ranks 4

First, one rank without a limit measures its peak resident memory, minus that after set-up of the weights. Then one rank, and
after it all ranks, run under the same limit on their data (RLIMIT_DATA): the single rank must fail, all ranks together must not.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.choice import make_backend
from hpctrain.comm.base import Communicator, SingleCommunicator
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import ArrayLoader, Batch
from hpctrain.data.sampler import Sampler
from hpctrain.launch.control_groups import resident_bytes
from hpctrain.models.families import vgg
from hpctrain.nn.layers import AdaptiveAveragePool, Flatten, Layer, Linear, Sequential
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.training.replica import Replica
from tests.support.jobs import clean_environment, find_mpiexec

_CLASSES, _STEPS, _LR = 10, 3, 1e-3


def model() -> Layer:
    """VGG-16's thirteen convolutions, the mean over the image, and one linear layer."""
    features = vgg.build(classes=_CLASSES).children()["features"]
    return Sequential(
        {"features": features, "avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(512, _CLASSES)}
    )


def train(comm: Communicator, pixels: int, kernels: str, limit_bytes: int) -> dict[str, Any]:
    """A few steps on the ranks of `comm`; what this rank's activations took. Collective."""
    progress = ProgressEngine(rank=comm.rank, deadline_seconds=300, abort=comm.abort)
    groups = GridGroups(ProcessGrid(comm, comm.size, 1))
    plan = ParallelPlan(comm.size, 1, Parallelism.DOMAIN)
    shape = (pixels, pixels, 3)
    network = make_network(model(), shape, make_backend(kernels).kernels, groups=groups, progress=progress, plan=plan)
    replica = Replica(network, groups=groups, progress=progress, strategy=Blocking, optimizer=partial(Sgd, momentum=0.9))
    replica.agree()
    for averager in replica.averagers.values():
        state = [view for segment in averager.owned() for view in averager.optimizer.state(segment).values()]
        for array in (averager.group.data, averager.group.grad, *state):  # touched: resident before activations are
            array += 0.0
    before = resident_bytes()
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit_bytes,) * 2)
    batch = made_up(replica, pixels)
    losses = []
    for _ in range(_STEPS):
        replica.step(batch, _LR)
        totals = replica.settle()
        assert totals is not None
        losses.append(totals.loss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    planned = network.program(batch.share.counts, training=True).activation_bytes
    return {"peak_bytes": peak - before, "planned_bytes": planned, "losses": losses}


def data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA counts now."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmData"].split()[0]) * 1024


def made_up(replica: Replica, pixels: int) -> Batch:
    """One image, of which this rank has its part; the label belongs to the first rank."""
    image = np.random.default_rng(0).standard_normal((1, pixels, pixels, 3)).astype(np.float32)
    return next(ArrayLoader(image, np.zeros(1, np.int64), Sampler(1, 1), **replica.place).epoch(0))


def child(chosen: argparse.Namespace) -> int:
    comm: Communicator = SingleCommunicator()
    if chosen.ranks > 1:
        from hpctrain.comm import mpi

        comm = mpi.world(300)
    found = comm.allgather_object(train(comm, chosen.pixels, chosen.kernels, chosen.limit))
    if comm.rank == 0:
        chosen.out.write_text(json.dumps(found))
    return 0


def job(chosen: argparse.Namespace, ranks: int, limit_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """(exit status, what each rank found; nothing where the job failed)."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        command = [sys.executable, "-m", "mpi4py"] if ranks > 1 else [sys.executable]
        command += ["-m", "benchmarks.large_image", "--child", "--ranks", str(ranks), "--pixels", str(chosen.pixels)]
        command += ["--kernels", chosen.kernels, "--limit", str(limit_bytes), "--out", str(out)]
        launcher = find_mpiexec()
        if ranks > 1:
            assert launcher is not None, "install the package mpich into this environment"
            command = [launcher, "-n", str(ranks), *command]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=chosen.timeout)
        if done.returncode:
            print(f"{ranks} ranks, limit {limit_bytes / 1e6:.0f} MB: {(done.stderr.strip().splitlines() or ['?'])[-1][:120]}")
        return done.returncode, json.loads(out.read_text()) if out.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kernels", default="onednn", choices=["onednn", "numpy"])
    parser.add_argument("--share", type=float, default=0.5, help="limit for every rank, of what one rank needs")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        return child(chosen)
    _, (serial,) = job(chosen, 1, 0)
    _, split = job(chosen, chosen.ranks, 0)
    limit = int(serial["peak_bytes"] * chosen.share)
    failed, _ = job(chosen, 1, limit)
    passed, limited = job(chosen, chosen.ranks, limit)
    peak = max(rank["peak_bytes"] for rank in split)
    result = {
        "pixels": chosen.pixels,
        "ranks": chosen.ranks,
        "kernels": chosen.kernels,
        "serial": serial,
        "split": split,
        "limit_bytes": limit,
        "one_rank_failed": failed != 0,
        "all_ranks_passed": passed == 0 and len(limited) == chosen.ranks,
        "peak_over_share": peak * chosen.ranks / serial["peak_bytes"],
        "planned_over_share": max(rank["planned_bytes"] for rank in split) * chosen.ranks / serial["planned_bytes"],
    }
    text = json.dumps(result, indent=1)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
