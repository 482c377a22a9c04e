"""Decoder of picture files to upright grey or RGB images of one size, and reader of data files that hold picture files.

Pillow decodes all formats. Plain JPEG files, the usual case, are decoded by simplejpeg if it is installed: it uses the same
libjpeg-turbo with less overhead. Its settings are those of Pillow (the slow, exact transform and smooth upsampling of colours),
so the pixels are bitwise equal with and without it.

The first frame or page of a file is decoded. Damaged metadata is ignored if the pixels are intact. This module loads Pillow, so
training on files of pixels does not import it.
"""

from __future__ import annotations

import functools
import io
import re
import struct
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, cast

import numpy as np
import PIL
from PIL import ExifTags, Image, UnidentifiedImageError, features

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_regular, read_bytes
from hpctrain.data.readers import BlockReader, Extents, ValueRange, sum_of

try:
    import simplejpeg
except ImportError:  # no wheel for this machine
    simplejpeg = None

Fit = Literal["crop", "squash"]

#: suffixes of supported picture files, in lower case
SUFFIXES = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".jp2", ".j2k", ".png", ".apng", ".webp", ".avif", ".bmp", ".dib", ".tif", ".tiff",
    ".gif", ".ppm", ".pgm", ".pbm", ".pnm",
))  # fmt: skip
#: suffixes of picture files of unsupported formats, in lower case
FOREIGN_SUFFIXES = frozenset((
    ".heic", ".heif", ".hif", ".jxl", ".jxr", ".psd", ".psb", ".svg", ".eps", ".ico", ".icns", ".tga", ".pcx", ".xcf", ".exr",
    ".hdr", ".pfm", ".dcm", ".fits", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pef",
))  # fmt: skip
_MOST_BITS = 16
#: default maximum number of pixels of a picture: 0.5 GB in RGB
MAX_PIXELS = 178_956_970
# Some other formats of Pillow start programs (EPS), or accept any bytes as an image (TGA).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF", "PPM", "JPEG2000", "AVIF")
#: size limit of a picture file: bytes per pixel, and bytes of metadata
_BYTES_OF_PIXEL, _BYTES_OF_METADATA = 4, 16 << 20

_JPEG = b"\xff\xd8\xff"
_MARKER, _START_OF_SCAN, _APP0, _APP1, _APP2, _APP14, _APP15, _COMMENT = 0xFF, 0xDA, 0xE0, 0xE1, 0xE2, 0xEE, 0xEF, 0xFE
_EXIF = b"Exif\0\0"
#: first bytes of JPEG segments that may contain the orientation
_ABOUT_SIDES = (_EXIF, b"http://ns.adobe.com/xap/1.0/\0")
_SEVERAL_PICTURES = b"MPF\0"
_MOST_SEGMENTS = 300  # a colour profile has at most 255
_PLAIN_COLOURS = ("YCbCr", "Gray")
_PNG = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
#: XMP, Photoshop, ICC profile, EXIF, GPS
_METADATA_TAGS = frozenset((700, 34377, 34675, 34665, 34853))
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

#: exceptions that Pillow raises above its limit; the second one if warnings are turned into errors
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)

# Pillow warns above its limit and raises above twice its limit. hpctrain raises its own error above the limit.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.", category=UserWarning)  # about damaged metadata


