"""The loader: any number of ranks sees one stream, in a thread that never leaks and never hides an error."""

import gc
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.backend.pixels import PixelBatch
from hpctrain.core.errors import ShapeError
from hpctrain.data.loader import Loader, Share, cut
from hpctrain.data.pipeline import ImageSizes, Pipeline
from hpctrain.data.sampler import Mixing, Sampler, counts
from tests.support.data_files import in_memory
from tests.support.sampling import amount

SPECS = [("pad_crop", {"padding": 2}), ("flip", {})]


def make_loader(file, batch, *, specs=SPECS, shuffle=True, samples=None, cache=False, **options):
    sampler = Sampler(samples or len(file), batch, 5, shuffle)
    if cache:
        options["pixels"] = in_memory(file, 500 if cache == "some" else 1 << 20)
    return Loader(file, sampler, Pipeline(specs, 5, file.mean, file.std, "float64"), **options)


def read(loader, epoch=0, first=0):
    """Copies of an epoch: (step, x, y, ids, counts, global count)."""
    return [(b.step, b.x.copy(), b.y.copy(), b.sample_ids.copy(), b.counts, b.global_count) for b in loader.epoch(epoch, first)]


_OF_OTHER_TESTS = set()


def loader_threads():
    return [t for t in threading.enumerate() if t.name == "hpctrain-loader" and t not in _OF_OTHER_TESTS]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    _OF_OTHER_TESTS.update(loader_threads())
    yield
    gc.collect()
    assert loader_threads() == []


@settings(max_examples=amount(8, 40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 3), st.sampled_from([False, True, "some"]))
def test_ranks_together_read_the_stream_of_one_rank(make_file, batch, ranks, prefetch, cache):
    file, _, _ = make_file()
    whole = read(make_loader(file, batch, prefetch=0), epoch=2)
    shares = [
        read(make_loader(file, batch, rank=rank, ranks=ranks, prefetch=prefetch, cache=cache), epoch=2) for rank in range(ranks)
    ]
    assert [len(share) for share in shares] == [len(whole)] * ranks
    for step, (number, x, y, ids, _, total) in enumerate(whole):
        for place, expected in ((1, x), (2, y), (3, ids)):
            assert np.array_equal(np.concatenate([share[step][place] for share in shares]), expected)
        for rank, share in enumerate(shares):
            assert share[step][0] == number == step
            assert share[step][4] == counts(total, ranks)
            assert share[step][5] == total == len(y)
            assert len(share[step][2]) == share[step][4][rank]


@pytest.mark.parametrize("batch", [1, 4, 13, 100])
def test_evaluation_has_every_sample_once_in_order(make_file, batch):
    file, images, labels = make_file()
    steps = read(make_loader(file, batch, specs=[], shuffle=False))
    assert np.array_equal(np.concatenate([step[3] for step in steps]), np.arange(13))
    assert np.array_equal(np.concatenate([step[2] for step in steps]), labels)
    expected = (images / 255 - file.mean) / file.std
    np.testing.assert_allclose(np.concatenate([step[1] for step in steps]), expected, atol=1e-12)


@settings(max_examples=amount(8, 40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 14), st.integers(1, 14), st.integers(0, 14), st.integers(1, 4), st.integers(1, 4), st.data())
def test_other_batches_and_ranks_go_on_with_the_next_sample(make_file, batch, other, steps, ranks, others, data):
    """A run that took some steps and goes on with another batch on other ranks sees each sample once, in the epoch's order."""
    file, _, labels = make_file()
    order = Sampler(13, 1, 5).order(3)
    seen = [read(make_loader(file, batch, rank=rank, ranks=ranks), epoch=3)[:steps] for rank in range(ranks)]
    first = sum(step[5] for step in seen[0])
    options = {"cache": data.draw(st.sampled_from([False, True, "some"])), "prefetch": data.draw(st.integers(0, 2))}
    rest = [read(make_loader(file, other, rank=rank, ranks=others, **options), 3, first) for rank in range(others)]
    ids = [share[step][3] for shares in (seen, rest) for step in range(len(shares[0])) for share in shares]
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *ids]), order)
    for share in (*seen, *rest):
        for step in share:
            assert np.array_equal(step[2], labels[step[3]])


