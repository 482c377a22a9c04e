"""Time training steps of PyTorch on one GPU, to compare them with hpctrain's.

    python benchmarks/gpu_peer.py --model resnet50 --batch 256 32 [--compile MODE]

bfloat16 autocast, channels last, SGD with momentum (fused), cuDNN's autotuning,
images on the device before the step. The networks are torchvision's. The
process does not import hpctrain. It prints one JSON line for each batch, which
contains the failure if the batch does not fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

_REPEATS, _STEPS, _WARM_UP = 9, 5, 5
_LEARNING_RATE, _MOMENTUM = 1e-4, 0.9
SKIP_CODE = 77


def available(device: str) -> str | None:
    """Return why PyTorch cannot be timed here; None if it can."""
    try:
        import torch
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision was built for another torch
        return f"PyTorch or torchvision cannot be imported ({error})"
    if device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU"
    return None


class PeerStep:
    """Forward, loss, backward and momentum update of one network on synthetic images that stay on the device."""

    def __init__(self, model: str, batch: int, pixels: int, device: str, *, mode: str) -> None:
        import torch
        from torchvision.models import get_model

        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self._torch, self._device = torch, device
        network = get_model(model).to(device).to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(network.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, fused=device == "cuda")
        if mode:
            torch._dynamo.reset()  # else the next batch size would be compiled as one that changes from step to step
        self._network = torch.compile(network, dynamic=False, mode=mode) if mode else network
        self._images = torch.randn(batch, 3, pixels, pixels, device=device).to(memory_format=torch.channels_last)
        self._labels = torch.randint(0, 1000, (batch,), device=device)
        self._loss = torch.nn.CrossEntropyLoss()

    def run(self) -> Any:
        """Run one step and return the loss, still on the device."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._torch.autocast(self._device, self._torch.bfloat16):
            loss = self._loss(self._network(self._images), self._labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def wait(self) -> None:
        """Until all steps are done."""
        if self._device == "cuda":
            self._torch.cuda.synchronize()


def measure(step: PeerStep, batch: int, repeats: int, steps: int) -> dict[str, Any]:
    """Seconds of a step in each of `repeats` turns of `steps` steps; the losses' finiteness is read after the clock."""
    for _ in range(_WARM_UP):
        loss = step.run()
    step.wait()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step.run()
        step.wait()
        seconds.append((time.perf_counter() - begin) / steps)
    median = statistics.median(seconds)
    return {"step_seconds": seconds, "median_seconds": median, "images_per_second": batch / median, "loss": float(loss)}


def one(chosen: argparse.Namespace, batch: int) -> dict[str, Any]:
    """The figures of one batch size."""
    import torch

    facts = {"model": chosen.model, "batch": batch, "compiled": chosen.compile, "torch": torch.__version__}
    if chosen.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    try:
        step = PeerStep(chosen.model, batch, chosen.pixels, chosen.device, mode=chosen.compile)
        step.run()
        step.wait()
        facts["first_step_seconds"] = time.perf_counter() - begin
        facts |= measure(step, batch, chosen.repeats, chosen.steps)
    except torch.OutOfMemoryError as error:
        return {**facts, "failure": str(error)}
    if chosen.device == "cuda":
        facts |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return facts


def main() -> int:
    """Time the batches of the command line. Return 77 if PyTorch is not installed or finds no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 32])
    parser.add_argument("--pixels", type=int, default=224, help="of both sides of an image")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the program")
    parser.add_argument(
        "--compile",
        default="",
        metavar="MODE",
        help="mode of torch.compile, such as reduce-overhead (CUDA graphs); plain by default",
    )
    parser.add_argument("--repeats", type=int, default=_REPEATS)
    parser.add_argument("--steps", type=int, default=_STEPS, help="steps of one repeat")
    chosen = parser.parse_args()
    reason = available(chosen.device)
    if reason is not None:
        print(reason)
        return SKIP_CODE
    for batch in chosen.batch:
        print(json.dumps(one(chosen, batch)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
