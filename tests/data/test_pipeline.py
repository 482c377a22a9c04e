"""The image pipeline: regions of whole images, work that a kernel set takes over, and threads that divide a batch."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.intervals import clip, hull, relative, shape_of, size_of
from hpctrain.data.pipeline import CHUNK_BYTES, BatchThreads, Pipeline, can_defer, default_threads, filling
from tests.support.sampling import amount

MEAN, STD = np.array([0.3, 0.5, 0.6, 0.1]), np.array([0.2, 0.25, 0.3, 0.0])
MEAN3, STD3 = MEAN[:3], STD[:3]
COUNT = 4
ORIGIN = (0, 0), (0, 0)


@st.composite
def intervals(draw, size):
    start = draw(st.integers(0, size))
    return start, draw(st.integers(start, size))


@st.composite
def augmentations(draw, shape, channels):
    """A list of steps that images of `shape` are large enough for."""
    height, width = shape
    specs = []
    names = ["pad_crop", "random_resized_crop", "center_crop", "flip", "resize", "randaugment", "trivial_augment_wide"]
    chosen = st.sampled_from(names if channels in (1, 3) else names[:5])
    for name in draw(st.lists(chosen, max_size=4)):
        options = {}
        if name == "pad_crop":
            options = {"padding": draw(st.integers(0, 15))}
        elif name == "random_resized_crop":
            options = {"size": draw(st.integers(1, 30)), "scale": draw(st.sampled_from([(0.08, 1.0), (1.0, 1.0), (0.01, 0.1)]))}
            height = width = options["size"]
        elif name == "center_crop":
            options = {"size": draw(st.integers(1, min(height, width)))}
            height = width = options["size"]
        elif name == "resize":
            options = {"size": draw(st.integers(1, 30))}
            shorter = min(height, width)
            height, width = height * options["size"] // shorter, width * options["size"] // shorter
        specs.append((name, options))
    for value in draw(st.lists(st.sampled_from([0, 1.5, "random"]), max_size=2)):
        specs.append(("random_erasing", {"value": value, "probability": 0.8, "scale": [0.1, 0.6]}))
    return specs


@given(st.data(), st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 3, 4]), st.integers(0, 2**62), st.integers(0, 3))
@settings(max_examples=amount(60, 300), deadline=None)
def test_a_region_has_the_pixels_of_the_whole(data, height, width, channels, seed, epoch):
    images = np.random.default_rng(seed).integers(0, 256, (COUNT, height, width, channels), np.uint8)
    specs = data.draw(augmentations((height, width), channels))
    pipeline = Pipeline(specs, seed, MEAN[:channels], STD[:channels], "float32")
    shape = images.shape[1:]
    expected = np.empty((COUNT, *pipeline.output_shape(*shape)), np.float32)
    pipeline(images, np.arange(COUNT), epoch, expected)
    region = data.draw(intervals(expected.shape[1])), data.draw(intervals(expected.shape[2]))
    if not size_of(region):
        return
    most = pipeline.source(shape, region)
    assert clip(most, (height, width)) == most

    def read(sample, wanted):
        assert not size_of(wanted) or hull([wanted, most]) == most, "more than it says that it may need"
        return images[(sample, *relative(wanted, ORIGIN))]

    out = np.full((COUNT, *shape_of(region), channels), np.nan, np.float32)
    pipeline.part(read, shape, np.arange(COUNT), epoch, region, out)
    assert np.array_equal(out, expected[(slice(None), *relative(region, ORIGIN))])


def test_a_resized_crop_reads_the_rows_of_its_window_that_the_filter_reaches():
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 200, 200, 3), np.uint8)
    pipeline = Pipeline([("random_resized_crop", {"size": 40, "scale": [1, 1], "ratio": [1, 1]})], 0, MEAN3, STD3)
    read = []

    def reader(sample, wanted):
        read.append(wanted)
        return images[(sample, *relative(wanted, ORIGIN))]

    out = np.empty((COUNT, 10, 40, 3), np.float32)
    pipeline.part(reader, (200, 200, 3), np.arange(COUNT), 0, ((20, 30), (0, 40)), out)
    for (top, bottom), columns in read:  # 5 rows make one, and the filter is twice as wide
        assert 88 <= top <= 98
        assert 152 <= bottom <= 162
        assert columns == (0, 200)


@given(st.data(), st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**62))
@settings(max_examples=amount(20, 100), deadline=None)
def test_a_mirrored_pipeline_returns_the_mirror_image_of_each_sample(data, height, width, seed):
    images = np.random.default_rng(seed).integers(0, 256, (COUNT, height, width, 3), np.uint8)
    pipeline = Pipeline(data.draw(augmentations((height, width), 3)), seed, MEAN3, STD3, "float32")
    mirrored = pipeline.mirrored()
    shape = pipeline.output_shape(*images.shape[1:])
    assert mirrored.output_shape(*images.shape[1:]) == shape
    plain, mirrors = (one(images, np.arange(COUNT), 1, np.empty((COUNT, *shape), np.float32)) for one in (pipeline, mirrored))
    assert np.array_equal(mirrors, plain[:, :, ::-1])
    region = data.draw(intervals(shape[0])), data.draw(intervals(shape[1]))
    if size_of(region):

        def read(sample, wanted):
            return images[(sample, *(slice(*interval) for interval in wanted))]

        out = np.empty((COUNT, *shape_of(region), 3), np.float32)
        mirrored.part(read, images.shape[1:], np.arange(COUNT), 1, region, out)
        assert np.array_equal(out, mirrors[:, slice(*region[0]), slice(*region[1])])


STEPS = [
    ("pad_crop", {}), ("random_resized_crop", {"size": 90}), ("flip", {}), ("trivial_augment_wide", {}),
    ("random_erasing", {"value": "random"}),
]  # fmt: skip


def made(threads, images, region=None, epoch=2, dtype="float32"):
    """Return images after all steps, or a region of them, made by `threads` threads."""
    pipeline = Pipeline(STEPS, 7, MEAN3, STD3, dtype)
    pipeline.share_out(threads)
    ids = np.arange(len(images))[::-1] * 3
    if region is None:
        return pipeline(images, ids, epoch, np.empty((len(images), 90, 90, 3), dtype))
    out = np.empty((len(images), *shape_of(region), 3), dtype)
    order = {sample: number for number, sample in enumerate(ids.tolist())}
    at_once = []

    def read(sample, wanted):
        at_once.append(sample)
        assert at_once == [sample], "files are read by one thread at a time"
        pixels = images[(order[sample], *relative(wanted, ORIGIN))]
        at_once.remove(sample)
        return pixels

    return pipeline.part(read, images.shape[1:], ids, epoch, region, out)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_the_number_of_threads_does_not_show(threads, count):
    images = np.random.default_rng(count).integers(0, 256, (count, 80, 100, 3), np.uint8)
    alone = made(1, images)
    for _ in range(2):
        assert np.array_equal(made(threads, images), alone)
    region = (11, 60), (0, 77)
    assert np.array_equal(made(threads, images, region), alone[(slice(None), *relative(region, ORIGIN))])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("place", ["pipeline", "augmentations.flip"])
def test_large_images_are_normalised_and_mirrored_to_the_bits_of_small_ones(place, dtype, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (5, 80, 100, 3), np.uint8)
    by_opencv = made(1, images, dtype=dtype)
    monkeypatch.setattr(f"hpctrain.data.{place}.LEAST_FOR_OPENCV", 1 << 60)
    by_numpy = made(1, images, dtype=dtype)
    assert by_opencv.dtype == dtype
    assert np.array_equal(by_opencv, by_numpy)


WINDOWS = [("pad_crop", {"padding": 3}), ("flip", {}), ("center_crop", {"size": 6}), ("pad_crop", {"padding": 20})]
PIXELS = [("random_resized_crop", {"size": 8}), ("randaugment", {"magnitude": 15}), ("resize", {"size": 7})]
ERASING = ("random_erasing", {"value": 0.7, "probability": 0.6, "scale": [0.1, 0.5]})


def unfinished(pipeline, images, ids, epoch=1):
    """The batch with its last steps left, and the images that the pipeline makes."""
    shape = pipeline.stored_shape(*images.shape[1:])
    out = images if pipeline.keeps_pixels else np.full((len(images), *shape), 77, np.uint8)
    expected = np.empty((len(images), *pipeline.output_shape(*images.shape[1:])), pipeline.dtype)
    return pipeline.unfinished(images, ids, epoch, out), pipeline(images, ids, epoch, expected)


@given(
    st.lists(st.sampled_from(WINDOWS + PIXELS), max_size=5),
    st.sampled_from([[], [ERASING]]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 9),
    st.integers(0, 2**40),
)
@settings(max_examples=amount(25, 120), deadline=None)
def test_images_made_of_an_unfinished_batch_are_the_pipelines(specs, last, options, dtype, count, seed):
    mirrored, resized, threads = options
    images = np.random.default_rng(seed).integers(0, 256, (count, 9, 11, 3), np.uint8)
    pipeline = Pipeline([*specs, *last], seed, MEAN3, STD3, dtype)
    pipeline = pipeline.resized(6) if resized else pipeline
    pipeline = pipeline.mirrored() if mirrored else pipeline
    pipeline.share_out(1 + threads)
    batch, expected = unfinished(pipeline, images, np.arange(50, 50 + count))
    assert batch.shape == expected.shape
    assert batch.dtype == expected.dtype
    assert np.asarray(batch).tobytes() == expected.tobytes()


def test_windows_leave_the_stored_pixels_alone():
    images = np.random.default_rng(0).integers(0, 256, (5, 9, 11, 3), np.uint8)
    pipeline = Pipeline(WINDOWS, 3, MEAN3, STD3)
    assert pipeline.keeps_pixels
    assert pipeline.stored_shape(9, 11, 3) == (9, 11, 3)
    batch, _ = unfinished(pipeline, images, np.arange(5))
    assert batch.pixels is images
    later = Pipeline([*WINDOWS, PIXELS[1], WINDOWS[1]], 3, MEAN3, STD3)
    assert not later.keeps_pixels
    assert later.stored_shape(9, 11, 3) == (6, 6, 3)


@pytest.mark.parametrize("resize", [PIXELS[0], PIXELS[2]])
def test_a_resize_in_front_of_windows_is_left_too(resize):
    images = np.random.default_rng(0).integers(0, 256, (5, 9, 11, 3), np.uint8)
    pipeline = Pipeline([resize, *WINDOWS[:2]], 3, MEAN3, STD3)
    assert pipeline.keeps_pixels
    batch, expected = unfinished(pipeline, images, np.arange(5))
    assert batch.pixels is images
    assert batch.resampling is not None
    assert np.asarray(batch[[4, 1]]).tobytes() == expected[[4, 1]].tobytes()
    assert not Pipeline([WINDOWS[0], resize], 3, MEAN3, STD3).keeps_pixels


@pytest.mark.parametrize(
    ("specs", "can"),
    [([], True), ([ERASING], True), ([("random_erasing", {"value": "random"})], False), ([ERASING, ERASING], False)],
)
def test_one_rectangle_of_one_number_may_be_left(specs, can):
    pipeline = Pipeline(specs, 0, MEAN3, STD3)
    assert pipeline.can_defer is can
    assert can_defer(pipeline.normalised) is can
    assert (filling(pipeline.normalised) is not None) == (bool(specs) and specs[0][1]["value"] != "random")


@given(st.integers(1, 5), st.integers(0, 70), st.sampled_from([0, 1, CHUNK_BYTES // 7, CHUNK_BYTES, 9 * CHUNK_BYTES]))
@settings(deadline=None, max_examples=40)
def test_each_sample_is_made_once(threads: int, samples: int, sample_bytes: int) -> None:
    made: list[int] = []
    seen: set[int] = set()

    def work(thread: int, first: int, last: int) -> None:
        assert 0 <= thread < threads
        assert first < last
        seen.add(thread)
        made.extend(range(first, last))

    shared = BatchThreads(threads)
    for _ in range(2):
        made.clear()
        shared.run(samples, sample_bytes, work)
        assert sorted(made) == list(range(samples))


def test_threads_work_in_parallel_and_end_with_the_object() -> None:
    gc.collect()
    shared, together = BatchThreads(3), threading.Barrier(3, timeout=30)
    others: set[threading.Thread] = set()

    def work(thread: int, first: int, last: int) -> None:
        others.add(threading.current_thread())
        together.wait()

    shared.run(3, CHUNK_BYTES, work)
    others.remove(threading.current_thread())
    assert len(others) == 2
    del shared
    gc.collect()
    for thread in others:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize("broken", [0, 5])
def test_an_error_is_raised_once_all_threads_are_done(broken: int) -> None:
    at_work: list[int] = []

    def work(thread: int, first: int, last: int) -> None:
        at_work.append(thread)
        try:
            time.sleep(0.01)
            if first <= broken < last:
                raise OSError("a sample cannot be read")
        finally:
            at_work.remove(thread)

    shared = BatchThreads(3)
    with pytest.raises(OSError, match="a sample cannot be read"):
        shared.run(9, CHUNK_BYTES, work)
    assert not at_work
    shared.run(9, CHUNK_BYTES, lambda thread, first, last: None)


def test_most_cores_are_left_to_the_network() -> None:
    assert [default_threads(cores) for cores in (1, 2, 4, 7, 8, 16, 128)] == [1, 1, 1, 1, 2, 4, 8]
