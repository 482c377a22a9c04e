"""Images per second of a core from a data file to normalised crops, ours next to torchvision's loader on the same images.

    python -m benchmarks.loading                                  # torchvision and opencv-python-headless have to be installed
    python -m benchmarks.loading --rounds 25 --out loading.json

232-pixel images, as JPEG files in memory and as pixels of an HDF5 file, become shuffled batches of random resized crops
of 224 pixels, mirrored at random and normalised, float32. Ours is the loader of a data file (raw) or its decoder and
pipeline (JPEG); with "pixels" it leaves crops and normalisation to a GPU. torchvision's is PyTorch's `DataLoader`
without workers, with PIL or with OpenCV as decoder and resize. All are measured in turn in every round, in processor
time, one thread each, and a ratio is of pairs of one round.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.augmentations import images_of
from benchmarks.compress import Work, measure
from benchmarks.crops import MEAN, OURS, SIDE, STD, table, with_opencv
from hpctrain.bench.interleaved import machine_facts
from hpctrain.data import decoding
from hpctrain.data.image_file import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.data.writer import write_data_file
from hpctrain.storage.atomic_write import write_json

STORED, COUNT, BATCH = 232, 64, 16
QUALITY = 90
KINDS = ("JPEG", "raw HDF5")
PIXELS, PEERS = "hpctrain, pixels for a GPU", ("torchvision, PIL", "torchvision, OpenCV")
SPECS: list[tuple[str, dict[str, int]]] = [("random_resized_crop", {"size": SIDE}), ("flip", {})]


def encoded(images: np.ndarray) -> list[bytes]:
    """The images as JPEG files."""
    files = []
    for image in images:
        out = io.BytesIO()
        Image.fromarray(image).save(out, "JPEG", quality=QUALITY)
        files.append(out.getvalue())
    return files


def written(images: np.ndarray, path: Path) -> ImageFile:
    """The images as a data file of pixels."""
    write_data_file(path, len(images), images.shape[1:], ["all"], [(images, np.zeros(len(images), np.int64))])
    return ImageFile.open(path)


def of_jpeg(files: list[bytes]) -> dict[str, Work]:
    """Ours, of files in memory: decoded one by one, then a batch through the pipeline."""
    pipeline, epochs = Pipeline(SPECS, 1, np.array(MEAN), np.array(STD)), iter(range(1 << 30))
    raw, crops = np.empty((BATCH, STORED, STORED, 3), np.uint8), np.empty((BATCH, SIDE, SIDE, 3), np.float32)

    def run(*, leaves_pixels: bool) -> None:
        epoch = next(epochs)
        for first in range(0, len(files), BATCH):
            ids = np.arange(first, min(first + BATCH, len(files)))
            images = raw[: len(ids)]
            for number, sample in enumerate(ids.tolist()):
                images[number] = decoding.decode(files[sample], None)
            if leaves_pixels:
                pipeline.unfinished(images, ids, epoch, images)
            else:
                pipeline(images, ids, epoch, crops[: len(ids)])

    return {OURS: lambda: run(leaves_pixels=False), PIXELS: lambda: run(leaves_pixels=True)}


def of_file(file: ImageFile) -> dict[str, Work]:
    """Ours, of a data file: the loader of a training."""

    def work(*, leaves_pixels: bool) -> Work:
        pipeline = Pipeline(SPECS, 1, np.array(MEAN), np.array(STD))
        loader = Loader(file, Sampler(len(file), BATCH, 1), pipeline, prefetch=0, leaves_pixels=leaves_pixels)
        epochs = iter(range(1 << 30))
        return lambda: [len(batch.y) for batch in loader.epoch(next(epochs))]

    return {OURS: work(leaves_pixels=False), PIXELS: work(leaves_pixels=True)}


def of_torchvision(read: Mapping[str, Callable[[int], Any]], count: int) -> dict[str, Work]:
    """PyTorch's loader with torchvision's transforms. read: by library, a sample's PIL image or array."""
    import torch

    from hpctrain_testing.torchvision_models import transforms

    torch.set_num_threads(1)
    crop, flip, normalise = transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.Normalize(MEAN, STD)
    pictures, arrays = transforms.Compose([crop, flip, transforms.ToTensor(), normalise]), with_opencv(crop, flip.p, normalise)
    loader_of = import_module("torch.utils.data").DataLoader

    def work(name: str, make: Callable[[Any], Any]) -> Work:
        class Samples:
            def __len__(self) -> int:
                return count

            def __getitem__(self, sample: int) -> Any:
                return make(read[name](sample)), 0

        loader = loader_of(Samples(), batch_size=BATCH, shuffle=True)
        return lambda: [len(batch[1]) for batch in loader]

    return {PEERS[0]: work(PEERS[0], pictures), PEERS[1]: work(PEERS[1], arrays)}


def peers_of_jpeg(files: list[bytes]) -> dict[str, Work]:
    """torchvision's, of files in memory."""
    import cv2

    cv2.setNumThreads(0)
    return of_torchvision(
        {
            PEERS[0]: lambda sample: Image.open(io.BytesIO(files[sample])).convert("RGB"),
            PEERS[1]: lambda sample: cv2.imdecode(np.frombuffer(files[sample], np.uint8), cv2.IMREAD_COLOR_RGB),
        },
        len(files),
    )


def peers_of_file(path: Path, count: int) -> dict[str, Work]:
    """torchvision's, of an HDF5 file that h5py reads sample by sample."""
    import h5py

    images = h5py.File(path, "r")["images"]
    return of_torchvision(
        {PEERS[0]: lambda sample: Image.fromarray(images[sample]), PEERS[1]: lambda sample: images[sample]}, count
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--count", type=int, default=COUNT, help="images of a round")
    parser.add_argument("--out", type=Path, help="JSON of all rounds")
    chosen = parser.parse_args(arguments)
    images = images_of(STORED, chosen.count)
    result: dict[str, Any] = {"images": chosen.count, "machine": machine_facts(), "decoder": decoding.versions(), "seconds": {}}
    with tempfile.TemporaryDirectory() as folder:
        path, files = Path(folder) / "train.h5", encoded(images)
        file = written(images, path)
        works = {"JPEG": of_jpeg(files) | peers_of_jpeg(files), "raw HDF5": of_file(file) | peers_of_file(path, len(images))}
        result["bytes"] = {"JPEG": sum(map(len, files)) // len(files), "raw HDF5": images[0].nbytes}
        for kind in KINDS:
            seconds = result["seconds"][kind] = measure(works[kind], chosen.rounds)
            print(f"{kind}, {result['bytes'][kind]:,} bytes an image:\n\n{table(chosen.count, seconds)}\n", flush=True)
    if chosen.out is not None:
        write_json(chosen.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
