"""Picture files of all kinds that users have: turned by EXIF, grey, with a palette, transparent, CMYK, 16 bits, of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

_ORIENTATION = 0x0112
_TURNED = 6  # by a quarter


def write_pictures(directory: Path, classes: tuple[str, ...] = ("ant", "bee"), *, seed: int = 0) -> list[Path]:
    """Write some pictures of each class to a directory of its name; their paths, sorted.

    The brightness of a picture follows from its class, so that a network can learn to tell them.
    """
    random = np.random.default_rng(seed)
    for number, name in enumerate(classes):
        (directory / name).mkdir(parents=True, exist_ok=True)
        for kind in ("RGB", "L", "P", "RGBA", "CMYK", "I;16", "turned"):
            height, width = random.integers(8, 40, 2)
            pixels = (random.integers(0, 90, (height, width, 3)) + 150 * number // max(1, len(classes) - 1)).astype(np.uint8)
            _write(directory / name / kind.replace(";", ""), kind, Image.fromarray(pixels))
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _write(path: Path, kind: str, image: Image.Image) -> None:
    if kind == "turned":
        exif = Image.Exif()
        exif[_ORIENTATION] = _TURNED
        image.save(path.with_suffix(".jpg"), exif=exif)
    elif kind == "I;16":
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8).save(path.with_suffix(".png"))
    else:
        image.convert(kind).save(path.with_suffix(".jpg" if kind == "CMYK" else ".png"))
