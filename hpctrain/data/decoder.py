"""Picture files decoded: upright, grey or RGB, brought to one size.

Pillow decodes everything and says what a picture is. Plain JPEG files, which most are, go to simplejpeg where it is installed:
the same libjpeg-turbo with less around it. It computes what Pillow computes, the slow and exact transform with smooth upsampling
of colours, so that the pixels are the same, bit by bit, with it and without it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import numpy as np
import PIL
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features

from hpctrain.errors import DataError

try:
    import simplejpeg
except ImportError:  # no wheel for this machine
    simplejpeg = None

Fit = Literal["crop", "squash"]

_JPEG = b"\xff\xd8\xff"
_MARKER, _START_OF_SCAN, _APP1, _APP2 = 0xFF, 0xDA, 0xE1, 0xE2
#: how the segments of a JPEG file begin that may say which side is up
_ABOUT_SIDES = (b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0")
_SEVERAL_PICTURES = b"MPF\0"
_PLAIN_COLOURS = ("YCbCr", "Gray")


def decode(source: Path | bytes, size: tuple[int, int] | None, fit: Fit = "crop", channels: int = 3) -> np.ndarray:
    """One JPEG or PNG as (H, W, channels) uint8: upright (EXIF), grey, palette and CMYK turned to RGB (or all to grey).

    Args:
        source: a file, or the contents of one. size: (H, W) of the result; None: as it is.
        fit: "crop": the short side is resized, then the centre cut out; "squash": resized without keeping the aspect.

    Raises:
        DataError: not, or not wholly, an image; the sentence does not name the file.
    """
    try:
        content = source.read_bytes() if isinstance(source, Path) else source
        pixels = _jpeg(content, channels)
        if pixels is not None and size in (None, pixels.shape[:2]) and pixels.shape[2] == channels:
            return pixels
        image = _opened(content) if pixels is None else Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
        result = np.asarray(_fitted(_plain(image, "RGB" if channels == 3 else "L"), size, fit))
    except UnidentifiedImageError as error:
        raise DataError("The image cannot be decoded: it is of no format that Pillow knows.") from error
    except Exception as error:  # Pillow's readers raise almost anything for damaged files
        raise DataError(f"The image cannot be decoded: {type(error).__name__} {str(error).rstrip('.')}.") from error
    return result if channels == 3 else result[..., None]


def versions() -> str:
    """The libraries that decode here, for sentences."""
    plain = "" if simplejpeg is None else f"simplejpeg {simplejpeg.__version__}, "
    return f"{plain}Pillow {PIL.__version__} with libjpeg-turbo {features.version('libjpeg_turbo')}"


def _jpeg(content: bytes, channels: int) -> np.ndarray | None:
    """The pixels (H, W, C) of a plain JPEG file, C of 3 or 1; None where it is another file, or one for Pillow to judge."""
    if simplejpeg is None or not content.startswith(_JPEG):
        return None
    applications = _applications(content)
    if applications is None or any(data.startswith(_SEVERAL_PICTURES) for data in applications):
        return None
    if any(data.startswith(_ABOUT_SIDES) for data in applications):
        with Image.open(io.BytesIO(content)) as opened:
            if opened.getexif().get(ExifTags.Base.Orientation, 1) != 1:
                return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        if colours not in _PLAIN_COLOURS or height * width > (Image.MAX_IMAGE_PIXELS or 0):
            return None
        grey = colours == "Gray" and channels == 1
        pixels: np.ndarray = simplejpeg.decode_jpeg(content, "GRAY" if grey else "RGB")
        return pixels
    except ValueError:  # damaged; Pillow says how, or bears it
        return None


def _applications(content: bytes) -> list[bytes] | None:
    """How the segments APP1 and APP2 in front of a JPEG file's data begin; None where it has no plain sequence of segments."""
    found: list[bytes] = []
    place = 2
    while place + 4 <= len(content) and content[place] == _MARKER:
        marker = content[place + 1]
        if marker == _START_OF_SCAN:
            return found
        if marker in (_APP1, _APP2):
            found.append(content[place + 4 : place + 40])
        place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    return None


def _opened(content: bytes) -> Image.Image:
    with Image.open(io.BytesIO(content)) as opened:
        return ImageOps.exif_transpose(opened)


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
    return image if image.mode == mode else image.convert(mode)


def _central_box(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest central window of (width, height) `size` with the aspect of `target`: left, upper, right, lower."""
    if size[0] * target[1] <= size[1] * target[0]:  # in integers: rounding would leave the image by a hair
        upper = max(0.0, (size[1] - size[0] * target[1] / target[0]) / 2)
        return 0.0, upper, float(size[0]), size[1] - upper
    left = max(0.0, (size[0] - size[1] * target[0] / target[1]) / 2)
    return left, 0.0, size[0] - left, float(size[1])
