"""Decoding: every mode and orientation becomes plain pixels, the same with every library."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hpctrain.core.errors import DataError
from hpctrain.data import decoding
from hpctrain.data.decoding import _central_box, decode
from tests.support.sampling import amount


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def random_image(height=11, width=7, channels=3):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8))


def test_png_pixels_are_exact():
    image = random_image()
    assert np.array_equal(decode(encoded(image), None), np.asarray(image))
    assert np.array_equal(decode(encoded(image), (11, 7)), np.asarray(image))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "RGB"])
def test_every_mode_becomes_rgb_or_grey(mode):
    source = Image.new("RGB", (7, 11), (200, 200, 200)).convert(mode)
    for channels in (1, 3):
        pixels = decode(encoded(source), None, channels=channels)
        assert pixels.shape == (11, 7, channels)
        assert pixels.dtype == np.uint8
        expected = np.asarray(source.convert("RGB"))[..., :channels]
        assert np.array_equal(pixels, expected)


def test_cmyk_jpeg_becomes_rgb():
    source = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    pixels = decode(encoded(source, "JPEG"), None)
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() < 10


def test_a_transparent_palette_keeps_its_colours():
    source = Image.new("P", (3, 2), 1)
    source.putpalette([0, 0, 0, 10, 200, 30])
    for transparency in (1, bytes([255, 128])):
        pixels = decode(encoded(source, transparency=transparency), None)
        assert (pixels == [10, 200, 30]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_image_upright(orientation):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255
    # How the camera stored it: the inverse of what the tag asks for.
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
        6: np.rot90(upright), 7: np.rot90(upright.transpose(1, 0, 2), 2), 8: np.rot90(upright, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(encoded(Image.fromarray(np.ascontiguousarray(stored)), "PNG", exif=exif.tobytes()), None)
    assert np.array_equal(pixels, upright)


@pytest.mark.parametrize(("height", "width"), [(11, 7), (7, 11), (9, 9), (1, 30), (232, 309), (640, 479)])
@pytest.mark.parametrize("size", [(5, 5), (224, 224), (7, 3), (1, 1)])
def test_crop_keeps_the_aspect_and_the_centre(height, width, size):
    # A ramp along each dim: the resized ramp has the slope of the original times one common scale.
    rows, columns = np.mgrid[0:height, 0:width]
    ramp = np.stack([rows * 255 / height, columns * 255 / width, 0 * rows], -1).astype(np.uint8)
    box = _central_box((width, height), (size[1], size[0]))
    assert box[0] >= 0
    assert box[1] >= 0
    assert box[2] <= width
    assert box[3] <= height
    assert (box[2] - box[0]) / size[1] == pytest.approx((box[3] - box[1]) / size[0])
    assert (box[2] - box[0] == width) or (box[3] - box[1] == height)
    assert box[0] + box[2] == pytest.approx(width)
    assert box[1] + box[3] == pytest.approx(height)
    pixels = decode(encoded(Image.fromarray(ramp)), size)
    assert pixels.shape == (*size, 3)
    assert abs(pixels[..., 0].mean() - ramp[..., 0].mean()) < 16
    assert abs(pixels[..., 1].mean() - ramp[..., 1].mean()) < 16


@pytest.mark.parametrize("content", [b"", b"not an image", encoded(random_image())[:60], encoded(random_image(), "JPEG")[:200]])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(content, None)


def jpeg_kinds():
    """JPEG files of all kinds, by name, of one made-up photo with smooth and noisy parts."""
    random = np.random.default_rng(3)
    ramp = np.linspace(0, 255, 45 * 61 * 3).reshape(45, 61, 3)
    pixels = (ramp + random.integers(-30, 30, ramp.shape)).clip(0, 255).astype(np.uint8)
    image, exif, up = Image.fromarray(pixels), Image.Exif(), Image.Exif()
    exif[0x0112], up[0x0112] = 6, 1
    options = {f"{name} {quality}": {"subsampling": s, "quality": quality}
               for s, name in enumerate(("4:4:4", "4:2:2", "4:2:0")) for quality in (30, 90, 100)}  # fmt: skip
    options |= {
        "progressive": {"progressive": True},
        "restart": {"restart_marker_blocks": 3},
        "optimised": {"optimize": True},
        "rgb": {"keep_rgb": True},
        "turned": {"exif": exif},
        "upright": {"exif": up},
        "xmp": {"xmp": b'<x tiff:Orientation="3"/>'},
        "comment": {"comment": b"MPF\0 Exif\0\0"},
    }
    kinds = {name: encoded(image, "JPEG", **more) for name, more in options.items()}
    kinds["grey"] = encoded(image.convert("L"), "JPEG")
    kinds["CMYK"] = encoded(image.convert("CMYK"), "JPEG")
    kinds["junk after it"] = kinds["progressive"] + b"junk"
    kinds["two"] = encoded(image, "MPO", save_all=True, append_images=[image])
    return kinds


JPEG_KINDS = jpeg_kinds()


def same_with_and_without(content, size, fit, channels, monkeypatch):
    """Return what a decoding returns, or says: the same with simplejpeg and without."""
    results = []
    for library in {id(library): library for library in (decoding.simplejpeg, None)}.values():
        with monkeypatch.context() as patched:
            patched.setattr(decoding, "simplejpeg", library)
            try:
                results.append(decode(content, size, fit, channels))
            except DataError as error:
                results.append(str(error))
    assert type(results[0]) is type(results[-1])
    if isinstance(results[0], str):
        assert results[0] == results[-1]
    else:
        assert np.array_equal(results[0], results[-1])
    return results[0]


@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [None, (45, 61), (20, 20)])
def test_pixels_are_the_same_with_every_library(kind, channels, size, monkeypatch):
    pixels = same_with_and_without(JPEG_KINDS[kind], size, "crop", channels, monkeypatch)
    turned = kind == "turned"
    assert pixels.shape == ((61, 45, channels) if turned and size is None else (*(size or (45, 61)), channels))


@settings(max_examples=amount(60, 400), deadline=None)
@given(kind=st.sampled_from(sorted(JPEG_KINDS)), data=st.data())
def test_damaged_files_are_the_same_with_every_library(kind, data):
    content = bytearray(JPEG_KINDS[kind])
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content))) :]
    with pytest.MonkeyPatch.context() as patch:
        same_with_and_without(bytes(content), None, "crop", 3, patch)


def chunk(kind, content, damaged=False):
    check = zlib.crc32(kind + content) ^ damaged
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def with_chunk(content, added):
    """Return a PNG with an additional chunk after its header."""
    return content[:33] + added + content[33:]


def with_segment(content, marker, data):
    return content[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data + content[2:]


def turned(kind, **more):
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(random_image(), kind, exif=exif.tobytes(), **more)


EXIF = b"Exif\0\0II*\0\x08\0\0\0"
#: of pictures with damaged metadata: (content, the same without, whether EXIF that can be read turns it)
DAMAGED_METADATA = {
    "eXIf of garbage": (with_chunk(encoded(random_image()), chunk(b"eXIf", b"garbage")), False),
    "eXIf cut": (with_chunk(encoded(random_image()), chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\xff")), False),
    "eXIf empty": (with_chunk(encoded(random_image()), chunk(b"eXIf", b"")), False),
    "eXIf with another checksum": (with_chunk(encoded(random_image()), chunk(b"eXIf", b"MM\0*", damaged=True)), False),
    "text with another checksum": (with_chunk(encoded(random_image()), chunk(b"tEXt", b"a\0b", damaged=True)), False),
    "profile of garbage": (with_chunk(encoded(random_image()), chunk(b"iCCP", b"name\0\0garbage")), False),
    "profile of another kind": (with_chunk(encoded(random_image()), chunk(b"iCCP", b"name\0\7")), False),
    "endless text": (with_chunk(encoded(random_image()), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(5 << 20)))), False),
    "turned, with a broken comment": (with_chunk(turned("PNG"), chunk(b"tEXt", b"a\0b", damaged=True)), True),
    "JPEG, EXIF cut": (with_segment(encoded(random_image(), "JPEG"), 0xE1, EXIF + b"\xff"), False),
    "JPEG, EXIF of garbage": (with_segment(encoded(random_image(), "JPEG"), 0xE1, b"Exif\0\0garbage"), False),
    "JPEG, profile cut": (with_segment(encoded(random_image(), "JPEG"), 0xE2, b"ICC_PROFILE\0"), False),
    "JPEG, profile of garbage": (with_segment(encoded(random_image(), "JPEG"), 0xE2, b"ICC_PROFILE\0\1\1garbage"), False),
    "JPEG, pictures of garbage": (with_segment(encoded(random_image(), "JPEG"), 0xE2, b"MPF\0garbage"), False),
    "JPEG, Photoshop cut": (with_segment(encoded(random_image(), "JPEG"), 0xED, b"Photoshop 3.0\x008BIM"), False),
    "JPEG turned, profile cut": (with_segment(turned("JPEG"), 0xE2, b"ICC_PROFILE\0"), True),
    "WebP": (turned("WEBP", lossless=True).replace(b"MM\0*\0\0\0\x08", b"garbage!"), False),
}


@pytest.mark.parametrize("kind", DAMAGED_METADATA)
def test_damaged_metadata_does_not_matter_to_pixels(kind, monkeypatch):
    content, turns = DAMAGED_METADATA[kind]
    sound = encoded(random_image(), "JPEG" if content.startswith(decoding._JPEG) else "PNG")
    expected = np.rot90(decode(sound, None), -1) if turns else decode(sound, None)
    assert np.array_equal(same_with_and_without(content, None, "crop", 3, monkeypatch), expected)


@pytest.mark.parametrize("marker", [0xE1, 0xE2, 0xED, 0xFE])
def test_thousands_of_segments_reach_no_reader_that_joins_them(marker, monkeypatch):
    """A file of many segments is decoded from a few, and turned by the first EXIF segment."""
    content, opened, seen = turned("JPEG"), Image.open, []
    end = list(decoding._segments(content))[1][2]  # of the segment with the orientation
    many = content[:end] + 1000 * with_segment(b"", marker, EXIF + b"a" * 50) + content[end:]
    monkeypatch.setattr(Image, "open", lambda file, **options: (seen.append(len(file.getvalue())), opened(file, **options))[1])
    assert np.array_equal(decode(many, None), decode(content, None))
    assert seen
    assert max(seen) <= len(content)


def test_a_tiff_with_damaged_metadata_is_decoded():
    content = bytearray(encoded(random_image(), "TIFF", tiffinfo={34665: 1 << 30}))
    place = struct.unpack_from("<I", content, 4)[0]
    assert struct.pack("<H", 34665) in content[place:]
    assert np.array_equal(decode(bytes(content), None), np.asarray(random_image()))


@pytest.mark.parametrize("damage", ["bytes", "chunk"])
def test_damaged_pixels_are_refused_whatever_their_metadata(damage):
    content = bytearray(with_chunk(encoded(random_image()), chunk(b"eXIf", b"garbage", damaged=True)))
    place = content.index(b"IDAT")
    if damage == "bytes":
        content[place + 8] ^= 1
    else:
        del content[place - 4 :]
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(bytes(content), None)


@pytest.mark.parametrize("kind", ["BMP", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000"])
def test_other_formats_are_decoded(kind):
    image = random_image().quantize(60).convert("RGB")  # so that GIF keeps it
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(decode(encoded(image, kind, **options), None), np.asarray(image))


@pytest.mark.parametrize("kind", ["EPS", "ICO", "TGA", "PCX", "PDF"])
def test_formats_that_start_programs_or_take_any_bytes_are_refused(kind):
    with pytest.raises(DataError, match=r"its format is not supported; save it as JPEG or PNG\.$"):
        decode(encoded(random_image(), kind), None)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_in_every_format(kind):
    values = np.array([[0, 255, 256], [32768, 65280, 65535]], np.uint16)
    assert np.array_equal(decode(encoded(Image.fromarray(values), kind), None, channels=1)[..., 0], values >> 8)


def test_twelve_bits_are_scaled_by_their_own_range():
    content = bytearray(encoded(Image.fromarray(np.zeros((1, 2), np.uint16)), "TIFF"))
    place = struct.unpack_from("<I", content, 4)[0] + 2
    while struct.unpack_from("<H", content, place)[0] != 258:
        place += 12
    struct.pack_into("<H", content, place + 8, 12)  # bits per sample
    data = content.rindex(bytes(4))
    content[data : data + 3] = b"\xff\xf8\x00"  # two values of 12 bits: 4095 and 2048
    assert decode(bytes(content), None, channels=1)[0, :, 0].tolist() == [255, 128]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([[0.0, 0.5, 1.0]], np.float32), "floating-point numbers"),
        (np.array([[0, 70000]], np.int32), "whole numbers of 32 bits"),
        (np.array([[-1, 5]], np.int32), "whole numbers of 32 bits"),
    ],
)
def test_values_without_a_known_range_are_refused_and_not_clipped(values, words):
    with pytest.raises(DataError, match=f"its pixels are {words}.*; convert it with --range, or save it with 8 or 16"):
        decode(encoded(Image.fromarray(values), "TIFF"), None)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_the_limit_of_pixels_can_be_raised_by_name(kind, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_PIXELS", 70)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    content = encoded(random_image(11, 7), kind)
    with pytest.raises(DataError, match="it has 77 pixels, more than the limit of 70; give --max-pixels 77 to allow them"):
        decode(content, (5, 5))
    assert decode(content, (5, 5), max_pixels=77).shape == (5, 5, 3)


def test_a_bomb_is_refused_before_its_pixels_have_memory():
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    bomb = decoding._PNG + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")
    with pytest.raises(
        DataError, match="it has 3,600,000,000 pixels, more than the limit of 178,956,970; give --max-pixels 3600000000"
    ):
        decode(bomb, (5, 5))


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    with (tmp_path / "sparse.jpg").open("wb") as file:
        file.truncate(1 << 40)
    for name, why in {
        "pipe": "it is a pipe, not a regular file",
        "zero": "it is a device, not a regular file",
        "sparse": "it has more than ",
        "none": "No such file or directory",
    }.items():
        with pytest.raises(DataError, match=f"The image cannot be read: {why}"):
            decode(tmp_path / f"{name}.jpg", None)
