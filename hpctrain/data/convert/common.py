"""Parts that all converters share: class names, chunks, images decoded in parallel but in order."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from hpctrain.data.files import require_file, system_errors_as
from hpctrain.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")
Fit = Literal["crop", "squash"]
#: called with the number of samples that were just done
Advance = Callable[[int], None]

_CHUNK_BYTES = 16 << 20
_MOST_CLASSES = 1 << 20


def no_progress(count: int) -> None:
    """An `Advance` that shows nothing."""


def default_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def numbered_names(labels: np.ndarray) -> list[str]:
    """Class names "0", "1", ... for labels that come without names.

    Raises:
        DataError: a label that no data set has, so that there would be names without end.
    """
    largest = max(0, int(labels.max())) if labels.size else 0
    if largest >= _MOST_CLASSES:
        raise DataError(f"The largest label is {largest}, which is no class; labels without names are below {_MOST_CLASSES}.")
    return [str(label) for label in range(largest + 1)]


def decode(source: Path | bytes, size: tuple[int, int] | None, fit: Fit = "crop", channels: int = 3) -> np.ndarray:
    """One JPEG or PNG as (H, W, channels) uint8: upright (EXIF), grey, palette and CMYK turned to RGB (or all to grey).

    Args:
        size: (H, W) of the result; None: as it is.
        fit: "crop": the short side is resized, then the centre cut out; "squash": resized without keeping the aspect.

    Raises:
        DataError: not, or not wholly, an image; the sentence does not name the file.
    """
    try:
        with Image.open(source if isinstance(source, Path) else io.BytesIO(source)) as opened:
            image = _fitted(_plain(ImageOps.exif_transpose(opened), "RGB" if channels == 3 else "L"), size, fit)
    except UnidentifiedImageError as error:
        raise DataError("The image cannot be decoded: it is of no format that Pillow knows.") from error
    except Exception as error:  # Pillow's readers raise almost anything for damaged files
        raise DataError(f"The image cannot be decoded: {type(error).__name__} {str(error).rstrip('.')}.") from error
    pixels = np.asarray(image)
    return pixels if channels == 3 else pixels[..., None]


def _fitted(image: Image.Image, size: tuple[int, int] | None, fit: Fit) -> Image.Image:
    if size is None or (image.height, image.width) == size:
        return image
    target = size[1], size[0]
    box = None if fit == "squash" else _central_box(image.size, target)
    return image.resize(target, Image.Resampling.BILINEAR, box=box)


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """The image in `mode`, "RGB" or "L"; transparency is dropped."""
    if image.mode.startswith("I"):  # 16 bits a pixel: Pillow would clip at 255 instead of scaling
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _central_box(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest central window of (width, height) `size` with the aspect of `target`: left, upper, right, lower."""
    if size[0] * target[1] <= size[1] * target[0]:  # in integers: rounding would leave the image by a hair
        upper = max(0.0, (size[1] - size[0] * target[1] / target[0]) / 2)
        return 0.0, upper, float(size[0]), size[1] - upper
    left = max(0.0, (size[0] - size[1] * target[0] / target[1]) / 2)
    return left, 0.0, size[0] - left, float(size[1])


def in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Results in the order of the items, at most 4 * threads of them in the works; an error ends the whole."""
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="hpctrain-decode") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= 4 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def chunks(samples: Iterable[tuple[np.ndarray, int]], advance: Advance = no_progress) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(image, label) pairs, gathered into (images, labels) of about 16 MiB."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    for image, label in samples:
        images.append(image)
        labels.append(label)
        if len(images) * image.nbytes >= _CHUNK_BYTES:
            yield np.stack(images), np.array(labels, np.int64)
            advance(len(images))
            images, labels = [], []
    if images:
        yield np.stack(images), np.array(labels, np.int64)
        advance(len(images))


def slices(images: np.ndarray, labels: np.ndarray, advance: Advance = no_progress) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same for images that are one array (N, H, W, C) already."""
    step = max(1, _CHUNK_BYTES // max(1, images[:1].nbytes))
    for start in range(0, len(images), step):
        yield images[start : start + step], labels[start : start + step]
        advance(len(images[start : start + step]))


def listed(noun: str, names: Sequence[str], limit: int = 20) -> str:
    """ "2 files (a.jpg, b.jpg)" for messages; long lists are cut."""
    shown = ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} ({shown})"


def read_names(path: Path) -> list[str]:
    """Class names from a text file, one per line.

    Raises:
        DataError: missing, not text, empty, or with a name twice.
    """
    require_file(path, "file of class names", "it holds one name a line")
    try:
        with system_errors_as(f"The file of class names {path} cannot be read"):
            names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"The file of class names {path} is no UTF-8 text; it holds one name a line.") from error
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        reason = f"holds {', '.join(twice)} twice" if twice else "is empty"
        raise DataError(f"The file of class names {path} {reason}; it holds one name a line, each once.")
    return names
