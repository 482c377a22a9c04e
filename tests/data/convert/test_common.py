"""Decoding: every mode and orientation becomes plain pixels; parallel work keeps its order."""

import io
import threading

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.convert import common
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
    assert np.array_equal(common.decode(encoded(image), None), np.asarray(image))
    assert np.array_equal(common.decode(encoded(image), (11, 7)), np.asarray(image))


def test_a_path_is_as_good_as_bytes(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(random_image()))
    assert np.array_equal(common.decode(tmp_path / "a.png", None), np.asarray(random_image()))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "RGB"])
def test_every_mode_becomes_rgb_or_grey(mode):
    source = Image.new("RGB", (7, 11), (200, 200, 200)).convert(mode)
    for channels in (1, 3):
        pixels = common.decode(encoded(source), None, channels=channels)
        assert pixels.shape == (11, 7, channels)
        assert pixels.dtype == np.uint8
        expected = np.asarray(source.convert("RGB"))[..., :channels]
        assert np.array_equal(pixels, expected)


def test_cmyk_jpeg_becomes_rgb():
    source = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    pixels = common.decode(encoded(source, "JPEG"), None)
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() < 10


def test_a_transparent_palette_keeps_its_colours():
    source = Image.new("P", (3, 2), 1)
    source.putpalette([0, 0, 0, 10, 200, 30])
    for transparency in (1, bytes([255, 128])):
        pixels = common.decode(encoded(source, transparency=transparency), None)
        assert (pixels == [10, 200, 30]).all()


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.array([[0, 255, 256], [32768, 65280, 65535]], np.uint16)
    pixels = common.decode(encoded(Image.fromarray(values)), None, channels=1)
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
    pixels = common.decode(encoded(Image.fromarray(np.ascontiguousarray(stored)), "PNG", exif=exif.tobytes()), None)
    assert np.array_equal(pixels, upright)


@pytest.mark.parametrize(("height", "width"), [(11, 7), (7, 11), (9, 9), (1, 30), (232, 309), (640, 479)])
@pytest.mark.parametrize("size", [(5, 5), (224, 224), (7, 3), (1, 1)])
def test_crop_keeps_the_aspect_and_the_centre(height, width, size):
    # A ramp along each dim: the resized ramp has the slope of the original times one common scale.
    rows, columns = np.mgrid[0:height, 0:width]
    ramp = np.stack([rows * 255 / height, columns * 255 / width, 0 * rows], -1).astype(np.uint8)
    box = common._central_box((width, height), (size[1], size[0]))
    assert box[0] >= 0
    assert box[1] >= 0
    assert box[2] <= width
    assert box[3] <= height
    assert (box[2] - box[0]) / size[1] == pytest.approx((box[3] - box[1]) / size[0])
    assert (box[2] - box[0] == width) or (box[3] - box[1] == height)
    assert box[0] + box[2] == pytest.approx(width)
    assert box[1] + box[3] == pytest.approx(height)
    pixels = common.decode(encoded(Image.fromarray(ramp)), size)
    assert pixels.shape == (*size, 3)
    assert abs(pixels[..., 0].mean() - ramp[..., 0].mean()) < 16
    assert abs(pixels[..., 1].mean() - ramp[..., 1].mean()) < 16


def test_squash_shows_the_whole_image():
    image = np.zeros((10, 40, 3), np.uint8)
    image[:, :10] = 240
    squashed = common.decode(encoded(Image.fromarray(image)), (8, 8), "squash")
    cropped = common.decode(encoded(Image.fromarray(image)), (8, 8), "crop")
    assert squashed[:, 0].min() > 200
    assert cropped.max() == 0


@pytest.mark.parametrize("content", [b"", b"not an image", encoded(random_image())[:60], encoded(random_image(), "JPEG")[:200]])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(DataError, match="cannot be decoded"):
        common.decode(content, None)


@pytest.mark.parametrize("threads", [1, 3])
def test_parallel_results_keep_their_order_and_a_bounded_window(threads):
    lock, state = threading.Lock(), {"ahead": 0, "taken": 0, "started": 0}

    def work(item):
        with lock:
            state["started"] += 1
            state["ahead"] = max(state["ahead"], state["started"] - state["taken"])
        return item * item

    results = []
    for result in common.in_order(work, range(100), threads):
        results.append(result)
        with lock:
            state["taken"] += 1
    assert results == [i * i for i in range(100)]
    assert state["ahead"] <= 4 * threads + 1


def test_an_error_in_a_worker_ends_the_whole():
    started = []

    def work(item):
        started.append(item)
        if item == 3:
            raise DataError("bad item")
        return item

    with pytest.raises(DataError, match="bad item"):
        list(common.in_order(work, range(1000), 2))
    assert len(started) < 30


def test_chunks_hold_every_sample_in_order():
    samples = [(np.full((1024, 1024, 3), i, np.uint8), i) for i in range(13)]
    done = []
    chunks = list(common.chunks(samples, done.append))
    assert len(chunks) > 1
    assert np.concatenate([images[:, 0, 0, 0] for images, _ in chunks]).tolist() == list(range(13))
    assert np.concatenate([labels for _, labels in chunks]).tolist() == list(range(13))
    assert sum(done) == 13


def test_class_names_are_one_a_line(tmp_path):
    (tmp_path / "names").write_text("first\n\n second one \n")
    assert common.read_names(tmp_path / "names") == ["first", "second one"]
    for content, message in (("a\nb\na\n", "holds a twice"), ("\n", "is empty")):
        (tmp_path / "names").write_text(content)
        with pytest.raises(DataError, match=message):
            common.read_names(tmp_path / "names")
    with pytest.raises(DataError, match="no file of class names"):
        common.read_names(tmp_path / "none")


def test_long_lists_are_cut():
    assert common.listed("image", ["a"]) == "1 image (a)"
    assert common.listed("image", list("abcd"), 2) == "4 images (a, b, and 2 more)"
