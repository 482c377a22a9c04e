"""The order of samples, synthetic images, pictures on a disk, and files that users name."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hpctrain.core.errors import ConfigError, DataError, ShapeError
from hpctrain.data.convert import folder
from hpctrain.data.files import require_directory, require_file, require_new, system_errors_as
from hpctrain.data.image_file import DataFacts, ImageFile, ImageForm, synthetic_file, with_class_order
from hpctrain.data.loader import Loader
from hpctrain.data.pictures import DecodedPictures, picture_files
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Reordering, Sampler, counts, hold_out
from tests.support.data_files import cached
from tests.support.one_rank import shares_of
from tests.support.runs import write_pictures

sizes = st.integers(1, 200)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_counts_are_even_and_larger_first(samples, ranks):
    shares = counts(samples, ranks)
    assert len(shares) == ranks
    assert sum(shares) == samples
    assert max(shares) - min(shares) <= 1
    assert sorted(shares, reverse=True) == list(shares)


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 5))
def test_shares_make_up_the_whole_in_order(samples, groups, size):
    ids = np.arange(samples) * 3
    shares = shares_of(ids, groups * size, size)
    assert np.array_equal(np.concatenate(shares), ids)
    assert tuple(len(share) for share in shares) == counts(samples, groups * size, size)


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 5))
def test_shares_inside_a_split_group_are_even_and_so_are_those_of_the_groups(samples, groups, size):
    shares = counts(samples, groups * size, size)
    by_group = [shares[first : first + size] for first in range(0, len(shares), size)]
    assert tuple(sum(group) for group in by_group) == counts(samples, groups)
    assert all(group == counts(sum(group), size) for group in by_group)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.floats(0.01, 0.99), st.integers(0, 2**63), st.randoms())
def test_held_out_samples_are_stratified_and_each_class_is_trained_on(sizes, fraction, seed, random):
    """Each sample is in exactly one part. Validation empties no class, and the shares of classes are even."""
    labels = np.repeat(np.arange(len(sizes)) * 3, sizes)
    labels = labels[random.sample(range(len(labels)), len(labels))]
    wanted = max(1, round(fraction * len(labels)))
    if wanted > len(labels) - len(sizes):
        with pytest.raises(DataError, match="training needs a sample of each of"):
            hold_out(labels, fraction, seed, "train.h5")
        return
    split = hold_out(labels, fraction, seed, "train.h5")
    assert np.array_equal(np.sort(np.concatenate(split)), np.arange(len(labels)))
    assert all((np.diff(part) > 0).all() for part in split)
    assert len(split.validation) == wanted
    assert np.array_equal(np.unique(labels[split.training]), np.unique(labels))
    drawn, own = ([int((part == 3 * label).sum()) for label in range(len(sizes))] for part in (labels[split.validation], labels))
    shares = [wanted * size / len(labels) for size in own]
    capped = any(share > size - 1 for share, size in zip(shares, own, strict=True))
    assert capped or all(abs(count - share) < 1 for count, share in zip(drawn, shares, strict=True))
    others = hold_out(labels.max() - labels, wanted, seed, "train.h5")  # the number of samples, and classes in another order
    assert len(others.validation) == wanted


def test_held_out_samples_follow_from_labels_and_seed_alone():
    """A resumed run is not evaluated on samples on which it was trained."""
    labels, golden = np.arange(40) % 4, [4, 5, 7, 9, 10, 14, 15, 28]
    split = hold_out(labels, 0.2, 7, "train.h5")
    assert split.validation.tolist() == golden
    assert hold_out(labels, 8, 7, "train.h5").validation.tolist() == golden
    assert hold_out(labels, 0.2, 8, "train.h5").validation.tolist() != golden
    assert np.bincount(labels[split.validation]).tolist() == [2, 2, 2, 2]


@given(sizes, sizes, st.integers(0, 2**63), st.integers(0, 199), st.integers(0, 3))
def test_an_epoch_of_a_subset_is_that_of_its_places(samples, batch, seed, first, epoch):
    """A reordering does not mix ids with places, so no sample outside the subset enters the epoch."""
    subset = np.arange(samples) * 3 + 1
    whole, part = Sampler(samples, batch, seed), Sampler(samples, batch, seed, subset=subset)
    for sampler in (whole, part):
        sampler.reorder([Reordering(epoch, min(first, samples), 1)])
    assert np.array_equal(part.order(epoch), subset[whole.order(epoch)])
    assert np.array_equal(np.sort(part.order(epoch + 1)), subset)


@given(sizes, st.lists(st.tuples(sizes, st.integers(0, 5)), max_size=4), sizes, st.integers(0, 5))
def test_an_epoch_that_goes_on_in_other_batches_has_every_sample_once_in_its_order(samples, beginnings, last_batch, epoch):
    seen = np.empty(0, np.int64)
    for batch, steps in (*beginnings, (last_batch, samples)):
        sampler, first = Sampler(samples, batch, 7), len(seen)
        every = [sampler.ids(epoch, step, first) for step in range(sampler.steps(first))]
        assert [len(ids) for ids in every] == [sampler.global_count(step, first) for step in range(len(every))]
        assert all(len(ids) == batch for ids in every[:-1])
        seen = np.concatenate([seen, *every[:steps]])
    assert np.array_equal(seen, Sampler(samples, 1, 7).order(epoch))


def test_order_is_a_pure_function_of_seed_and_epoch():
    sampler = Sampler(1000, 10, 3)
    first = sampler.order(0).copy()
    assert not np.array_equal(first, sampler.order(1))
    assert np.array_equal(first, sampler.order(0))
    assert not np.array_equal(first, Sampler(1000, 10, 4).order(0))
    assert np.array_equal(Sampler(1000, 10, 3, shuffle=False).order(5), np.arange(1000))


def test_samples_are_equally_likely_at_every_place():
    places = np.stack([Sampler(8, 8, seed).order(0) for seed in range(2000)])
    table = np.stack([np.bincount(places[:, place], minlength=8) for place in range(8)])
    chi_square = ((table - 250) ** 2 / 250).sum()
    assert chi_square < 100  # 49 degrees of freedom: exceeded once in 50,000 sets of seeds


def test_the_order_cannot_be_changed_by_its_reader():
    ids = Sampler(9, 4, 0).ids(0, 0)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_impossible_sizes_are_refused():
    with pytest.raises(DataError, match="0 samples"):
        Sampler(0, 4)
    with pytest.raises(ConfigError, match="batch of 0"):
        Sampler(4, 0)


@given(st.integers(2, 60), st.integers(1, 9), st.integers(0, 2**63), st.data())
def test_reordered_epochs_have_every_sample_once_and_keep_what_was_seen(samples, batch, seed, data):
    sampler, plain = Sampler(samples, batch, seed), Sampler(samples, batch, seed)
    first = data.draw(st.integers(0, samples))
    sampler.reorder([Reordering(1, first, 1)])
    assert np.array_equal(sampler.order(0), plain.order(0))
    assert np.array_equal(sampler.order(1)[:first], plain.order(1)[:first])
    later = data.draw(st.integers(first, samples))
    before = sampler.order(1)
    sampler.reorder([Reordering(1, first, 1), Reordering(1, later, 2), Reordering(3, 0, 3)])
    assert np.array_equal(sampler.order(1)[:later], before[:later])
    for epoch in range(5):
        assert np.array_equal(np.sort(sampler.order(epoch)), np.arange(samples))


def test_a_reordering_is_another_order_of_the_rest_and_of_all_later_epochs():
    def orders(*reorderings):
        sampler = Sampler(50, 8, seed=3)
        sampler.reorder(reorderings)
        return [sampler.order(epoch).tolist() for epoch in range(4)]

    plain, once, twice = orders(), orders(Reordering(1, 20, 1)), orders(Reordering(1, 20, 2))
    assert once[0] == plain[0]
    for epoch in (1, 2, 3):
        assert plain[epoch] != once[epoch] != twice[epoch] != plain[epoch]
    # From an epoch's start the order is that of later epochs; nothing of the one that it replaces is left.
    assert orders(Reordering(0, 0, 1), Reordering(2, 0, 2))[2:] == orders(Reordering(0, 0, 2))[2:]
    assert orders(Reordering(0, 0, 1))[1:] == orders(Reordering(0, 50, 1))[1:]


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


def test_the_splits_differ_and_so_do_samples() -> None:
    train, test = file_of().images[:], file_of("test").images[:]
    assert len({image.tobytes() for image in (*train, *test)}) == 80


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
    turned = with_class_order(file, file.class_names[::-1], "the checkpoint")
    np.testing.assert_array_equal(turned.images[:], file.images[:])
    np.testing.assert_array_equal(turned.labels, 3 - file.labels)


@pytest.mark.parametrize("fit", ["crop", "squash"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_the_converted_file(tmp_path: Path, fit: str, channels: int) -> None:
    write_pictures(tmp_path / "photos")
    folder.convert(folder.scan(tmp_path / "photos"), tmp_path / "a.h5", size=(9, 7), fit=fit, channels=channels, threads=1)  # type: ignore[arg-type]
    file = ImageFile.open(tmp_path / "a.h5")
    form = ImageForm.of(file)
    assert form == ImageForm((9, 7, channels), fit)
    decoded = DecodedPictures(picture_files([tmp_path / "photos"]), form, threads=3)
    assert decoded.shape == file.images.shape
    order = np.array([3, 0, 0, 5])
    assert np.array_equal(decoded.take(order, np.empty((4, 9, 7, channels), np.uint8)), file.images[order])
    assert np.array_equal(decoded[2:5], file.images[2:5])
    assert np.array_equal(decoded[4, 2:8, 1:3], file.images[4, 2:8, 1:3])
    assert np.array_equal(decoded[np.int64(1)], file.images[1])
    assert decoded.broken == {}


def test_a_broken_picture_reads_as_zeros_and_says_why(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path)
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "cut.jpg").write_bytes(paths[0].read_bytes()[:200])
    files = (paths[0], tmp_path / "text.jpg", paths[1], tmp_path / "cut.jpg")
    decoded = DecodedPictures(files, ImageForm((5, 6, 3)), threads=2)
    images = decoded.take(np.arange(4), np.full((4, 5, 6, 3), 9, np.uint8))
    assert sorted(decoded.broken) == [1, 3]
    assert not images[[1, 3]].any()
    assert images[[0, 2]].any(axis=(1, 2, 3)).all()
    assert decoded.broken[1] == "The image cannot be decoded: its format is not supported; save it as JPEG or PNG."


def test_directories_stand_for_their_images_sorted(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.PNG", "b/.hidden.png", "b/deep/3.jpeg", "b/notes.txt", "a.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(path, "PNG") if path.suffix != ".txt" else path.write_text("")
    below = [tmp_path / "b" / name for name in ("1.PNG", "2.png", "deep/3.jpeg")]
    one = tmp_path / "a.png"
    assert picture_files([one, tmp_path / "b", one]) == (one, *below, one)


def test_a_directory_is_searched_as_a_conversion_searches_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Links are followed without loops, unreadable pictures are reported one by one, unreadable directories are errors."""
    (tmp_path / "store").mkdir()
    folder = tmp_path / "photos"
    folder.mkdir()
    for path in (tmp_path / "store" / "linked.webp", folder / "a.bmp"):
        Image.new("L", (2, 2)).save(path)
    os.mkfifo(folder / "pipe.png")
    for name, target in {"more": tmp_path / "store", "up": "..", "zero.jpg": "/dev/zero", "gone.tif": "nowhere"}.items():
        (folder / name).symlink_to(target)
    (folder / "raw.heic").write_bytes(b"")
    (folder / "notes.txt").write_text("")
    files = picture_files([folder])
    assert [path.name for path in files] == ["a.bmp", "gone.tif", "linked.webp", "pipe.png", "raw.heic", "zero.jpg"]
    decoded = DecodedPictures(files, ImageForm((2, 2, 1)))
    decoded.take(np.arange(6), np.empty((6, 2, 2, 1), np.uint8))
    assert sorted(decoded.broken) == [1, 3, 4, 5]
    assert f"left out, not the name of a picture: 1 ({folder / 'notes.txt'})" in caplog.text
    assert f"already searched: 1 ({folder / 'up'})" in caplog.text
    (folder / "gone").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"1 place \(.*photos/gone: No such file or directory\) cannot be read"):
        picture_files([folder])