def test_a_region_is_read_for_batches_of_every_size(make_file):
    """The tile of a rank may depend on the batch's size: the last one of an epoch that began elsewhere is another."""
    file, _, _ = make_file()

    def tiles_by_counts(counts, image_shape):
        return [((0, sum(counts)), (0, 1 + sum(counts)), (0, 9), (0, 3))]

    loader = make_loader(file, 4, cache=True, tiles=tiles_by_counts)
    whole = read(make_loader(file, 4, prefetch=0), epoch=1)
    for first, number in ((0, 4), (11, 1)):
        batches = read(loader, 1, first)
        assert len(batches) == number
        images = np.concatenate([step[1] for step in whole])[first:]
        for step in batches:
            assert np.array_equal(step[1], images[: step[5], : 1 + step[5]])
            images = images[step[5] :]


def test_the_ring_is_made_once_and_large_enough(make_file):
    file, _, _ = make_file()
    loader = make_loader(file, 4, prefetch=2)
    bases = {id(batch.x.base) for epoch in range(3) for batch in loader.epoch(epoch)}
    assert len(bases) == 3


def test_a_batch_is_untouched_until_the_next_is_asked_for(make_file):
    file, _, _ = make_file(count=60)
    expected = read(make_loader(file, 4, prefetch=0))
    finished = threading.Event()
    for batch, right in zip(make_loader(file, 4, prefetch=3).epoch(0), expected, strict=True):
        finished.wait(0.005)  # time for the thread to run ahead as far as it may
        assert np.array_equal(batch.x, right[1])
        assert np.array_equal(batch.y, right[2])


def test_closing_early_ends_the_thread(make_file):
    file, _, _ = make_file(count=60)
    loader = make_loader(file, 2)
    batches = loader.epoch(0)
    next(batches)
    assert len(loader_threads()) == 1
    batches.close()
    assert loader_threads() == []
    assert len(read(loader)) == 30


class FailingPipeline(Pipeline):
    """Fails at the third batch."""

    calls = 0

    def __call__(self, images, sample_ids, epoch, out):
        self.calls += 1
        if self.calls == 3:
            raise OSError("the disk is gone")
        return super().__call__(images, sample_ids, epoch, out)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_in_the_thread_is_raised_at_its_batch(make_file, prefetch):
    file, _, _ = make_file()
    loader = Loader(file, Sampler(13, 2), FailingPipeline([], 0, file.mean, file.std), prefetch=prefetch)
    steps = []
    with pytest.raises(OSError, match="the disk is gone"):
        steps.extend(batch.step for batch in loader.epoch(0))
    assert steps == [0, 1]
    assert len(read(loader)) == 7


def test_two_epochs_at_once_are_refused(make_file):
    file, _, _ = make_file()
    loader = make_loader(file, 2)
    first = loader.epoch(0)
    next(first)
    with pytest.raises(AssertionError, match="still being read"):
        next(loader.epoch(1))
    first.close()
    assert len(read(loader, 1)) == 7


def test_a_crop_that_does_not_fit_is_refused_when_the_loader_is_made(make_file):
    file, _, _ = make_file()
    with pytest.raises(ShapeError, match="at most 7 fits"):
        make_loader(file, 2, specs=[("center_crop", {"size": 8})])


class Recorder:
    """Images that note which of their pixels were read; only slices are asked of them."""

    def __init__(self, images):
        self._images = images
        self.read = np.zeros(images.shape[:3], bool)

    @property
    def shape(self):
        return self._images.shape

    def __getitem__(self, index):
        self.read[index] = True
        return self._images[index]


def tiles(image_shape, vertical, horizontal, reach):
    """Tiles of a split group's images by the samples of its ranks, with `reach` pixels around each, even beyond the image."""
    height, width, channels = image_shape

    def tiles_by_counts(counts, image_shape):
        n = sum(counts)
        rows, columns = (
            [(size * cut // pieces - reach, size * (cut + 1) // pieces + reach) for cut in range(pieces)]
            for size, pieces in ((height, vertical), (width, horizontal))
        )
        return [((0, n), row, column, (0, channels)) for row in rows for column in columns]

    return tiles_by_counts


@pytest.mark.slow
@settings(max_examples=amount(8, 40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 20),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (9, 1), (1, 5)]),
    st.integers(0, 2),
    st.sampled_from([[], SPECS, [("random_resized_crop", {"size": 6})], [("center_crop", {"size": 5}), *SPECS]]),
    st.sampled_from([False, True, "some"]),
    st.integers(0, 2),
)
def test_tiles_are_cut_from_the_images_of_the_split_group(make_file, batch, groups, split, reach, specs, cache, prefetch):
    file, _, _ = make_file()
    size, ranks = split[0] * split[1], split[0] * split[1] * groups
    whole = read(make_loader(file, batch, specs=specs, prefetch=0), epoch=1)
    for rank in range(ranks):
        by_counts = tiles(make_loader(file, batch, specs=specs).image_shape, *split, reach)
        options = {"rank": rank, "ranks": ranks, "split_size": size, "tiles": by_counts, "cache": cache, "prefetch": prefetch}
        loader = make_loader(file, batch, specs=specs, **options)
        for (_, x, y, ids, _, total), mine in zip(whole, loader.epoch(1), strict=True):
            every = counts(total, ranks, size)
            first = rank - rank % size
            start, stop = sum(every[:first]), sum(every[: first + size])
            assert mine.share == Share(every[first : first + size], rank % size)
            assert np.array_equal(mine.sample_ids, ids[start:stop])
            own = slice(sum(every[:rank]), sum(every[: rank + 1]))
            assert np.array_equal(mine.y, y[own])
            assert mine.counts == every
            assert np.array_equal(mine.x, cut(x[start:stop], by_counts(every[first : first + size], (0, 0, 0))[rank % size]))


