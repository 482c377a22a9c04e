"""Process that runs whole training steps of PyTorch on request: the counterpart in the engine's benchmarks.

It is started by its path and runs in any Python with PyTorch and torchvision, with or without hpctrain. It follows the protocol
of `interleaved.py`, with JSON lines as input and output. The networks are torchvision's, by name.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from typing import Any

try:
    import torch
    from torch import nn
    from torchvision.models import get_model, list_models
except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision was built for another torch
    sys.exit(f"{sys.executable} cannot import torch and torchvision: {error}")

_BATCHES, _CHANNELS, _CLASSES = 3, 3, 1000
_LEARNING_RATE, _MOMENTUM = 1e-4, 0.9


class TorchStep:
    """Training step of PyTorch: forward, loss, backward and momentum update on synthetic images in memory.

    The steps cycle through three batches. With `autocast`, forward and the loss compute in bfloat16 where PyTorch chooses it.
    """

    def __init__(
        self, name: str, batch: int, pixels: int, *, last: bool, fused: bool, compiled: bool, autocast: bool = False
    ) -> None:
        torch.manual_seed(0)
        format_ = torch.channels_last if last else torch.contiguous_format
        network = get_model(name).to(memory_format=format_)
        self.parameters = sum(parameter.numel() for parameter in network.parameters())
        self._optimizer = torch.optim.SGD(network.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, fused=fused or None)
        self._network = torch.compile(network) if compiled else network
        images = (torch.randn(batch, _CHANNELS, pixels, pixels) for _ in range(_BATCHES))
        self._images = [each.to(memory_format=format_) for each in images]
        self._labels = [torch.randint(0, _CLASSES, (batch,)) for _ in range(_BATCHES)]
        self._loss = nn.CrossEntropyLoss()
        self._autocast = autocast
        self._step = 0

    def run(self) -> float:
        """Run one step, and return the mean loss."""
        turn = self._step % _BATCHES
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss = self._loss(self._network(self._images[turn]), self._labels[turn])
        loss.backward()
        self._optimizer.step()
        self._step += 1
        return float(loss.detach())


def serve(step: TorchStep, answer: Any) -> None:
    """Run the number of steps that each line of standard input requests, until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        idle = time.process_time()
        begin = time.perf_counter()
        losses = [step.run() for _ in range(request["steps"])]
        wall, cpu = time.perf_counter() - begin, time.process_time() - idle
        answer(
            {
                "wall_seconds": wall,
                "cpu_seconds": cpu,
                "finite": all(map(math.isfinite, losses)),
                "loss": losses[-1],
                "cpu_before_seconds": idle,
                "cpu_after_seconds": time.process_time(),
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )


def main() -> int:
    """Serve steps of the network that the command line describes, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="JSON: model, batch, pixels, threads, last, fused, compiled, autocast")
    settings = json.loads(parser.parse_args().settings)
    if settings["model"] not in list_models():
        sys.exit(f"torchvision has no model {settings['model']!r}")
    torch.set_num_threads(settings["threads"])
    how = {name: settings.get(name, False) for name in ("last", "fused", "compiled", "autocast")}
    step = TorchStep(settings["model"], settings["batch"], settings["pixels"], **how)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), flush=True)

    answer({"version": torch.__version__, "parameters": step.parameters, "threads": torch.get_num_threads()})
    serve(step, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
