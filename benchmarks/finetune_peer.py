"""PyTorch trains by a configuration of hpctrain: the same initial weights, the very batches of its loader, the same optimiser.

    python -m benchmarks.finetune_peer FILE [KEY=VALUE ...] --out DIRECTORY

The model is torchvision's of the same name, with the weights that a run of that configuration and seed begins with, those of the
last layer included. The learning rate of each step is that of the configured schedule, so order, augmentation and rates are those
of `hpctrain train`; what differs is who computes. DIRECTORY gets metrics.jsonl and config.yaml, as a run has them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.cli.arguments import load_config
from hpctrain.comm.base import SingleCommunicator
from hpctrain.config.load import dump
from hpctrain.config.options import filled
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError
from hpctrain.data.loader import Batch, Loader
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.session import Session
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.threads import ThreadPlan
from hpctrain.models.state_dict import export
from hpctrain.run.build import TrainingSetup, build, start_from_weights
from hpctrain_testing import torchvision_models


def prepare(file: Path, overrides: Sequence[str]) -> tuple[Config, TrainingSetup]:
    """The configuration, and our loaders, schedule and replica with its initial weights, in a job of one process.

    Raises:
        ConfigError: the configuration has what this program does not do.
    """
    config = filled(load_config(file, overrides)[0])
    check(config)
    session = Session.start(Resolved(config), Launcher("none"), ThreadPlan(1, 1, "the peer"), SingleCommunicator(), {})
    parts = build(session)
    start_from_weights(session, parts.replica)
    return config, parts


def check(config: Config) -> None:
    """Refuse settings that this program does not pass on to PyTorch.

    Raises:
        ConfigError: names the key.
    """
    wanted = {
        "optimizer.name": (config.optimizer.name, "sgd"),
        "optimizer.clip_norm": (config.optimizer.options["clip_norm"], None),
        "data.mixing": (config.data.mixing.mixes, False),
        "ema.decay": (config.ema.decay, None),
        "init.freeze": (config.init.freeze, ()),
        "micro_batches": (config.micro_batches, 1),
    }
    for key, (value, legal) in wanted.items():
        if value != legal:
            raise ConfigError(f"{key} is {value}, which the program of the peer does not do; the value that it knows is {legal}.")
    if config.model.name not in torchvision_models.NAMES:
        raise ConfigError(f"torchvision has no {config.model.name}; it has {', '.join(torchvision_models.NAMES)}.")


def torch_model(config: Config, parts: TrainingSetup) -> Any:
    """torchvision's model with the weights and statistics of the replica."""
    network = parts.replica.network
    model = torchvision_models.module(config.model.name, len(parts.data.class_names), seed=0)
    state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in export(network).items()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys), missing
    return model.to(memory_format=torch.channels_last)


def torch_optimizer(config: Config, model: Any) -> torch.optim.Optimizer:
    """SGD as configured; where norms and biases have no decay here, they have none there."""
    options = config.optimizer.options
    parameters = list(model.parameters())
    spared = [one for one in parameters if one.ndim == 1 and options["decay_exclude"] == "norm_and_bias"]
    decayed = [one for one in parameters if not any(one is other for other in spared)]
    groups = [{"params": decayed, "weight_decay": options["weight_decay"]}, {"params": spared, "weight_decay": 0.0}]
    chosen = [group for group in groups if group["params"]]
    return torch.optim.SGD(chosen, lr=config.optimizer.lr, momentum=options["momentum"], nesterov=options["nesterov"])


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, C, H, W), channels last in memory as ours are, and labels; they share the loader's memory."""
    return torch.from_numpy(batch.x).permute(0, 3, 1, 2), torch.from_numpy(batch.y)


def train(config: Config, parts: TrainingSetup, model: Any) -> Iterator[dict[str, Any]]:
    """Records of epochs and evaluations, in the form of a run's metrics."""
    optimizer = torch_optimizer(config, model)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=config.loss.label_smoothing)
    step = 0
    for epoch in range(config.epochs):
        model.train()
        total, right, count = 0.0, 0, 0
        for batch in parts.loader.epoch(epoch, 0):
            images, labels = tensors(batch)
            for group in optimizer.param_groups:
                group["lr"] = parts.schedule.lr(step)
            optimizer.zero_grad()
            logits = model(images)
            value = loss(logits, labels)
            value.backward()
            optimizer.step()
            step += 1
            total, count = total + value.item() * len(labels), count + len(labels)
            right += int((logits.argmax(1) == labels).sum())
        yield {"kind": "epoch", "epoch": epoch + 1, "step": step, "loss": total / count, "top1": right / count}
        if parts.evaluation_loader is not None:
            yield {"kind": "evaluation", "epoch": epoch + 1, "step": step, **evaluate(model, parts.evaluation_loader)}


def evaluate(model: Any, loader: Loader) -> dict[str, float]:
    """Mean loss and accuracy over the test images."""
    model.eval()
    total, right, count = 0.0, 0, 0
    with torch.no_grad():
        for batch in loader.epoch(0, 0):
            images, labels = tensors(batch)
            logits = model(images)
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(1) == labels).sum())
            count += len(labels)
    return {"loss": total / count, "top1": right / count}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and write each record as it comes."""
    parser = argparse.ArgumentParser(description="Train a configuration of hpctrain by PyTorch.")
    parser.add_argument("file", type=Path, metavar="FILE", help="the configuration")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, help="the directory that gets metrics.jsonl")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config, parts = prepare(chosen.file, chosen.overrides)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "config.yaml").write_text(dump(config))
    with (chosen.out / "metrics.jsonl").open("w") as file:
        for record in train(config, parts, torch_model(config, parts)):
            print(json.dumps(record), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