def decode(
    source: Path | bytes,
    size: tuple[int, int] | None,
    fit: Fit = "crop",
    channels: int = 3,
    max_pixels: int | None = None,
    value_range: ValueRange | None = None,
) -> np.ndarray:
    """Return one picture as (H, W, channels) uint8, upright by its EXIF data, in RGB or grey.

    Grey, palette and CMYK pictures are converted.

    Args:
        size: (H, W) of the result; None: size of the picture.
        fit: "crop": resize the shorter side, then cut out the centre; "squash": resize without keeping the aspect ratio.
        channels: 3 for RGB, 1 for grey.
        max_pixels: maximum number of pixels of a picture; None: MAX_PIXELS.
        value_range: (low, high) of the values that become 0 and 255 in pictures of more than 8 bits per value; None: those of
            the declared number of bits.

    Raises:
        DataError: the file is not an image, is incomplete, or has too many pixels. The message does not name the file.
    """
    most = MAX_PIXELS if max_pixels is None else max_pixels
    if Image.MAX_IMAGE_PIXELS is not None and most > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = most  # the limit holds for the whole process, so it is never lowered
    content = read_picture(source, most) if isinstance(source, Path) else source
    if content.startswith(_JPEG) and sum(1 for _ in _segments(content)) > _MOST_SEGMENTS:  # Pillow joins them, in quadratic time
        content = _plain_jpeg(content, exif=True)
    try:
        pixels = _jpeg(content, channels, most)
        if pixels is not None and size in (None, pixels.shape[:2]) and pixels.shape[2] == channels:
            return pixels
        if pixels is None:
            image = _opened(content, most, value_range)
        else:
            image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        result = np.asarray(_fitted(_plain(image, "RGB" if channels == 3 else "L"), size, fit))
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError("The image cannot be decoded: its format is not supported; save it as JPEG or PNG.") from error
    except _BOMBS as error:
        pixels_of = re.search(r"\d+", str(error))
        raise _too_large(most, most + 1 if pixels_of is None else int(pixels_of[0])) from error
    except Exception as error:  # Pillow's readers raise almost anything for damaged files
        raise DataError(f"The image cannot be decoded: {f'{type(error).__name__} {error}'.rstrip('. ')}.") from error
    return result if channels == 3 else result[..., None]


def read_picture(path: Path, max_pixels: int | None = None) -> bytes:
    """Return the content of a picture file, which must be a regular file of a size that suits `max_pixels`.

    Raises:
        DataError: the file cannot be read or is too large. The message does not name it.
    """
    try:
        return read_bytes(path, _BYTES_OF_PIXEL * (max_pixels or MAX_PIXELS) + _BYTES_OF_METADATA)
    except OSError as error:
        raise DataError(f"The image cannot be read: {error.strerror or error}.") from error


def versions() -> str:
    """Return the names and versions of the decoding libraries, for messages."""
    plain = "" if simplejpeg is None else f"simplejpeg {simplejpeg.__version__}, "
    return f"{plain}Pillow {PIL.__version__} with libjpeg-turbo {features.version('libjpeg_turbo')}"


def _jpeg(content: bytes, channels: int, max_pixels: int) -> np.ndarray | None:
    """Return the pixels (H, W, C) of a plain JPEG file, C being 3 or 1; None for files that need Pillow."""
    if simplejpeg is None or not content.startswith(_JPEG):
        return None
    applications = _applications(content)
    if applications is None or any(data.startswith(_SEVERAL_PICTURES) for data in applications):
        return None
    if any(data.startswith(_ABOUT_SIDES) for data in applications):
        try:
            with Image.open(io.BytesIO(content), formats=("JPEG",)) as opened:
                if _turn(opened) is not None:
                    return None
        except Exception:  # metadata that Pillow cannot read, or too many pixels: `_opened` handles both
            return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        if colours not in _PLAIN_COLOURS or height * width > max_pixels:
            return None
        grey = colours == "Gray" and channels == 1
        pixels: np.ndarray = simplejpeg.decode_jpeg(content, "GRAY" if grey else "RGB")
        return pixels
    except ValueError:  # damaged: Pillow raises the reason, or decodes it
        return None


def _segments(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, stop) of the segments before a JPEG file's data, and of the data. Stop if a marker is missing."""
    place = 2
    while place + 4 <= len(content) and content[place] == _MARKER:
        marker = content[place + 1]
        if marker == _START_OF_SCAN:
            yield marker, place, len(content)
            return
        stop = place + 2 + int.from_bytes(content[place + 2 : place + 4], "big")
        yield marker, place, stop
        place = stop


def _applications(content: bytes) -> list[bytes] | None:
    """Return the first bytes of the APP1 and APP2 segments before a JPEG file's data; None if its segments are irregular."""
    found: list[bytes] = []
    for marker, start, _ in _segments(content):
        if marker == _START_OF_SCAN:
            return found
        if marker in (_APP1, _APP2):
            found.append(content[start + 4 : start + 40])
    return None


def _opened(content: bytes, max_pixels: int, value_range: ValueRange | None) -> Image.Image:
    """Return the picture as Pillow decodes it, upright; if its metadata are damaged, without them."""
    try:
        return _loaded(content, max_pixels, value_range)
    except (DataError, *_BOMBS):
        raise
    except Exception as error:
        # Pillow raises for a file with a damaged profile, comment or EXIF, even if its pixels are intact.
        for exif in (True, False):
            try:
                return _loaded(_without_metadata(content, exif), max_pixels, value_range)
            except (DataError, *_BOMBS):
                raise
            except Exception:
                continue
        raise error from None


