"""Readers of stored samples: where samples lie, disks that fail, and picture files as images."""

import errno
import logging
import os
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.data import decoding, readers
from hpctrain.data.decoding import EncodedReader
from hpctrain.data.image_file import ImageFile, digest_of
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.readers import PAUSES_SECONDS, BlockReader, Extents, ReadPolicy, UnreadableError, pauses_within
from hpctrain.data.sampler import Sampler
from hpctrain.storage.hdf5_store import system_reason
from tests.support.data_files import cached
from tests.support.sampling import amount

SHAPE = (37, 41, 3)
SIZE = 37 * 41 * 3
AT_ONCE = (0.0,)  # pauses


@pytest.fixture(params=["copied by the system", "read from the file"])
def way(request, monkeypatch):
    """Both ways to read: the second is that of systems that forbid the first."""
    if request.param == "read from the file":
        monkeypatch.setattr(readers, "_copy", lambda *arguments: (readers.ctypes.set_errno(errno.EPERM), -1)[1])
    return request.param


def loader_of(file, batch, *, cache, prefetch=0):
    pipeline = Pipeline([], 3, np.zeros(3), np.ones(3), "float64")
    return Loader(file, Sampler(len(file), batch, seed=3), pipeline, prefetch=prefetch, pixels=cached(file, cache=cache))


def cut_short(file, sample):
    """Cut the file inside a sample, on a page: from the page on nothing is there any more."""
    page = 4096
    at = (file.pixels._offset + sample * SIZE) // page * page
    os.truncate(file.path, at)
    return next(number for number in range(len(file)) if file.pixels._offset + (number + 1) * SIZE > at)


class BadDisk:
    """`os.preadv` of a file whose samples in `bad` cannot be read, `times` times; and no map that could be copied from."""

    def __init__(self, monkeypatch, file, bad, error=errno.EIO, times=10**9):
        self.bad, self.error, self.left, self.file, self.calls = bad, error, dict.fromkeys(bad, times), file, 0
        self.preadv = os.preadv
        monkeypatch.setattr(readers, "_copy", lambda *arguments: (readers.ctypes.set_errno(errno.EFAULT), -1)[1])
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor, buffers, at):
        sample = (at - self.file.pixels._offset) // SIZE
        self.calls += 1
        if self.left.get(sample, 0) > 0:
            self.left[sample] -= 1
            raise OSError(self.error, os.strerror(self.error))
        return self.preadv(descriptor, buffers, at)