@pytest.mark.slow
@pytest.mark.parametrize(("specs", "shift"), [([], 0), (SPECS, 2), ([("flip", {})], 0)])
def test_only_the_rows_of_its_region_are_read(make_file, specs, shift):
    file, _, _ = make_file(count=40, shape=(24, 10, 3))
    for rank in range(3):
        file.pixels, kept = Recorder(file.images), file.pixels
        by_counts = tiles((24, 10, 3), 3, 1, 1)
        loader = make_loader(file, 7, specs=specs, rank=rank, ranks=3, split_size=3, tiles=by_counts)
        for epoch in range(8):
            read(loader, epoch)
        seen = file.pixels.read
        file.pixels = kept
        rows = np.flatnonzero(seen.any(axis=(0, 2)))
        first, last = max(0, 8 * rank - 1 - shift), min(24, 8 * rank + 9 + shift)
        assert (rows[0], rows[-1] + 1) == (first, last)
        assert seen[:, first:last].mean() > 0.9


def test_a_box_of_channels_and_an_empty_box(make_file):
    file, _, _ = make_file()
    whole = read(make_loader(file, 5, prefetch=0))

    def tiles_by_counts(counts, image_shape):
        n = sum(counts)
        return [((0, n), (0, 7), (0, 9), (1, 3)), ((0, n), (0, 0), (0, 9), (0, 3)), ((0, n), (9, 10), (0, 9), (0, 3))]

    for rank in range(3):
        loader = make_loader(file, 5, rank=rank, ranks=3, split_size=3, tiles=tiles_by_counts)
        for step, mine in zip(whole, loader.epoch(0), strict=True):
            expected = [step[1][..., 1:3], step[1][:, :0], np.zeros_like(step[1][:, :1])][rank]
            assert np.array_equal(mine.x, expected)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("specs", [SPECS, [("random_resized_crop", {"size": 6}), ("flip", {})], [("random_erasing", {})]])
@pytest.mark.parametrize("sizes", [None, ImageSizes(((0, 4), (1, 6)))])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_pixels_that_are_left_are_those_of_the_images(make_file, specs, sizes, prefetch, ranks):
    file, _, _ = make_file()
    for rank in range(ranks):
        options = {"specs": specs, "rank": rank, "ranks": ranks, "prefetch": prefetch, "sizes": sizes}
        images, pixels = make_loader(file, 5, **options), make_loader(file, 5, **options, leaves_pixels=True)
        for epoch, first in ((0, 0), (1, 7)):
            expected = read(images, epoch, first)
            for (_, x, y, ids, *_), batch in zip(expected, pixels.epoch(epoch, first), strict=True):
                assert isinstance(batch.x, PixelBatch)
                assert batch.x.pixels.dtype == np.uint8
                assert np.array_equal(np.asarray(batch.x), x)
                assert np.array_equal(batch.y, y)
                assert np.array_equal(batch.sample_ids, ids)


def test_images_are_made_where_the_rest_is_more_than_a_window(make_file):
    file, _, _ = make_file()
    for options in ({"mixing": Mixing(mixup=0.2)}, {"tiles": whole_tiles}, {"specs": [("random_erasing", {"value": "random"})]}):
        (batch, *_) = make_loader(file, 13, prefetch=0, leaves_pixels=True, **options).epoch(0)
        assert isinstance(batch.x, np.ndarray)


def whole_tiles(counts, shape):
    return [((0, counts[0]), *((0, length) for length in shape))]
