"""Made-up images: the same in every process and for any reader, others for the test set, and classes that can be told."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.data.classes import in_order_of
from hpctrain.data.facts import DataFacts
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.data.synthetic import SyntheticImages, synthetic_file
from tests.support.cached import cached

SHAPE = (12, 10, 3)
DIGEST = "ea31c13db6abb52ca5e3675e6b0b5a83bfb89a68a3359b2f7ae6ac8903ea8f0d"


def file_of(split: str = "train", samples: int = 40, classes: int = 4) -> ImageFile:
    return synthetic_file(split, samples, SHAPE, classes)


def test_images_are_these_on_every_machine() -> None:
    """Runs that resume elsewhere see the same images."""
    images = file_of().images[:]
    assert hashlib.sha256(images.tobytes()).hexdigest() == DIGEST


def test_a_file_says_what_it_holds() -> None:
    file = file_of()
    assert (len(file), file.shape, len(file.class_names)) == (40, SHAPE, 4)
    assert np.bincount(file.labels).tolist() == [10] * 4
    measured = file.images[:].reshape(-1, 3) / 255
    np.testing.assert_allclose(file.mean, measured.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(file.std, measured.std(axis=0), atol=1e-12)


def test_all_ways_to_read_give_the_same_pixels() -> None:
    images = file_of().images
    assert isinstance(images, SyntheticImages)
    whole = images[:]
    assert whole.shape == images.shape == (40, *SHAPE)
    assert whole.dtype == np.uint8
    rows, columns = slice(3, 9), slice(0, 4)
    np.testing.assert_array_equal(images[7], whole[7])
    np.testing.assert_array_equal(images[7, rows, columns], whole[7, rows, columns])
    np.testing.assert_array_equal(images[5:9, rows, columns], whole[5:9, rows, columns])
    ids = np.array([39, 0, 7, 7])
    np.testing.assert_array_equal(images.take(ids, np.empty((4, *SHAPE), np.uint8)), whole[ids])


def test_the_splits_differ_and_so_do_samples() -> None:
    train, test = file_of().images[:], file_of("test").images[:]
    assert len({image.tobytes() for image in (*train, *test)}) == 80


def test_a_sample_does_not_depend_on_the_number_of_others() -> None:
    np.testing.assert_array_equal(file_of(samples=12).images[:], file_of().images[:12])


def test_the_class_shows_in_the_rows() -> None:
    """The mean image of each class in one split tells the classes of the other."""
    train, test = file_of(samples=400), file_of("test")
    pixels = train.images[:].astype(float)
    means = np.stack([pixels[train.labels == label].mean(axis=0) for label in range(4)])
    distance = ((test.images[:][:, None] - means) ** 2).sum(axis=(2, 3, 4))
    np.testing.assert_array_equal(distance.argmin(axis=1), test.labels)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("tiles", [False, True])
def test_a_loader_reads_them_as_it_reads_a_file(cache: bool, tiles: bool) -> None:
    file = file_of()
    plain = ImageFile(file.path, file.images[:], file.labels, file.class_names, (file.mean, file.std), file.manifest)
    batches = []
    for source in (file, plain):
        pipeline = Pipeline([("pad_crop", {"padding": 2}), ("flip", {})], 5, source.mean, source.std)
        boxes = (lambda counts, image_shape: [((0, sum(counts)), (2, 9), (0, 10), (0, 3))]) if tiles else None
        loader = Loader(
            source, Sampler(40, 16, seed=1, shuffle=True), pipeline, tiles=boxes, pixels=cached(source, cache=cache), prefetch=0
        )
        batches.append([(batch.x.tobytes(), batch.y.tobytes()) for batch in loader.epoch(1)])
    assert batches[0] == batches[1]


def test_facts_tell_other_made_up_images() -> None:
    facts = DataFacts.of(file_of())
    assert DataFacts.of(file_of()) == facts
    for other in (file_of("test"), file_of(samples=41), file_of(classes=5), synthetic_file("train", 40, (10, 12, 3), 4)):
        assert DataFacts.of(other).images != facts.images
    assert DataFacts.from_meta(facts.to_meta()) == replace(facts)


def test_classes_in_another_order_keep_their_images() -> None:
    file = file_of()
    turned = in_order_of(file, file.class_names[::-1], "the checkpoint")
    np.testing.assert_array_equal(turned.images[:], file.images[:])
    np.testing.assert_array_equal(turned.labels, 3 - file.labels)