@settings(max_examples=amount(8, 30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_read_is_what_an_array_returns(make_file, way, data):
    file, images, _ = make_file(count=9, shape=SHAPE)
    samples = np.array(data.draw(st.lists(st.integers(0, 8), max_size=12)), np.int64)
    out = np.empty((len(samples), *SHAPE), np.uint8)
    assert file.pixels.take(samples, out) is out
    assert np.array_equal(out, images[samples])
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in (9, 37, 41)]
    some, rows, columns = (slice(*bound) for bound in bounds)
    assert np.array_equal(file.pixels[some, rows, columns], images[some, rows, columns])
    sample = data.draw(st.integers(0, 8))
    assert np.array_equal(file.pixels[sample, rows, columns], images[sample, rows, columns])
    assert np.array_equal(file.pixels[some], images[some])
    assert np.array_equal(file.pixels[sample], images[sample])


def test_a_file_that_is_cut_short_is_named_with_the_sample(make_file, way):
    file, images, _ = make_file(count=40, shape=SHAPE)
    first = cut_short(file, 21)
    assert np.array_equal(file.pixels[:first], images[:first])
    size = file.path.stat().st_size
    for wanted in (lambda: file.pixels[first], lambda: file.pixels[:], lambda: file.pixels[:, :, 3:7], file.verify):
        with pytest.raises(UnreadableError, match=rf"Sample {first} of .* cannot be read: the file ends at byte {size}"):
            wanted()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_the_loader_names_it_and_the_rank(make_file, cache, prefetch):
    file, _, _ = make_file(count=40, shape=SHAPE)
    file.pixels.policy = ReadPolicy(None, " (on rank 1 of 4, node7)", ())
    cut_short(file, 21)
    with pytest.raises(UnreadableError, match=r"^Sample \d+ of the data file .*\(on rank 1 of 4, node7\)\.$"):
        list(loader_of(file, 8, cache=cache, prefetch=prefetch).epoch(0))


@pytest.mark.parametrize(("times", "right"), [(1, True), (2, True), (3, False)])
def test_a_sample_is_read_again_before_it_is_an_error(make_file, monkeypatch, times, right):
    file, images, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(None, "", (0.0, 0.0))
    BadDisk(monkeypatch, file, {4}, times=times)
    if right:
        assert np.array_equal(file.pixels[:], images)
        return
    with pytest.raises(UnreadableError, match=r"Sample 4 .*: Input/output error, in 3 attempts\."):
        file.pixels[:]


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOTCONN])
def test_a_file_system_that_comes_back_is_opened_again(make_file, monkeypatch, error):
    file, images, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(None, "", AT_ONCE)
    lost, before = file.pixels._descriptor, os.preadv
    BadDisk(monkeypatch, file, ())

    def preadv(descriptor, buffers, at):
        if descriptor == lost:
            raise OSError(error, os.strerror(error))
        return before(descriptor, buffers, at)

    keeps_it = os.dup(lost)  # the number is not given out again
    monkeypatch.setattr(os, "preadv", preadv)
    opened = os.open
    monkeypatch.setattr(os, "open", lambda *arguments: os.dup2(opened(*arguments), 900 + error))  # a number of its own
    assert np.array_equal(file.pixels[:], images)
    os.close(keeps_it)


def test_another_file_of_the_name_is_not_read(make_file, monkeypatch):
    file, _, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(None, "", AT_ONCE)
    make_file(count=10, shape=SHAPE, name="other.h5")
    os.replace(file.path.with_name("other.h5"), file.path)
    BadDisk(monkeypatch, file, {4}, errno.ESTALE, times=2)
    with pytest.raises(UnreadableError, match=f"Sample 4 .*{os.strerror(errno.ESTALE)}"):
        file.pixels[4]


@pytest.mark.parametrize("bad", [{3}, {3, 4, 5}, {8}, {0, 8}, {1, 4, 7}])
@pytest.mark.parametrize("cache", [True, False])
def test_others_stand_in_for_samples_that_cannot_be_read(make_file, monkeypatch, caplog, bad, cache):
    file, images, labels = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(3, " (on node7)", AT_ONCE)
    disk = BadDisk(monkeypatch, file, bad)
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", True)
    caplog.set_level("INFO", logger="hpctrain")
    instead = {}
    for sample in bad:
        other = (sample + 1) % 9
        while other in bad:
            other = (other + 1) % 9
        instead[sample] = other
    loader = loader_of(file, 4, cache=cache)
    for epoch in range(2):
        for batch in loader.epoch(epoch):
            read = [instead.get(sample, sample) for sample in batch.sample_ids.tolist()]
            assert np.array_equal(batch.y, labels[read])
            np.testing.assert_allclose(batch.x, images[read] / 255, rtol=1e-12)
    assert file.pixels.replaced == instead
    (warning,) = {id(record): record for record in caplog.records}.values()  # two handlers may have caught the one record
    assert "(on node7)" in warning.message
    assert all(left >= 10**9 - 2 for left in disk.left.values()), "a sample that cannot be read is asked for again and again"


