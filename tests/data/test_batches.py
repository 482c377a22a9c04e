"""Batches of arrays, of mixed images and of several sizes; the same bytes through all cache levels on any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.schema import CacheConfig
from hpctrain.core.errors import ShapeError
from hpctrain.core.intervals import Box, even_interval, size_of
from hpctrain.data import pipeline as batch_threads
from hpctrain.data.cache import summed
from hpctrain.data.image_file import ImageFile
from hpctrain.data.loader import ArrayLoader, Batch, BatchSource, Loader, TileOfRank
from hpctrain.data.pipeline import ImageSizes, Pipeline
from hpctrain.data.sampler import Mixing, Sampler
from hpctrain.data.writer import write_data_file
from hpctrain.run.data_cache import add_caches
from tests.support.data_files import cached, in_memory
from tests.support.runs import work_virtual

SAMPLES, SHAPE = 23, (6, 5, 3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ImageFile:
    path: Path = tmp_path_factory.mktemp("arrays") / "train.h5"
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8)
    write_data_file(path, SAMPLES, SHAPE, ["a", "b"], [(images, random.integers(0, 2, SAMPLES))])
    return ImageFile.open(path)


def _rows_of_images(split_size: int) -> TileOfRank:
    def tiles(counts: tuple[int, ...], image_shape: tuple[int, int, int]) -> tuple[Box, ...]:
        heights = (even_interval(SHAPE[0], split_size, rank) for rank in range(split_size))
        # One row more on each side, as a convolution reads it; beyond the image there are zeros.
        return tuple(((0, sum(counts)), (start - 1, stop + 1), (0, SHAPE[1]), (0, SHAPE[2])) for start, stop in heights)

    return tiles


def _copies(source: BatchSource, epoch: int, first: int) -> list[Batch]:
    return [Batch(**{**vars(batch), "x": batch.x.copy(), "y": batch.y.copy()}) for batch in source.epoch(epoch, first)]


@pytest.mark.parametrize(("ranks", "split_size"), [(1, 1), (3, 1), (5, 1), (2, 2), (6, 3)])
@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("tiled", [False, True])
def test_batches_are_those_of_a_file(file: ImageFile, ranks: int, split_size: int, first: int, tiled: bool) -> None:
    pipeline = Pipeline([], seed=0, mean=np.zeros(3), std=np.ones(3), dtype="float64")
    images = np.empty((SAMPLES, *SHAPE))
    pipeline(np.asarray(file.images), np.arange(SAMPLES), 0, images)
    tiles = _rows_of_images(split_size) if tiled else None
    for rank in range(ranks):
        sampler = Sampler(SAMPLES, 8, seed=3)
        place = {"rank": rank, "ranks": ranks, "split_size": split_size, "tiles": tiles}
        expected = _copies(Loader(file, sampler, pipeline, **place, prefetch=0), 2, first)  # type: ignore[arg-type]
        got = _copies(ArrayLoader(images, np.asarray(file.labels), sampler, **place), 2, first)  # type: ignore[arg-type]
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            for name, value in vars(theirs).items():
                assert np.array_equal(getattr(ours, name), value), name
            assert ours.y.dtype == np.int64


@pytest.mark.parametrize(("images", "labels"), [((4, 3, 3), 4), ((4, 3, 3, 1), 5), ((5, 3, 3, 1), 5)])
def test_arrays_that_are_no_samples_are_refused(images: tuple[int, ...], labels: int) -> None:
    with pytest.raises(ShapeError, match=r"but they must be .* with N = 4"):
        ArrayLoader(np.zeros(images), np.zeros(labels, np.int64), Sampler(4, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_images_are_mixed_with_those_of_the_step_in_the_opposite_order(ranks: int) -> None:
    random, mixing = np.random.default_rng(0), Mixing(0.5, 1.0, seed=4)
    images, labels = random.standard_normal((11, 5, 4, 2)), random.integers(0, 3, 11)
    sampler = Sampler(11, 4, seed=1)
    loaders = [ArrayLoader(images, labels, sampler, rank=rank, ranks=ranks, mixing=mixing) for rank in range(ranks)]
    for step, batches in enumerate(zip(*(loader.epoch(1) for loader in loaders), strict=True)):
        ids, mix = sampler.ids(1, step), mixing.draw(1, 4 * step, 5, 4)
        assert mix is not None
        expected = images[ids].copy()
        mix.apply(expected, images[ids[::-1]].copy(), ((0, 5), (0, 4)))
        assert np.concatenate([batch.x for batch in batches]).tobytes() == expected.tobytes()
        partners = [batch.mixed.labels for batch in batches if batch.mixed is not None]
        assert np.array_equal(np.concatenate(partners), labels[ids[::-1]])
        assert all(batch.mixed is not None and batch.mixed.weight == mix.weight for batch in batches)


HEIGHT, WIDTH = 9, 7
BATCH = 8
KINDS = {"mixup": Mixing(mixup=0.4, seed=2), "cutmix": Mixing(cutmix=1.0, seed=2), "both": Mixing(0.4, 1.0, 0.7, seed=2)}


@pytest.fixture(scope="module")
def tall_file(tmp_path_factory: pytest.TempPathFactory) -> ImageFile:
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("mixing") / "train.h5"
    images = random.integers(0, 256, (SAMPLES, HEIGHT, WIDTH, 3), dtype=np.uint8)
    labels = random.integers(0, 4, SAMPLES)
    write_data_file(path, SAMPLES, (HEIGHT, WIDTH, 3), list("abcd"), [(images, labels)])
    return ImageFile.open(str(path))


def _loader(tall_file: ImageFile, mixing: Mixing | None, rank: int = 0, ranks: int = 1, **options: object) -> Loader:
    pipeline = Pipeline([("flip", {})], 5, np.zeros(3), np.ones(3), "float64")
    return Loader(tall_file, Sampler(SAMPLES, BATCH, seed=1), pipeline, rank=rank, ranks=ranks, mixing=mixing, **options)  # type: ignore[arg-type]


def _steps(loader: Loader, first: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None, float]]:
    """Images, labels, and the partners' with the share of one's own, of each step of an epoch."""
    return [
        (batch.x.copy(), batch.y.copy(), None, 1.0)
        if batch.mixed is None
        else (batch.x.copy(), batch.y.copy(), batch.mixed.labels.copy(), batch.mixed.weight)
        for batch in loader.epoch(2, first)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_timms_of_the_plain_ones(tall_file: ImageFile, kind: str) -> None:
    """x * lam + x.flip(0) * (1 - lam), or a box of x.flip(0) with lam corrected to the area; the targets likewise."""
    mixing, place, mixed_steps = KINDS[kind], 0, 0
    for plain, (x, y, partners, weight) in zip(_steps(_loader(tall_file, None)), _steps(_loader(tall_file, mixing)), strict=True):
        mix, flipped = mixing.draw(2, place, HEIGHT, WIDTH), plain[0][::-1]
        place += len(y)
        assert np.array_equal(y, plain[1])
        if mix is None:
            assert partners is None
            assert np.array_equal(x, plain[0])
            continue
        mixed_steps += 1
        assert partners is not None
        assert np.array_equal(partners, plain[1][::-1])
        assert weight == mix.weight
        expected = plain[0].copy()
        if mix.box is None:
            expected = plain[0] * mix.weight + flipped * (1 - mix.weight)
        else:
            (top, bottom), (left, right) = mix.box
            expected[:, top:bottom, left:right] = flipped[:, top:bottom, left:right]
            assert weight == 1 - (bottom - top) * (right - left) / (HEIGHT * WIDTH)
        np.testing.assert_allclose(x, expected, rtol=1e-15, atol=1e-15)
    assert mixed_steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_mixes_the_same(tall_file: ImageFile, kind: str, ranks: int) -> None:
    whole = _steps(_loader(tall_file, KINDS[kind]))
    by_rank = [_steps(_loader(tall_file, KINDS[kind], rank, ranks, prefetch=0)) for rank in range(ranks)]
    for step, (x, y, partners, weight) in enumerate(whole):
        shares = [steps[step] for steps in by_rank]
        assert np.concatenate([share[0] for share in shares]).tobytes() == x.tobytes()
        assert np.array_equal(np.concatenate([share[1] for share in shares]), y)
        assert {share[3] for share in shares} == {weight}
        if partners is not None:
            assert np.array_equal(np.concatenate([share[2] for share in shares]), partners)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_cut_from_the_mixed_images(tall_file: ImageFile, kind: str) -> None:
    """Two ranks share the samples; one reads the upper rows and columns beyond the border, one the lower rows."""

    def tiles(counts: tuple[int, ...], image_shape: tuple[int, int, int]) -> list[tuple[tuple[int, int], ...]]:
        return [((0, sum(counts)), (0, 5), (-2, 4), (0, 3)), ((0, sum(counts)), (3, 9), (1, 7), (0, 3))]

    whole = _steps(_loader(tall_file, KINDS[kind]))
    for rank in range(2):
        found = _steps(_loader(tall_file, KINDS[kind], rank, 2, split_size=2, tiles=tiles))
        for (x, _, _, _), (tile, _, _, _) in zip(whole, found, strict=True):
            if rank == 0:
                assert not tile[:, :, :2].any()
                assert tile[:, :, 2:].tobytes() == x[:, 0:5, 0:4].tobytes()
            else:
                assert tile.tobytes() == x[:, 3:9, 1:7].tobytes()


def test_what_is_drawn_has_the_shares_that_were_asked_for() -> None:
    mixing = Mixing(0.5, 1.0, probability=0.8, switch=0.25, seed=9)
    draws = [mixing.draw(epoch, first, 32, 24) for epoch in range(4) for first in range(0, 4000, 8)]
    mixes = [mix for mix in draws if mix is not None]
    assert len(mixes) / len(draws) == pytest.approx(0.8, abs=0.03)
    assert sum(mix.box is not None for mix in mixes) / len(mixes) == pytest.approx(0.25, abs=0.04)
    weights = np.array([mix.weight for mix in mixes if mix.box is None])
    assert weights.mean() == pytest.approx(0.5, abs=0.03)
    assert weights.var() == pytest.approx(1 / 8, abs=0.01)  # of Beta(a, a): 1 / (4 (2 a + 1))
    assert len({mix.weight for mix in mixes}) > len(mixes) // 2


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6), st.sets(st.integers(1, 39), max_size=3))
def test_regions_of_cutmix_make_up_the_whole(height: int, width: int, first: int, cuts: set[int]) -> None:
    mix = Mixing(cutmix=1.0).draw(0, first, height, width)
    assert mix is not None
    assert mix.box is not None
    images, partners = np.zeros((2, height, width, 1)), np.ones((2, height, width, 1))
    for top, bottom in pairwise(sorted({0, height} | {cut for cut in cuts if cut < height})):
        mix.apply(images[:, top:bottom], partners[:, top:bottom], ((top, bottom), (0, width)))
    assert images.sum() == 2 * size_of(mix.box)
    assert mix.weight == 1 - size_of(mix.box) / (height * width)


SIZES = ImageSizes(((0, 5), (2, 9), (3, 4)))
CROPPED = [("random_resized_crop", {"size": 9, "scale": [0.5, 1.0]}), ("flip", {})]
SHIFTED = [("pad_crop", {"padding": 2}), ("flip", {}), ("random_erasing", {"value": "random"})]


def make_loader(file, sizes=SIZES, specs=SHIFTED, **options):
    pipeline = Pipeline(specs, 5, file.mean, file.std, "float64")
    return Loader(file, Sampler(len(file), 5, 5), pipeline, sizes=sizes, **options)


def images(loader, epoch, first=0):
    return [batch.x.copy() for batch in loader.epoch(epoch, first)]


def same(some, others):
    return len(some) == len(others) and all(np.array_equal(x, y) for x, y in zip(some, others, strict=True))


@pytest.mark.parametrize(("epoch", "side"), [(0, 5), (1, 5), (2, 9), (3, 4), (99, 4)])
def test_the_latest_size_that_has_begun_counts(epoch, side):
    assert SIZES.at(epoch) == side
    assert SIZES.changes_at(epoch) == (epoch in (0, 2, 3))


@pytest.mark.parametrize(("epochs", "largest"), [(0, 5), (2, 5), (3, 9), (4, 9)])
def test_a_size_that_a_training_does_not_come_to_needs_no_room(epochs, largest):
    assert SIZES.largest(epochs) == largest


@pytest.mark.parametrize("specs", [CROPPED, SHIFTED])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_epoch_is_that_of_a_pipeline_of_its_size(make_file, specs, cache, prefetch):
    file, _, _ = make_file(shape=(9, 9, 3))
    loader = make_loader(file, specs=specs, pixels=cached(file, cache=cache), prefetch=prefetch)
    for epoch in (0, 1, 2, 3, 2):
        side = SIZES.at(epoch)
        pipeline = Pipeline(specs, 5, file.mean, file.std, "float64").resized(side)
        expected = images(Loader(file, Sampler(len(file), 5, 5), pipeline), epoch)
        assert same(images(loader, epoch), expected)
        assert expected[0].shape[1:] == loader.image_shape == (side, side, 3)
        assert [batch.image_shape for batch in loader.epoch(epoch)] == [(side, side, 3)] * 3


def test_ranks_together_read_the_stream_of_one_rank_from_any_sample_on(make_file):
    file, _, _ = make_file(shape=(9, 9, 3))
    mixing = Mixing(1.0, 1.0, seed=5)
    shares = [make_loader(file, rank=rank, ranks=3, mixing=mixing) for rank in range(3)]
    for epoch, first in ((1, 0), (2, 4), (3, 7), (0, 12)):
        whole = images(make_loader(file, prefetch=0, mixing=mixing), epoch, first)
        together = [np.concatenate(batches) for batches in zip(*(images(one, epoch, first) for one in shares), strict=True)]
        assert same(together, whole)


@pytest.mark.parametrize("cache", [False, True])
def test_tiles_are_those_of_the_size(make_file, cache):
    file, _, _ = make_file(shape=(9, 9, 3))

    def tiles(counts, image_shape):
        rows = (even_interval(image_shape[0], 2, rank) for rank in range(2))
        return [((0, sum(counts)), (start - 1, stop + 1), (0, image_shape[1]), (0, 3)) for start, stop in rows]

    options = {"split_size": 2, "tiles": tiles, "pixels": cached(file, cache=cache)}
    loaders = [make_loader(file, rank=rank, ranks=2, **options) for rank in range(2)]
    for epoch in range(4):
        whole, side = images(make_loader(file, prefetch=0), epoch), SIZES.at(epoch)
        for rank, loader in enumerate(loaders):
            start, stop = even_interval(side, 2, rank)
            for tile, image in zip(images(loader, epoch), whole, strict=True):
                padded = np.pad(image, ((0, 0), (1, 1), (0, 0), (0, 0)))
                assert np.array_equal(tile, padded[:, start : stop + 2])


def test_a_file_in_memory_is_read_once_for_all_sizes(make_file, monkeypatch):
    file, _, _ = make_file(shape=(9, 9, 3))
    reads = []
    take = file.pixels.take
    monkeypatch.setattr(file.pixels, "take", lambda samples, out: reads.extend(samples.tolist()) or take(samples, out))
    loader = make_loader(file, pixels=in_memory(file))
    for epoch in range(4):
        images(loader, epoch)
    assert sorted(reads) == list(range(len(file)))


def test_sizes_that_a_crop_cannot_make_are_refused(make_file):
    file: ImageFile = make_file(shape=(9, 9, 3))[0]
    pipeline = Pipeline([("center_crop", {"size": 4})], 5, file.mean, file.std)
    assert ImageSizes(((0, 9), (1, 3))).shapes(pipeline, file.shape) == ((9, 9, 3), (3, 3, 3))
    assert ImageSizes(((0, 9), (1, 30))).shapes(pipeline, file.shape, 1) == ((9, 9, 3),)
    with pytest.raises(ShapeError, match=r"Images of 30 px are not possible: center_crop.size 30 is larger .*; at most 9 fits\."):
        ImageSizes(((0, 9), (1, 30))).shapes(pipeline, file.shape)


N, LEVELS_SHAPE, LEVELS_BATCH = 45, (20, 18, 3), 7
SIZE = 20 * 18 * 3
BATCHES = 50  # seven epochs, and one batch of the eighth
AUGMENT = [("random_resized_crop", {"size": 12}), ("flip", {}), ("random_erasing", {"probability": 0.5})]
_CONFIG = """
name: same
model: {name: small, channels: [2], hidden: 3}
data: {train: train.h5}
batch: 7
epochs: 1
optimizer: {name: sgd, lr: 0.01}
schedule: constant
"""
_HALF = 22 * (SIZE + 1) + 64  # of memory, which holds 22 samples
#: by name, the keys of `data.cache`, and the origins from which samples come after they were in the data file
LEVELS = {
    "off": ({"memory": 0}, set()),
    "memory": ({"memory": "1MB"}, {"memory"}),
    "a part in memory": ({"memory": _HALF}, {"memory"}),
    "local": ({"memory": 0, "local": True}, {"local"}),
    "both": ({"memory": _HALF, "local": True}, {"memory", "local"}),
}
#: ranks of a job, and of each of its nodes
ONE_NODE = ((1, 1), (2, 2), (4, 4))
NODES = (*ONE_NODE, (4, 2))
#: level, fill, batches made ahead, ranks; without memory there is nothing to fill at the start
TABLE = [
    *((level, "first_epoch", prefetch, ONE_NODE) for level in LEVELS for prefetch in (2, 0)),
    *((level, "start", 2, NODES) for level, (_, origins) in LEVELS.items() if "memory" in origins),
]


@dataclass(frozen=True)
class Case:
    """A line of the table. path: of the data file. cache: its section of a configuration. per_node: ranks of a node."""

    path: str
    cache: dict
    ranks: int
    per_node: int
    threads: int
    prefetch: int

    def loader(self, rank):
        file = ImageFile.open(self.path)
        file.decode_by(self.threads)
        pipeline = Pipeline(AUGMENT, 3, file.mean, file.std)
        pipeline.share_out(self.threads)
        return Loader(file, Sampler(N, LEVELS_BATCH, seed=3), pipeline, rank=rank, ranks=self.ranks, prefetch=self.prefetch)


def first_batches(loader):
    """Images and labels of the first batches of one rank, as bytes."""
    epochs = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    for batch in itertools.islice(epochs, BATCHES):
        yield batch.x.tobytes(), batch.y.tobytes()


def digest_of(batches_of_ranks):
    """sha256 of the batches, those of a batch's ranks in order: images first."""
    digest = hashlib.sha256()
    for of_ranks in zip(*batches_of_ranks, strict=True):
        for part in zip(*of_ranks, strict=True):
            digest.update(b"".join(part))
    return digest.hexdigest()