def _loaded(content: bytes, max_pixels: int, value_range: ValueRange | None) -> Image.Image:
    with Image.open(io.BytesIO(content), formats=_formats()) as opened:
        if opened.width * opened.height > max_pixels:
            raise _too_large(max_pixels, opened.width * opened.height)
        depth, deep_colour = _depth(opened), _is_deep_colour(opened)
        opened.load()
        turn = _turn(opened)
        if value_range is None or not deep_colour:
            image = opened.copy()
        else:
            image = Image.fromarray(scaled(_colours(content), value_range))
    image = _eight_bits(image, depth, value_range)
    return image if turn is None else image.transpose(turn)


def _is_deep_colour(opened: Image.Image) -> bool:
    """Return whether a picture that is not loaded yet has colours of 16 bits, of which Pillow keeps the upper 8."""
    return opened.mode in ("LA", "RGB", "RGBA", "RGBX") and ";16" in str(getattr(opened, "tile", ""))


def _colours(content: bytes) -> np.ndarray:
    """Return the colours (H, W, 3) uint16 of a picture, without transparency.

    Raises:
        DataError: OpenCV cannot decode it.
    """
    import cv2

    values = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    if values is None or values.dtype != np.uint16 or values.ndim != 3 or values.shape[2] < 3:
        raise DataError(
            "The image cannot be decoded: its colours of 16 bits are in a form that is not supported; save it as PNG."
        )
    return np.ascontiguousarray(values[..., 2::-1])


def deep_maximum(source: Path | bytes, max_pixels: int | None = None) -> int:
    """Return the largest value of a picture that declares 16 bits per value.

    The result is -1 for floating-point numbers and wider integers, and 0 for other and for unreadable pictures.
    """
    try:
        with open(open_regular(source), "rb") if isinstance(source, Path) else io.BytesIO(source) as file:
            start = file.read(26)
            if start.startswith(_JPEG) or (start.startswith(_PNG) and start[24:25] != bytes([_MOST_BITS])):
                return 0
            opened = Image.open(file, formats=_formats())
            if opened.width * opened.height > (max_pixels or MAX_PIXELS):
                return 0
            if opened.mode == "F" or (opened.mode.startswith("I") and _depth(opened) > _MOST_BITS):
                return -1
            if _is_deep_colour(opened):
                return int(_colours(read_picture(source, max_pixels) if isinstance(source, Path) else source).max())
            if opened.mode.startswith("I") and _depth(opened) == _MOST_BITS:
                return max(0, int(np.asarray(opened).max()))
    except Exception:  # conversions report why a picture cannot be decoded
        return 0
    return 0


def scaled(values: np.ndarray, value_range: ValueRange) -> np.ndarray:
    """Return values of any type as uint8: low becomes 0, high 255, and values beyond them are clipped."""
    low, high = value_range
    return np.rint(np.clip((values.astype(np.float64) - low) * (255.0 / (high - low)), 0, 255)).astype(np.uint8)


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that turns a picture upright; None if it is upright, or its EXIF data is unreadable."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow may raise anything for damaged metadata
        return None


def _too_large(most: int, pixels: int) -> DataError:
    return DataError(
        f"The image cannot be decoded: it has {pixels:,} pixels, more than the limit of {most:,}; "
        f"give --max-pixels {pixels} to allow them."
    )


def _without_metadata(content: bytes, exif: bool) -> bytes:
    """Return a PNG, JPEG or TIFF file without the parts that do not affect its pixels. Other files are returned unchanged.

    Args:
        exif: whether to keep the EXIF data, which holds the orientation.
    """
    if content.startswith(_PNG):
        return _plain_png(content, exif)
    if content.startswith(_JPEG):
        return _plain_jpeg(content, exif)
    return _plain_tiff(content, _TIFF_ORDERS[content[:4]]) if content[:4] in _TIFF_ORDERS else content