def test_no_validation_sample_stands_in_for_a_training_sample(make_file, monkeypatch):
    """The training reads no sample that is held out for validation, and an evaluation reads no training sample."""
    file, images, _ = make_file(count=9, shape=SHAPE)
    held_out = np.isin(np.arange(9), [2, 4])
    file.pixels.policy = ReadPolicy(5, "", (), held_out)
    BadDisk(monkeypatch, file, {1, 2, 3})
    assert np.array_equal(file.pixels[:4], images[[0, 5, 4, 5]])
    BadDisk(monkeypatch, file, {1, 2, 3, 4})
    with pytest.raises(UnreadableError, match="no sample is left that could replace it"):
        file.pixels[4]


def test_too_many_of_them_are_an_error(make_file, monkeypatch):
    file, images, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(2, " (on node7)", ())
    BadDisk(monkeypatch, file, {3, 4, 6})
    assert np.array_equal(file.pixels[:6], images[[0, 1, 2, 5, 5, 5]])
    with pytest.raises(
        UnreadableError, match=r"Sample 6 .* 3 of .* samples are unreadable, but data.max_unreadable allows 2 \(on node7\)"
    ):
        file.pixels[6]


def test_a_file_that_is_gone_as_a_whole_is_an_error(make_file, monkeypatch):
    file, _, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(100, "", ())
    BadDisk(monkeypatch, file, set(range(9)), errno.ENOTCONN)
    with pytest.raises(UnreadableError, match=r"9 of 9 samples are unreadable\.$"):
        file.pixels[2]


def test_pauses_are_made_for_the_first_of_them_only(make_file, monkeypatch):
    file, _, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(9, "", (1.0, 2.0))
    slept = []
    monkeypatch.setattr(readers.time, "sleep", slept.append)
    BadDisk(monkeypatch, file, {3, 4, 5, 6})
    file.pixels[:]
    assert slept == [1.0, 2.0]


def test_the_descriptor_of_a_file_is_closed_with_it(make_file):
    file, _, _ = make_file(count=9, shape=SHAPE)
    descriptor = file.pixels._descriptor
    os.fstat(descriptor)
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


SIZES = [5, 1, 300, 4097, 2, 9000, 77]
FIRST = 123


@pytest.fixture
def reader(tmp_path):
    """A reader of samples of `SIZES`, and their bytes."""
    random = np.random.default_rng(1)
    contents = [random.bytes(size) for size in SIZES]
    (tmp_path / "block").write_bytes(bytes(FIRST) + b"".join(contents) + b"after")
    extents = Extents.rising(FIRST, np.cumsum([0, *SIZES]).astype(np.int64))
    block = np.memmap(tmp_path / "block", np.uint8, "r", FIRST, (extents.size_bytes,))
    return BlockReader(tmp_path / "block", block, extents), contents


def fetched(reader, samples):
    """What a reader fetches of samples, and the ones that it could not."""
    samples = np.array(samples, np.int64)
    sizes = reader.extents.sizes(samples)
    ends = np.cumsum(sizes)
    out = np.zeros(int(sizes.sum()), np.uint8)
    starts = reader.extents.starts(samples)[:, None]
    failed = reader.fetch(samples, starts, (ends - sizes)[:, None], sizes, out, patient=False)
    return [out[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)], failed


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("samples", [[], [3], [6, 0, 0, 5], list(range(7))])
@pytest.mark.parametrize("at_once", [1, 3, 1024])
def test_stored_bytes_come_in_any_order(reader, samples, at_once, monkeypatch):
    reader, contents = reader
    monkeypatch.setattr(readers, "_PIECES_AT_ONCE", at_once)
    assert fetched(reader, samples) == ([contents[sample] for sample in samples], {})


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("chunk", [1, 100, 4000, 1 << 20])
def test_blocks_cover_all_samples_in_order(reader, chunk, monkeypatch):
    reader, contents = reader
    monkeypatch.setattr(readers, "_CHUNK_BYTES", chunk)
    blocks = list(reader.blocks())
    assert np.concatenate([numbers for numbers, _, _ in blocks]).tolist() == list(range(7))
    assert b"".join(block.tobytes() for _, block, _ in blocks) == b"".join(contents)
    assert all(not failed for _, _, failed in blocks)
    assert len(blocks) == (1 if chunk == 1 << 20 else len(blocks))


