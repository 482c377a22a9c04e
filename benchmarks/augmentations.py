"""Images per second of a core that the random operations take, ours next to torchvision's on the same images.

    python -m benchmarks.augmentations                         # torchvision has to be installed
    python -m benchmarks.augmentations --rounds 25 --out augmentations.json

From uint8 arrays to uint8 arrays; torchvision gets PIL images made of them, as its data sets do. All are measured in turn in
every round, in processor time, and a ratio is of pairs of one round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.compress import Work, measure
from benchmarks.pairs import paired, ratio
from hpctrain.bench.interleaved import machine_facts
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.storage.atomic_write import write_json

SIZES = {32: 256, 224: 16}  # pixels -> images of a round
OURS = {"randaugment": "RandAugment", "trivial_augment_wide": "TrivialAugmentWide"}


def images_of(pixels: int, count: int) -> np.ndarray:
    """Smooth colours with some noise, (count, pixels, pixels, 3) uint8."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:pixels, :pixels] * (180 / pixels)
    smooth = np.stack([rows, columns, (rows + columns) / 2], axis=2)
    return (smooth + random.integers(0, 70, (count, pixels, pixels, 3))).astype(np.uint8)


def of_ours(images: np.ndarray) -> dict[str, Work]:
    """Each of ours on a batch."""
    random, out = np.random.default_rng(1), np.empty_like(images)

    def work(name: str) -> Work:
        augmentation = AUGMENTATIONS.create(name, {})
        return lambda: augmentation.apply(images, random.random((len(images), augmentation.draws)), out)

    return {name: work(name) for name in OURS}


def of_torchvision(images: np.ndarray) -> dict[str, Work]:
    """Each of torchvision's on the images of a batch, one after another."""
    from hpctrain_testing.torchvision_models import transforms

    def work(name: str) -> Work:
        augmentation = getattr(transforms, name)()
        return lambda: [np.asarray(augmentation(Image.fromarray(image))) for image in images]

    return {name: work(name) for name in OURS.values()}


def table(pixels: int, count: int, seconds: Mapping[str, list[float]]) -> str:
    """Markdown: images per second of a core, and how many times as fast as torchvision's."""
    lines = [f"{pixels} pixels:", "", "| | images/s | torchvision's | ratio |", "|---|---|---|---|"]
    for ours, theirs in OURS.items():
        rates = [paired(lambda one: count / one, seconds[name]) for name in (ours, theirs)]
        lines.append(f"| {ours} | {rates[0].median:,.0f} | {rates[1].median:,.0f} | {ratio(seconds[theirs], seconds[ours])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON of all rounds")
    chosen = parser.parse_args(arguments)
    result: dict[str, Any] = {"images": SIZES, "machine": machine_facts(), "seconds": {}}
    for pixels, count in SIZES.items():
        images = images_of(pixels, count)
        seconds = measure(of_ours(images) | of_torchvision(images), chosen.rounds)
        result["seconds"][str(pixels)] = seconds
        print(table(pixels, count, seconds), end="\n\n", flush=True)
    if chosen.out is not None:
        write_json(chosen.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
