"""Decoding: every mode and orientation becomes plain pixels, the same with every library."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hpctrain.data import decoder
from hpctrain.data.decoder import _central_box, decode
from hpctrain.errors import DataError


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


def test_a_path_is_as_good_as_bytes(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(random_image()))
    assert np.array_equal(decode(tmp_path / "a.png", None), np.asarray(random_image()))


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


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.array([[0, 255, 256], [32768, 65280, 65535]], np.uint16)
    pixels = decode(encoded(Image.fromarray(values)), None, channels=1)
    assert np.array_equal(pixels[..., 0], values >> 8)


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


def test_squash_shows_the_whole_image():
    image = np.zeros((10, 40, 3), np.uint8)
    image[:, :10] = 240
    squashed = decode(encoded(Image.fromarray(image)), (8, 8), "squash")
    cropped = decode(encoded(Image.fromarray(image)), (8, 8), "crop")
    assert squashed[:, 0].min() > 200
    assert cropped.max() == 0


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
    kinds["junk behind it"] = kinds["progressive"] + b"junk"
    kinds["two"] = encoded(image, "MPO", save_all=True, append_images=[image])
    return kinds


JPEG_KINDS = jpeg_kinds()


def same_with_and_without(content, size, fit, channels, monkeypatch):
    """What a decoding gives, or says: the same with simplejpeg and without."""
    results = []
    for library in {id(library): library for library in (decoder.simplejpeg, None)}.values():
        with monkeypatch.context() as patched:
            patched.setattr(decoder, "simplejpeg", library)
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


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    quality=st.integers(1, 100),
    subsampling=st.integers(0, 2),
    progressive=st.booleans(),
    size=st.none() | st.tuples(st.integers(1, 30), st.integers(1, 30)),
    fit=st.sampled_from(["crop", "squash"]),
    seed=st.integers(0, 1000),
)
def test_any_photo_is_the_same_with_every_library(shape, quality, subsampling, progressive, size, fit, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)
    options = {"quality": quality, "subsampling": subsampling, "progressive": progressive}
    with pytest.MonkeyPatch.context() as patch:
        content = encoded(Image.fromarray(pixels), "JPEG", **options)
        same_with_and_without(content, size, fit, 3, patch)


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(JPEG_KINDS)), data=st.data())
def test_damaged_files_are_the_same_with_every_library(kind, data):
    content = bytearray(JPEG_KINDS[kind])
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content))) :]
    with pytest.MonkeyPatch.context() as patch:
        same_with_and_without(bytes(content), None, "crop", 3, patch)


def test_the_libraries_are_named():
    assert "Pillow" in decoder.versions()
