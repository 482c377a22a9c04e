"""Mixup and cutmix against timm's formulas, and the same mixed images and labels for every number of ranks and every tile."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.boxes import size_of
from hpctrain.data import format as data_format
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.mixing import Mixing
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.errors import ConfigError

HEIGHT, WIDTH = 9, 7
SAMPLES, BATCH = 23, 8
KINDS = {"mixup": Mixing(mixup=0.4, seed=2), "cutmix": Mixing(cutmix=1.0, seed=2), "both": Mixing(0.4, 1.0, 0.7, seed=2)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ImageFile:
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("mixing") / "train.h5"
    images = random.integers(0, 256, (SAMPLES, HEIGHT, WIDTH, 3), dtype=np.uint8)
    labels = random.integers(0, 4, SAMPLES)
    data_format.write(path, SAMPLES, (HEIGHT, WIDTH, 3), list("abcd"), [(images, labels)])
    return ImageFile.open(str(path))


def _loader(file: ImageFile, mixing: Mixing | None, rank: int = 0, ranks: int = 1, **options: object) -> Loader:
    pipeline = Pipeline([("flip", {})], 5, np.zeros(3), np.ones(3), "float64")
    return Loader(file, Sampler(SAMPLES, BATCH, seed=1), pipeline, rank=rank, ranks=ranks, mixing=mixing, **options)  # type: ignore[arg-type]


def _steps(loader: Loader, first: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None, float]]:
    """Images, labels, and the partners' with the share of one's own, of each step of an epoch."""
    return [
        (batch.x.copy(), batch.y.copy(), None, 1.0)
        if batch.mixed is None
        else (batch.x.copy(), batch.y.copy(), batch.mixed.labels.copy(), batch.mixed.weight)
        for batch in loader.epoch(2, first)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_timms_of_the_plain_ones(file: ImageFile, kind: str) -> None:
    """x * lam + x.flip(0) * (1 - lam), or a box of x.flip(0) with lam corrected to the area; the targets likewise."""
    mixing, place, mixed_steps = KINDS[kind], 0, 0
    for plain, (x, y, partners, weight) in zip(_steps(_loader(file, None)), _steps(_loader(file, mixing)), strict=True):
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
def test_any_number_of_ranks_mixes_the_same(file: ImageFile, kind: str, ranks: int) -> None:
    whole = _steps(_loader(file, KINDS[kind]))
    by_rank = [_steps(_loader(file, KINDS[kind], rank, ranks, prefetch=0)) for rank in range(ranks)]
    for step, (x, y, partners, weight) in enumerate(whole):
        shares = [steps[step] for steps in by_rank]
        assert np.concatenate([share[0] for share in shares]).tobytes() == x.tobytes()
        assert np.array_equal(np.concatenate([share[1] for share in shares]), y)
        assert {share[3] for share in shares} == {weight}
        if partners is not None:
            assert np.array_equal(np.concatenate([share[2] for share in shares]), partners)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_cut_from_the_mixed_images(file: ImageFile, kind: str) -> None:
    """Two ranks share the samples; one reads the upper rows and columns beyond the border, one the lower rows."""

    def tiles(counts: tuple[int, ...], image_shape: tuple[int, int, int]) -> list[tuple[tuple[int, int], ...]]:
        return [((0, sum(counts)), (0, 5), (-2, 4), (0, 3)), ((0, sum(counts)), (3, 9), (1, 7), (0, 3))]

    whole = _steps(_loader(file, KINDS[kind]))
    for rank in range(2):
        found = _steps(_loader(file, KINDS[kind], rank, 2, split_size=2, tiles=tiles))
        for (x, _, _, _), (tile, _, _, _) in zip(whole, found, strict=True):
            if rank == 0:
                assert not tile[:, :, :2].any()
                assert tile[:, :, 2:].tobytes() == x[:, 0:5, 0:4].tobytes()
            else:
                assert tile.tobytes() == x[:, 3:9, 1:7].tobytes()


def test_an_epoch_that_goes_on_mixes_as_it_would_have(file: ImageFile) -> None:
    whole, rest = _steps(_loader(file, KINDS["both"])), _steps(_loader(file, KINDS["both"]), BATCH)
    for (x, _, _, weight), (other, _, _, other_weight) in zip(whole[1:], rest, strict=True):
        assert (x.tobytes(), weight) == (other.tobytes(), other_weight)


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixup": -0.1}, "mixing.mixup -0.1 is outside .*; the nearest legal value is 0"),
        ({"cutmix": 9.0}, "mixing.cutmix 9.0 is outside .*; the nearest legal value is 4"),
        ({"probability": 1.5}, "mixing.probability 1.5"),
        ({"switch": float("nan")}, "mixing.switch nan"),
    ],
)
def test_values_outside_their_range_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Mixing(**options)  # type: ignore[arg-type]