def _plain_png(content: bytes, exif: bool) -> bytes:
    parts, place = [_PNG], len(_PNG)
    while place + 12 <= len(content):
        stop = place + 12 + int.from_bytes(content[place : place + 4], "big")
        kind = content[place + 4 : place + 8]
        if kind in _PIXEL_CHUNKS or (exif and kind == b"eXIf"):
            parts.append(content[place:stop])
        place = stop
    return b"".join(parts)


def _plain_jpeg(content: bytes, exif: bool) -> bytes:
    parts = [content[:2]]
    for marker, start, stop in _segments(content):
        describes = marker == _COMMENT or (_APP0 < marker <= _APP15 and marker != _APP14)
        has_exif = exif and content.startswith(_EXIF, start + 4)
        if not describes or has_exif:
            parts.append(content[start:stop])
            exif = exif and not has_exif  # the orientation is in the first of several
    return b"".join(parts)


def _plain_tiff(content: bytes, order: str) -> bytes:
    """Return a TIFF file in a byte order without the metadata tags of its first directory. Offsets remain valid."""
    try:
        (place,) = struct.unpack_from(f"{order}I", content, 4)
        (count,) = struct.unpack_from(f"{order}H", content, place)
        entries = [content[start : start + 12] for start in range(place + 2, place + 2 + 12 * count, 12)]
        kept = [entry for entry in entries if struct.unpack_from(f"{order}H", entry)[0] not in _METADATA_TAGS]
    except struct.error:
        return content
    directory = struct.pack(f"{order}H", len(kept)) + b"".join(kept) + bytes(4)
    return content[:place] + directory + content[place + len(directory) :]


def _fitted(image: Image.Image, size: tuple[int, int] | None, fit: Fit) -> Image.Image:
    if size is None or (image.height, image.width) == size:
        return image
    target = size[1], size[0]
    box = None if fit == "squash" else _central_box(image.size, target)
    return image.resize(target, Image.Resampling.BILINEAR, box=box)


def _depth(image: Image.Image) -> int:
    """Return the number of bits per value declared by the file; 16 if it declares none."""
    bits = getattr(image, "tag_v2", {}).get(ExifTags.Base.BitsPerSample, (16,))
    return max(bits) if isinstance(bits, tuple) else int(bits)


def _eight_bits(image: Image.Image, depth: int, value_range: ValueRange | None) -> Image.Image:
    """Return the image with at most 8 bits per value.

    Deeper values, which Pillow would clip at 255, are scaled from `value_range` if set; otherwise their upper 8 bits remain.

    Raises:
        DataError: the values cannot be scaled and are floating-point, negative or wider than 16 bits or the declared `depth`.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    if value_range is not None and np.isfinite(values).all():
        return Image.fromarray(scaled(values, value_range))
    if image.mode == "F" or depth > 16 or (values.size and (values.min() < 0 or values.max() >= 1 << depth)):
        kind = "floating-point numbers" if image.mode == "F" else f"whole numbers of {depth} bits, or negative ones"
        raise DataError(
            f"The image cannot be decoded: its pixels are {kind}; convert it with --range, or save it with 8 or 16 unsigned bits "
            "per value."
        )
    return Image.fromarray((values.astype(np.int64) >> (depth - 8)).astype(np.uint8))


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """Return the image in `mode`, "RGB" or "L", without transparency."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _central_box(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the largest central window (left, upper, right, lower) of (width, height) `size` with the aspect of `target`."""
    if size[0] * target[1] <= size[1] * target[0]:  # in integers, because rounding errors could move the window out of the image
        upper = max(0.0, (size[1] - size[0] * target[1] / target[0]) / 2)
        return 0.0, upper, float(size[0]), size[1] - upper
    left = max(0.0, (size[0] - size[1] * target[0] / target[1]) / 2)
    return left, 0.0, size[0] - left, float(size[1])


#: number of samples whose pixels are compared with the checksums: enough to detect another decoder, few enough to cost nothing
_COMPARED_SAMPLES = 16


