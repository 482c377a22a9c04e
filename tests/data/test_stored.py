"""Rules of a stored data file: each broken one is a sentence of its own; normalised pixels are finite numbers."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data import stored
from hpctrain.errors import DataError


@pytest.fixture
def contents(make_file):
    file, _, _ = make_file()
    with h5py.File(file.path) as opened:
        return Path(file.path), stored.read(opened)


def test_what_was_written_is_legal(contents):
    stored.check(*contents)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: replace(c, labels=c.labels.astype(np.float64)), r"does not hold labels \(N,\) int64"),
        (lambda c: replace(c, mean=c.mean[None]), r"means \(C,\) float64"),
        (lambda c: replace(c, images=replace(c.images, dtype=np.dtype("u2"))), "does not hold contiguous uint8 images"),
        (lambda c: replace(c, images=replace(c.images, offset=None)), "does not hold contiguous uint8 images"),
        (lambda c: replace(c, labels=c.labels[:0]), "holds no image; at least one is needed"),
        (lambda c: replace(c, labels=c.labels[1:]), "labels and means of 3 channels"),
        (lambda c: replace(c, class_names=()), "has no class; name at least one"),
        (lambda c: replace(c, class_names=("a\0b", *c.class_names[1:])), "without zero bytes"),
        (lambda c: replace(c, labels=c.labels - 9), r"which is outside 0\.\.4"),
        (lambda c: replace(c, std=c.std * np.nan), "channel 0 has mean .* and deviation nan"),
        (lambda c: replace(c, labels=c.labels[::-1].copy()), "labels changed since the file was written"),
        (lambda c: replace(c, class_names=c.class_names[::-1]), "class_names changed since the file was written"),
        (lambda c: replace(c, images=replace(c.images, stored_bytes=1)), "is damaged: images of .* need"),
        (lambda c: replace(c, images=replace(c.images, offset=10**9)), "is truncated"),
    ],
)
def test_each_broken_rule_has_a_sentence(contents, change, sentence):
    path, legal = contents
    with pytest.raises(DataError, match=sentence):
        stored.check(path, change(legal))


@given(st.floats(allow_nan=True), st.floats(allow_nan=True))
def test_statistics_that_pass_give_finite_pixels_in_float32(mean, std):
    try:
        stored.check_statistics("a file", np.array([mean]), np.array([std]))
    except DataError:
        return
    with np.errstate(over="raise", invalid="raise"):
        pixels = (np.array([0.0, 1.0]) - mean) / (std or 1.0)
    assert np.isfinite(pixels.astype(np.float32)).all()


@given(st.integers(0, 300), st.integers(0, 4000), st.integers(1, 4000))
def test_chunks_cover_all_samples_once_in_pieces_of_bounded_size(samples, height, width):
    pieces = list(stored.chunks((samples, height, width, 3)))
    assert [index for piece in pieces for index in range(piece.start, piece.stop)] == list(range(samples))
    largest = max(1, (16 << 20) // max(1, height * width * 3))
    assert all(piece.stop - piece.start <= largest for piece in pieces)


def test_digests_depend_on_the_values_and_not_on_their_place():
    values = np.arange(24, dtype=np.int64).reshape(4, 6)
    assert stored.digest_of(values[:, ::2]) == stored.digest_of(values[:, ::2].copy())
    assert stored.digest_of(values) != stored.digest_of(values + 1)
    assert stored.names_digest(["a,b"]) != stored.names_digest(["a", "b"])
