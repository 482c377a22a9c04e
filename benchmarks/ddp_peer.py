"""One rank of PyTorch's DistributedDataParallel over gloo: the peer of `overlap.py`, stepping on request.

Runs in an environment with PyTorch and without hpctrain: a file of its own, started by `overlap.py` next to each rank. It listens
on a local socket; each line it gets is {"kind": "ddp" or "compute-only", "lead": n, "steps": n}, and each line it answers with
says how long a step took. It waits without spinning, so that the rank next to it has the core.

It is set up as well as we know: one thread, gradients as views into the buckets, the fused optimiser, and of the two memory
formats the one whose step is shorter here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # hpctrain_testing is not installed here

import torch
from process import be_nice, cpu_seconds, sent_bytes  # a file next to this one, because this environment lacks the package
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain_testing import torch_networks, torchvision_models

_TRIAL_STEPS, _TRIAL_SECONDS = 3, 2.0


class Trainer:
    """The network, made-up images and the optimiser of one rank.

    Args:
        shape: family, depth, width, classes, pixels, batch; or hpctrain's name of a model in place of the first three. last: True
            for channels last.
    """

    def __init__(self, shape: dict[str, Any], last: bool, distributed: bool) -> None:
        torch.manual_seed(0)
        format_ = torch.channels_last if last else torch.contiguous_format
        name = shape.get("model") or f"{shape['family']}{shape['depth']}"
        if shape.get("family") == "vgg":
            network = torchvision_models.narrow_vgg(name, shape["classes"], shape["width"], dropout=0.5)
        elif name in torchvision_models.NAMES:  # torchvision's ResNets have the published width
            network = torchvision_models.models.get_model(torchvision_models.NAMES[name], num_classes=shape["classes"])
        else:
            network = torch_networks.build(name, shape["classes"], 1.0)
        network = network.to(memory_format=format_)
        self.parameters = sum(parameter.numel() for parameter in network.parameters())
        self.network = DistributedDataParallel(network, gradient_as_bucket_view=True) if distributed else network
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, fused=True)
        self.loss = nn.CrossEntropyLoss()
        images = torch.randn(shape["batch"], 3, shape["pixels"], shape["pixels"])
        self.images = images.to(memory_format=format_)
        self.labels = torch.randint(0, shape["classes"], (shape["batch"],))

    def step(self, kind: str) -> None:
        """Forward, backward and update; "compute-only" leaves the gradients where they are."""
        alone = kind == "compute-only" and isinstance(self.network, DistributedDataParallel)
        self.optimizer.zero_grad(set_to_none=True)
        with self.network.no_sync() if alone else contextlib.nullcontext():
            self.loss(self.network(self.images), self.labels).backward()
        self.optimizer.step()


def shorter_format(shape: dict[str, Any]) -> bool:
    """True where channels last makes the shorter step; agreed on by all ranks."""
    seconds = torch.tensor([trial(shape, last) for last in (False, True)], dtype=torch.float64)
    torch.distributed.all_reduce(seconds)
    return bool(seconds[1] < seconds[0])


def trial(shape: dict[str, Any], last: bool) -> float:
    trainer = Trainer(shape, last, distributed=False)
    trainer.step("compute-only")
    seconds = [timed(lambda: trainer.step("compute-only"))]
    while len(seconds) < _TRIAL_STEPS and sum(seconds) < _TRIAL_SECONDS:
        seconds.append(timed(lambda: trainer.step("compute-only")))
    return min(seconds)


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def turn(trainer: Trainer, kind: str, lead: int, steps: int) -> dict[str, float]:
    """Run `lead` steps, then `steps` timed ones."""
    torch.distributed.barrier()
    sent = sent_bytes()
    for _ in range(lead):
        trainer.step(kind)
    begin, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(steps):
        trainer.step(kind)
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    torch.distributed.barrier()
    link = (sent_bytes() - sent) / (lead + steps)
    return {"step_seconds": seconds / steps, "cpu_seconds": cpu / steps, "link_bytes": link}


def serve(trainer: Trainer, connection: socket.socket, facts: dict[str, Any]) -> None:
    """Answer until the other side closes."""
    with connection.makefile("rw") as stream:
        stream.write(json.dumps(facts) + "\n")
        stream.flush()
        for line in stream:
            asked = json.loads(line)
            stream.write(json.dumps(turn(trainer, asked["kind"], asked["lead"], asked["steps"])) + "\n")
            stream.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="JSON: shape, nice")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--master", required=True, help="ADDRESS:PORT of rank 0")
    chosen = parser.parse_args()
    settings = json.loads(Path(chosen.settings).read_text())
    be_nice(settings["nice"])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{chosen.master}", rank=chosen.rank, world_size=chosen.ranks)
    last = shorter_format(settings["shape"])
    trainer = Trainer(settings["shape"], last, distributed=True)
    for kind in ("compute-only", "ddp"):  # DDP rebuilds its buckets after the first step
        trainer.step(kind)
    seconds = timed(lambda: trainer.step("ddp"))
    torch.distributed.barrier()
    facts = {
        "torch": torch.__version__,
        "memory_format": "channels last" if last else "contiguous",
        "parameters": trainer.parameters,
        "step_seconds": seconds,
    }
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(chosen.socket)
        listener.listen(1)
        connection, _ = listener.accept()
        with connection:
            serve(trainer, connection, facts)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