class EncodedReader(BlockReader):
    """Reader of images (N, H, W, C) uint8 from picture files, with the same pixels as a file of pixels made from them.

    A damaged picture file is an unreadable sample. One thread at a time may read; decoding uses several threads.

    Args:
        block: flat memory map of the picture files.
        extents: places of the picture files in the block.
        sums: (N,) crc32 of the picture files, and (N,) crc32 of their decoded pixels.
        form: (H, W, C) of the decoded images.
        threads: number of decoding threads, which mostly run without the GIL.
        fit, max_pixels, value_range: see `decode`.
    """

    decodes = True

    def __init__(
        self,
        path: Path,
        block: np.memmap,
        extents: Extents,
        sums: tuple[np.ndarray, np.ndarray],
        form: tuple[int, ...],
        fit: str,
        threads: int = 1,
        max_pixels: int | None = None,
        value_range: ValueRange | None = None,
    ) -> None:
        super().__init__(path, block, extents)
        self.shape: tuple[int, ...] = (extents.count, *form)
        self.threads = threads
        self._sums, self._pixel_sums = sums
        self._size, self._fit = (form[0], form[1]), cast(Fit, fit)
        self._max_pixels, self._value_range = max_pixels, value_range
        self._to_compare = _COMPARED_SAMPLES
        self._pool: ThreadPoolExecutor | None = None
        self._pool_threads = 0

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write whole images of samples (n,) to `out` (n, H, W, C), and return it.

        Raises:
            UnreadableError: a sample cannot be read or decoded, and no replacement is allowed.
            DataError: pictures decode to other pixels with the libraries of this machine than when the file was made.
        """
        samples = np.asarray(samples, np.int64)

        def attempt(actual: np.ndarray, places: np.ndarray, patient: bool) -> Mapping[int, str]:
            return self._decode_all(actual, [out[place] for place in places.tolist()], patient)

        self._complete(samples, attempt)
        return out

    def decode(self, sample: int, content: bytes, out: np.ndarray) -> str | None:
        """Decode the stored bytes of a sample to `out` (H, W, C), and return the reason for a failure, otherwise None.

        Raises:
            DataError: see `take`.
        """
        if zlib.crc32(content) != self._sums[sample]:
            return "its bytes changed since the file was written"
        try:
            out[...] = decode(content, self._size, self._fit, self.shape[3], self._max_pixels, self._value_range)
        except DataError as error:
            return str(error).rstrip(".")
        if self._to_compare > 0:
            self._to_compare -= 1
            self._compare(sample, out)
        return None

    def pixel_sums(self, sums: np.ndarray | None) -> np.ndarray | None:
        return self._pixel_sums

    def _pixel_sum(self, sample: int, stored_sum: int) -> int:
        """Return the declared checksum of the pixels; a negative number (never a checksum) if the stored bytes changed."""
        return int(self._pixel_sums[sample]) if stored_sum == self._sums[sample] else -1 - stored_sum

    def _decode_all(self, samples: np.ndarray, outs: list[np.ndarray], patient: bool) -> Mapping[int, str]:
        """Read samples (n,) and decode them to `outs`; return the reason for each failure, by index in `samples`."""
        sizes = self.extents.sizes(samples)
        ends = np.cumsum(sizes)
        contents = np.empty(int(sizes.sum()), np.uint8)
        starts = self.extents.starts(samples)[:, None]
        failed = dict(self.fetch(samples, starts, (ends - sizes)[:, None], sizes, contents, patient=patient))
        numbers = [number for number in range(len(samples)) if number not in failed]

        def one(number: int) -> str | None:
            content = contents[ends[number] - sizes[number] : ends[number]].tobytes()
            return self.decode(int(samples[number]), content, outs[number])

        for number, why in zip(numbers, self._map_threads(one, numbers), strict=True):
            if why is not None:
                failed[number] = why
        return {number: failed[number] for number in sorted(failed)}

    def _map_threads(self, function: Callable[[int], str | None], numbers: list[int]) -> Iterator[str | None]:
        """Yield the results of a function in the order of `numbers`, computed by the decoding threads if there are several."""
        if self.threads == 1 or len(numbers) < 2:
            return map(function, numbers)
        if self._pool is None or self._pool_threads != self.threads:
            self._pool_threads = self.threads
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="hpctrain-decode")
            weakref.finalize(self, self._pool.shutdown, wait=False)
        return self._pool.map(function, numbers)

    def _compare(self, sample: int, pixels: np.ndarray) -> None:
        if sum_of(pixels) != self._pixel_sums[sample]:
            raise DataError(
                f"Sample {sample} of the data file {self._path} decodes to other pixels here ({versions()}) than when "
                "the file was made; convert it again on this machine, or install the same library versions."
            )
