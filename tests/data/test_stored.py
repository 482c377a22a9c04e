"""Rules of a stored data file: each broken one is a sentence of its own; normalised pixels are finite numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data import stored
from hpctrain.errors import DataError


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
