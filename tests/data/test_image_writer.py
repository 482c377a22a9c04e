"""The writer of data files: nothing is seen before the end, and means and deviations are exact."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hpctrain.data.format import ImageFile
from hpctrain.data.image_writer import ImageFileWriter, _moments

SHAPE = (2, 3, 1)


def made_up(count):
    random = np.random.default_rng(count)
    return random.integers(0, 256, (count, *SHAPE), np.uint8), np.arange(count) % 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_file_appears_at_the_end_alone_and_only_without_an_error(tmp_path, fails):
    path = tmp_path / "a.h5"
    images, labels = made_up(4)

    def run():
        with ImageFileWriter(path, 4, SHAPE, ["a", "b"]) as writer:
            for start in (0, 2):
                writer.append(images[start : start + 2], labels[start : start + 2])
                assert not path.exists()
            if fails:
                raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        run()
        assert np.array_equal(ImageFile.open(path).images, images)
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if fails else ["a.h5"])


def test_two_writers_of_one_path_do_not_meet(tmp_path, monkeypatch):
    """Two processes that write the same name have temporary files of their own; the last one to end wins."""
    path = tmp_path / "a.h5"
    (first_images, first_labels), (images, labels) = made_up(3), made_up(5)
    with ImageFileWriter(path, 3, SHAPE, ["a", "b"]) as first:
        first.append(first_images, first_labels)
        monkeypatch.setattr("os.getpid", lambda: 1)
        with ImageFileWriter(path, 5, SHAPE, ["a", "b"]) as second:
            second.append(images, labels)
        assert len(ImageFile.open(path)) == 5
    assert np.array_equal(ImageFile.open(path).images, first_images)


@given(arrays.arrays(np.int64, (2, 256), elements=st.integers(0, 10**9)))
def test_moments_are_those_of_exact_fractions(histogram):
    histogram[:, 7] += 1  # no channel without pixels
    mean, std = _moments(histogram)
    for channel, counts in enumerate(histogram.tolist()):
        n = sum(counts)
        expected = Fraction(sum(value * count for value, count in enumerate(counts)), n)
        variance = Fraction(sum(value * value * count for value, count in enumerate(counts)), n) - expected**2
        assert mean[channel] == pytest.approx(float(expected / 255), rel=1e-15)
        assert std[channel] ** 2 == pytest.approx(float(variance / 255**2), rel=1e-14)