@pytest.mark.usefixtures("way")
def test_samples_past_the_end_of_a_file_are_named(reader, tmp_path):
    reader, contents = reader
    os.truncate(tmp_path / "block", 4096)  # inside sample 3
    read, failed = fetched(reader, [6, 1, 3, 0])
    assert (read[1], read[3]) == (contents[1], contents[0])
    assert sorted(failed) == [0, 2]
    assert "the file ends at byte 4096" in failed[2]
    (_, _, missing), *_ = reader.blocks()
    assert sorted(missing) == [3, 4, 5, 6]


def both(sizes, first):
    """Extents of samples of these sizes, and of as many of the first one's size."""
    yield Extents.rising(first, np.cumsum([0, *sizes]).astype(np.int64)), sizes
    yield Extents(first, len(sizes), sizes[0]), [sizes[0]] * len(sizes)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 5000), st.data())
def test_samples_are_contiguous(sizes, first, data):
    for extents, expected in both(sizes, first):
        samples = np.arange(len(sizes))
        starts = extents.starts(samples)
        assert extents.count == len(sizes)
        assert extents.sizes(samples).tolist() == expected
        assert starts.tolist() == np.cumsum([0, *expected])[:-1].tolist()
        assert extents.size_bytes == sum(expected)
        start = data.draw(st.integers(0, extents.size_bytes))
        stop = data.draw(st.integers(0, extents.size_bytes))
        owner = np.repeat(samples, expected)
        assert list(extents.samples_of(start, stop)) == sorted(set(owner[start:stop].tolist()))
        some = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=5)), np.int64)
        assert extents.starts(some).tolist() == starts[some].tolist()
        assert extents.sizes(some).tolist() == [expected[sample] for sample in some]


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


@settings(max_examples=amount(8, 30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_encoded_images_are_read_as_an_array_is(make_encoded, data):
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
    for batch in loader_of(encoded, 4, cache=cache, prefetch=prefetch).epoch(0):
        read = instead[batch.sample_ids]
        np.testing.assert_allclose(batch.x, pixels.images[read] / 255, rtol=1e-12)
        assert np.array_equal(batch.y, pixels.labels[read])
    assert encoded.pixels.replaced == {4: 6, 5: 6}


def test_another_decoder_is_reported(make_encoded, monkeypatch):
    encoded, _ = make_encoded()
    decode = decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda *arguments: decode(*arguments) ^ 1)
    with pytest.raises(DataError, match=r"Sample 3 of the data file .* decodes to other pixels here \(.*Pillow") as caught:
        encoded.pixels[3]
    assert not isinstance(caught.value, UnreadableError), "no sample stands in for this"


@pytest.mark.parametrize(("deadline", "count"), [(300, 3), (8.5, 3), (8, 2), (3, 2), (1, 1), (0.2, 0)])
def test_pauses_leave_a_deadline_most_of_its_time(deadline, count):
    assert pauses_within(deadline) == PAUSES_SECONDS[:count]
    assert sum(pauses_within(deadline)) <= deadline / 4


def test_hdf5_errors_are_the_systems_words():
    text = "Can't synchronously read data (file read failed: time = Thu, filename = 'a.h5', file descriptor = 5, errno = 5, "
    text += "error message = 'Input/output error', buf = 0x7f, total read size = 8, offset = 800)"
    assert system_reason(OSError(text)) == "Input/output error"
    assert system_reason(OSError(errno.EIO, "Input/output error")) == "Input/output error"


def test_other_errors_have_no_words_of_the_system(tmp_path):
    assert system_reason(KeyError("images")) is None
    (tmp_path / "a.h5").write_bytes(b"no HDF5 file")
    with pytest.raises(OSError, match="signature") as caught:
        h5py.File(tmp_path / "a.h5", "r")
    assert system_reason(caught.value) is None
