"""Images per second of a core from stored pixels to normalised crops, ours next to torchvision's on the same images.

    python -m benchmarks.crops                                  # torchvision has to be installed
    python -m benchmarks.crops --rounds 25 --out crops.json

256-pixel uint8 arrays become random resized crops of 224 pixels, mirrored at random and normalised, float32. torchvision does it
with PIL images, with tensors, and with OpenCV's resize and flip between its own draws and its own normalisation; OpenCV's
bilinear resize does not widen its filter where it shrinks. All are measured in turn in every round, in processor time, one thread
each, and a ratio is of pairs of one round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.augmentations import images_of
from benchmarks.compress import Work, measure
from benchmarks.pairs import paired, ratio
from hpctrain.bench.interleaved import machine_facts
from hpctrain.data.pipeline import Pipeline
from hpctrain.storage.atomic_write import write_json

STORED, SIDE, COUNT = 256, 224, 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OURS = "hpctrain"
PEERS = ("torchvision, PIL", "torchvision, tensors", "torchvision, OpenCV")


def of_ours(images: np.ndarray, side: int = SIDE) -> Work:
    """A batch of ours."""
    specs = [("random_resized_crop", {"size": side}), ("flip", {})]
    pipeline = Pipeline(specs, 1, np.array(MEAN), np.array(STD))
    ids, out = np.arange(len(images)), np.empty((len(images), side, side, 3), np.float32)
    epochs = iter(range(1 << 30))
    return lambda: pipeline(images, ids, next(epochs), out)


def of_torchvision(images: np.ndarray, side: int = SIDE) -> dict[str, Work]:
    """torchvision's on the images of a batch, one after another."""
    import torch

    from hpctrain_testing.torchvision_models import transforms

    v2 = import_module("torchvision.transforms.v2")  # after the line above, which loads what it wants
    torch.set_num_threads(1)
    crop, flip, normalise = transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), transforms.Normalize(MEAN, STD)
    pictures = transforms.Compose([crop, flip, transforms.ToTensor(), normalise])
    steps = [v2.RandomResizedCrop(side, antialias=True), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    tensors = v2.Compose([*steps, v2.Normalize(MEAN, STD)])
    stored = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images]
    opencv = with_opencv(crop, flip.p, normalise)
    return {
        "torchvision, PIL": lambda: [pictures(Image.fromarray(image)) for image in images],
        "torchvision, tensors": lambda: [tensors(image) for image in stored],
        "torchvision, OpenCV": lambda: [opencv(image) for image in images],
    }


def with_opencv(crop: Any, probability: float, normalise: Any) -> Callable[[np.ndarray], Any]:
    """torchvision's draws and normalisation around OpenCV's resize and flip, of one image (H, W, 3) uint8."""
    import cv2
    import torch
    from torchvision.transforms.functional import to_tensor

    cv2.setNumThreads(0)

    def run(image: np.ndarray) -> Any:
        top, left, height, width = crop.get_params(torch.empty(1, *image.shape[:2]), crop.scale, crop.ratio)
        made = cv2.resize(image[top : top + height, left : left + width], crop.size[::-1], interpolation=cv2.INTER_LINEAR)
        if torch.rand(1) < probability:
            made = cv2.flip(made, 1)
        return normalise(to_tensor(made))

    return run


def table(count: int, seconds: Mapping[str, list[float]]) -> str:
    """Markdown: images per second of a core, and how many times as fast ours is."""
    lines = ["| | images/s | ours over it |", "|---|---|---|"]
    for name, values in seconds.items():
        rate = paired(lambda one: count / one, values)
        lines.append(f"| {name} | {rate.median:,.0f} | {'' if name == OURS else ratio(values, seconds[OURS])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--count", type=int, default=COUNT, help="images of a round")
    parser.add_argument("--out", type=Path, help="JSON of all rounds")
    chosen = parser.parse_args(arguments)
    images = images_of(STORED, chosen.count)
    seconds = measure({OURS: of_ours(images)} | of_torchvision(images), chosen.rounds)
    print(table(chosen.count, seconds), flush=True)
    if chosen.out is not None:
        write_json(chosen.out, {"images": chosen.count, "machine": machine_facts(), "seconds": seconds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