def through_levels(case, folder):
    """The digest of a job's first batches, and what all ranks have read."""

    def work(session):
        loader = case.loader(session.world.rank)
        levels = add_caches(session, CacheConfig.model_validate(case.cache), [loader])
        batches = []
        for batch in first_batches(loader):
            session.world.allgather_object(None)  # virtual ranks take turns, and go on together as in a training
            batches.append(batch)
        return batches, levels.counts.values()

    results = work_virtual(case.ranks, folder / "same.yaml", (), work, case.per_node)
    return digest_of(batches for batches, _ in results), summed(counts for _, counts in results)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("level", "fill", "prefetch", "jobs"), TABLE, ids=lambda value: None if isinstance(value, tuple) else str(value)
)
def test_batches_are_the_same(make_encoded, tmp_path, monkeypatch, level, fill, prefetch, jobs):
    monkeypatch.setattr(batch_threads, "_LEAST_CHUNK_BYTES", 1)  # else one thread makes a whole batch of such small images
    encoded, pixels = make_encoded(count=N, shape=LEVELS_SHAPE)
    (tmp_path / "same.yaml").write_text(_CONFIG)
    plain = Case(pixels.path, {}, 1, 1, 1, 0)  # of one rank that reads the pixels itself
    reference = digest_of([first_batches(plain.loader(0))])
    keys, origins = LEVELS[level]
    cache = {**keys, "fill": fill} | ({"local": str(tmp_path / "local")} if "local" in keys else {})
    for file, (ranks, per_node), threads in itertools.product((encoded, pixels), jobs, (1, 4)):
        case = Case(file.path, cache, ranks, per_node, threads, prefetch)
        found, read = through_levels(case, tmp_path)
        assert found == reference, str(case)
        assert {origin for origin in ("memory", "local") if read[f"{origin}_samples"]} == origins, str(case)
        assert (read["nodes_samples"] > 0) == (per_node < ranks), str(case)