def test_what_is_not_there_is_said_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty contains no pictures; give one with picture files, such as"):
        picture_files([tmp_path / "empty"])
    with pytest.raises(DataError, match=r"There is no image .*nowhere.jpg; give the path of a picture file"):
        picture_files([tmp_path / "nowhere.jpg"])


def test_pictures_have_one_channel_or_three() -> None:
    with pytest.raises(ShapeError, match="images of 4 channels"):
        DecodedPictures([Path("a.png")], ImageForm((5, 5, 4)))


def test_a_file_that_can_be_read_passes_and_is_closed(tmp_path):
    path = tmp_path / "a.h5"
    path.write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    require_file(path, "data file", "convert one")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "There is no data file .*; convert one."),
        (lambda path: path.mkdir(), "is a directory, not a data file; convert one."),
        (os.mkfifo, "is a pipe, not a data file; convert one."),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links."),
    ],
)
def test_what_is_no_file_is_refused(tmp_path, make, sentence):
    make(tmp_path / "a.h5")
    with pytest.raises(DataError, match=sentence):
        require_file(tmp_path / "a.h5", "data file", "convert one")


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b""), lambda path: path.symlink_to("nowhere")])
def test_a_name_that_is_taken_is_refused_unless_it_may_be_replaced(tmp_path, make):
    path = tmp_path / "a.h5"
    require_new(path, overwrite=False)
    make(path)
    with pytest.raises(DataError, match="already exists; give another name, or --overwrite"):
        require_new(path, overwrite=False)
    require_new(path, overwrite=True)


def test_directories_are_distinguished_from_files_and_from_nothing(tmp_path):
    require_directory(tmp_path, "name one")
    with pytest.raises(DataError, match=r"There is no directory .*; name one."):
        require_directory(tmp_path / "nowhere", "name one")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"is a file, not a directory; name one."):
        require_directory(tmp_path / "file", "name one")


def test_the_system_s_words_end_the_sentence(tmp_path):
    with (
        pytest.raises(DataError, match=r"^The list cannot be written: No such file or directory.$"),
        system_errors_as("The list cannot be written"),
    ):
        (tmp_path / "nowhere" / "list").write_text("")
