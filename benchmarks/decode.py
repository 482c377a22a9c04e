"""Images per second of a core from JPEG files: decoders next to each other, and from the file to normalised pixels.

    python -m benchmarks.decode DIRECTORY                   # JPEG files below it; OpenCV and torchvision where they are installed
    python -m benchmarks.decode DIRECTORY --rounds 25 --out decode.json

The files are read beforehand. "Large" ones are the same pictures brought to 400 x 533 and encoded again, quality 90, 4:2:0. All
are measured in turn in every round, in processor time, on one thread; a ratio is of pairs of one round.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.compress import Work, measure
from benchmarks.pairs import paired, ratio
from hpctrain.bench.interleaved import machine_facts
from hpctrain.data import decoding
from hpctrain.data.pipeline import Pipeline
from hpctrain.storage.atomic_write import write_json

PIXELS = 256  # of the stored form
CROP = 224
LARGE = (533, 400)  # width, height
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
AUGMENT: tuple[tuple[str, dict[str, int]], ...] = (("random_resized_crop", {"size": CROP}), ("flip", {}))
Decode = Callable[[bytes], Any]


def large(content: bytes) -> bytes:
    """The picture as 400 x 533, or 533 x 400."""
    with Image.open(io.BytesIO(content)) as image:
        size = LARGE if image.width > image.height else LARGE[::-1]
        out = io.BytesIO()
        image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def _pillow(content: bytes) -> Any:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def decoders() -> dict[str, Decode]:
    """Those that are installed, by name."""
    found: dict[str, Decode] = {"Pillow": _pillow, "hpctrain": lambda content: decoding.decode(content, None)}
    if decoding.simplejpeg is not None:
        found["simplejpeg"] = lambda content: decoding.simplejpeg.decode_jpeg(content, "RGB")
    if importlib.util.find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)
        found["OpenCV"] = lambda content: cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
    return found


def chains() -> dict[str, Callable[[Sequence[bytes]], object]]:
    """From files to what a network reads: random_resized_crop, flip, normalisation."""
    pipeline = Pipeline(AUGMENT, 1, MEAN, STD)
    epoch = 0

    def ours(contents: Sequence[bytes]) -> object:
        nonlocal epoch
        epoch += 1
        images = np.stack([decoding.decode(content, (PIXELS, PIXELS)) for content in contents])
        return pipeline(images, np.arange(len(contents)), epoch, np.empty((len(contents), CROP, CROP, 3), np.float32))

    found: dict[str, Callable[[Sequence[bytes]], object]] = {"hpctrain": ours}
    if importlib.util.find_spec("torchvision"):
        import torch

        from hpctrain_testing.torchvision_models import transforms

        torch.set_num_threads(1)
        normalise = transforms.Normalize(MEAN.tolist(), STD.tolist())
        steps = [transforms.RandomResizedCrop(CROP), transforms.RandomHorizontalFlip()]
        pillow = transforms.Compose([*steps, transforms.ToTensor(), normalise])
        opened = lambda content: Image.open(io.BytesIO(content)).convert("RGB")  # noqa: E731
        found["torchvision, Pillow"] = lambda contents: [pillow(opened(content)) for content in contents]
        decode = decoders().get("OpenCV")
        if decode is not None:
            tensors = transforms.Compose(
                [*steps, transforms.ConvertImageDtype(torch.float32), normalise],
            )
            found["torchvision, OpenCV"] = lambda contents: [
                tensors(torch.from_numpy(decode(content)).permute(2, 0, 1)) for content in contents
            ]
    return found


def works(contents: Sequence[bytes]) -> dict[str, Work]:
    """All that is measured on the same files."""

    def each(decode: Decode) -> Work:
        return lambda: [decode(content) for content in contents]

    found = {f"decode: {name}": each(decode) for name, decode in decoders().items()}
    found[f"decode to {PIXELS} px: hpctrain"] = each(lambda content: decoding.decode(content, (PIXELS, PIXELS)))
    found[f"decode to {PIXELS} px: Pillow"] = each(lambda content: _through_pillow(content))
    found |= {f"to the network: {name}": _on(chain, contents) for name, chain in chains().items()}
    return found


def _on(chain: Callable[[Sequence[bytes]], object], contents: Sequence[bytes]) -> Work:
    return lambda: chain(contents)


def _through_pillow(content: bytes) -> np.ndarray:
    """`decoder.decode` where simplejpeg is not installed."""
    kept, decoding.simplejpeg = decoding.simplejpeg, None
    try:
        return decoding.decode(content, (PIXELS, PIXELS))
    finally:
        decoding.simplejpeg = kept


def table(name: str, count: int, seconds: Mapping[str, list[float]]) -> str:
    """Markdown: images per second of a core, and how many times as fast hpctrain is."""
    lines = [f"{name}:", "", "| | images/s | hpctrain's speed over it |", "|---|---|---|"]
    for work, times in seconds.items():
        rate = paired(lambda one: count / one, times)
        ours = seconds[f"{work.split(':')[0]}: hpctrain"]
        lines.append(f"| {work} | {rate.median:,.0f} | {ratio(times, ours)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="JPEG files below it are decoded")
    parser.add_argument("--images", type=int, default=24, help="of a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON of all rounds")
    chosen = parser.parse_args(arguments)
    files = sorted(chosen.directory.rglob("*.jpg"))
    small = [path.read_bytes() for path in random.Random(1).sample(files, min(chosen.images, len(files)))]
    result: dict[str, Any] = {"images": len(small), "machine": machine_facts(), "decoder": decoding.versions(), "seconds": {}}
    for name, contents in (("files as they are", small), ("large: 400 x 533", [large(content) for content in small])):
        result.setdefault("bytes", {})[name] = sum(map(len, contents)) // len(contents)
        seconds = measure(works(contents), chosen.rounds)
        result["seconds"][name] = seconds
        print(table(f"{name}, {result['bytes'][name]:,} bytes in the mean", len(contents), seconds), end="\n\n")
    if chosen.out is not None:
        write_json(chosen.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
