"""Picture files read as images: the pixels of a file of pixels, and a damaged picture is a sample that cannot be read."""

import zlib

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.data import decoder
from hpctrain.data.encoded_reader import EncodedReader
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.data.stored import digest_of
from hpctrain.data.unreadable import ReadPolicy, UnreadableError
from hpctrain.errors import DataError
from tests.support.cached import cached


def damage(path, sample, keeps_sum=False):
    """Change a byte in the middle of a sample's picture file; keeps_sum: and its checksum with it."""
    reader = ImageFile.open(path).pixels
    number = np.array([sample])
    place = reader.extents.first + int(reader.extents.starts(number)[0] + reader.extents.sizes(number)[0] // 2)
    content = bytearray(path.read_bytes())
    if keeps_sum:
        start, size = place - int(reader.extents.sizes(number)[0]) // 2, int(reader.extents.sizes(number)[0])
        content[start : start + size] = bytes(size)
    else:
        content[place] ^= 0x10
    path.write_bytes(content)
    if keeps_sum:
        with h5py.File(path, "r+") as file:
            sums = file["sums"][()]
            sums[sample] = zlib.crc32(bytes(size))
            file["sums"][...] = sums
            file["sums"].attrs["sha256"] = np.bytes_(digest_of(sums))


@pytest.mark.parametrize("shape", [(7, 9, 3), (16, 16, 1)])
def test_images_are_those_of_a_file_of_pixels(make_encoded, shape):
    encoded, pixels = make_encoded(shape=shape)
    assert isinstance(encoded.pixels, EncodedReader)
    assert encoded.shape == pixels.shape == shape
    assert np.array_equal(encoded.pixels[:], pixels.images)
    for name in ("mean", "std", "labels"):
        assert getattr(encoded, name).tobytes() == getattr(pixels, name).tobytes()
    assert (encoded.class_names, encoded.fit) == (pixels.class_names, pixels.fit)
    encoded.verify()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_it_is_read_as_an_array_is(make_encoded, data):
    encoded, pixels = make_encoded()
    encoded.pixels.threads = data.draw(st.sampled_from([1, 3]))
    samples = np.array(data.draw(st.lists(st.integers(0, 12), max_size=9)), np.int64)
    out = np.empty((len(samples), 7, 9, 3), np.uint8)
    assert np.array_equal(encoded.pixels.take(samples, out), pixels.images[samples])
    rows, columns = (slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in (7, 9))
    sample = data.draw(st.integers(-13, 12))
    some = slice(data.draw(st.integers(0, 12)), data.draw(st.integers(0, 13)))
    for index in (sample, some, (sample, rows, columns), (some, rows, columns)):
        assert np.array_equal(encoded.pixels[index], pixels.images[index])


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_a_damaged_picture_is_named(make_encoded, threads, keeps_sum):
    encoded, pixels = make_encoded()
    damage(encoded.path, 4, keeps_sum)
    encoded = ImageFile.open(encoded.path)
    encoded.pixels.threads = threads
    encoded.pixels.policy = ReadPolicy(None, " (on node7)", ())
    why = "The image cannot be decoded" if keeps_sum else "its bytes changed since the file was written"
    with pytest.raises(UnreadableError, match=rf"^Sample 4 of the data file .* cannot be read: {why}.* \(on node7\)\.$"):
        encoded.pixels[:]
    assert np.array_equal(encoded.pixels[5:], pixels.images[5:])


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_others_stand_in_for_damaged_pictures(make_encoded, cache, prefetch):
    encoded, pixels = make_encoded()
    for sample in (4, 5):
        damage(encoded.path, sample)
    encoded = ImageFile.open(encoded.path)
    encoded.pixels.policy = ReadPolicy(2, "", ())
    instead = np.arange(13)
    instead[[4, 5]] = 6
    pipeline = Pipeline([], 3, np.zeros(3), np.ones(3), "float64")
    loader = Loader(encoded, Sampler(13, 4, seed=3), pipeline, prefetch=prefetch, pixels=cached(encoded, cache=cache))
    for batch in loader.epoch(0):
        read = instead[batch.sample_ids]
        np.testing.assert_allclose(batch.x, pixels.images[read] / 255, rtol=1e-12)
        assert np.array_equal(batch.y, pixels.labels[read])
    assert encoded.pixels.replaced == {4: 6, 5: 6}


def test_another_decoder_is_told(make_encoded, monkeypatch):
    encoded, _ = make_encoded()
    decode = decoder.decode
    monkeypatch.setattr(decoder, "decode", lambda *arguments: decode(*arguments) ^ 1)
    with pytest.raises(DataError, match=r"Sample 3 of the data file .* decodes to other pixels here \(.*Pillow") as caught:
        encoded.pixels[3]
    assert not isinstance(caught.value, UnreadableError), "no sample stands in for this"
