"""Images that a disk no longer gives back: named instead of a SIGBUS, read again, or stood in for."""

import errno
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.data import block_reader
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.data.unreadable import ReadPolicy, UnreadableError
from tests.support.cached import cached

SHAPE = (37, 41, 3)
SIZE = 37 * 41 * 3
AT_ONCE = (0.0,)  # pauses


@pytest.fixture(params=["copied by the system", "read from the file"])
def way(request, monkeypatch):
    """Both ways to read: the second is that of systems that forbid the first."""
    if request.param == "read from the file":
        monkeypatch.setattr(block_reader, "_copy", lambda *arguments: (block_reader.ctypes.set_errno(errno.EPERM), -1)[1])
    return request.param


def cut_short(file, sample):
    """Cut the file inside a sample, on a page: from the page on nothing is there any more."""
    page = 4096
    at = (file.pixels._offset + sample * SIZE) // page * page
    os.truncate(file.path, at)
    return next(number for number in range(len(file)) if file.pixels._offset + (number + 1) * SIZE > at)


class BadDisk:
    """`os.preadv` of a file whose samples in `bad` cannot be read, so many times; and no map that could be copied from."""

    def __init__(self, monkeypatch, file, bad, error=errno.EIO, times=10**9):
        self.bad, self.error, self.left, self.file, self.calls = bad, error, dict.fromkeys(bad, times), file, 0
        self.preadv = os.preadv
        monkeypatch.setattr(block_reader, "_copy", lambda *arguments: (block_reader.ctypes.set_errno(errno.EFAULT), -1)[1])
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor, buffers, at):
        sample = (at - self.file.pixels._offset) // SIZE
        self.calls += 1
        if self.left.get(sample, 0) > 0:
            self.left[sample] -= 1
            raise OSError(self.error, os.strerror(self.error))
        return self.preadv(descriptor, buffers, at)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_read_is_what_an_array_gives(make_file, way, data):
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


def test_more_pieces_than_a_call_takes(make_file, monkeypatch, way):
    file, images, _ = make_file(count=9, shape=SHAPE)
    monkeypatch.setattr(block_reader, "_PIECES_AT_ONCE", 4)
    assert np.array_equal(file.pixels[:, 3:30, 5:9], images[:, 3:30, 5:9])
    monkeypatch.setattr(block_reader, "_BYTES_AT_ONCE", SIZE * 2 + 1)
    assert np.array_equal(file.pixels[:], images)


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
    loader = Loader(
        file,
        Sampler(40, 8, seed=3),
        Pipeline([], 3, file.mean, file.std, "float32"),
        prefetch=prefetch,
        pixels=cached(file, cache=cache),
    )
    with pytest.raises(UnreadableError, match=r"^Sample \d+ of the data file .*\(on rank 1 of 4, node7\)\.$"):
        list(loader.epoch(0))


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
    monkeypatch.setattr(block_reader.get_logger("hpctrain"), "propagate", True)
    caplog.set_level("INFO", logger="hpctrain")
    instead = {}
    for sample in bad:
        other = (sample + 1) % 9
        while other in bad:
            other = (other + 1) % 9
        instead[sample] = other
    loader = Loader(
        file,
        Sampler(9, 4, seed=3),
        Pipeline([], 3, np.zeros(3), np.ones(3), "float64"),
        prefetch=0,
        pixels=cached(file, cache=cache),
    )
    for epoch in range(2):
        for batch in loader.epoch(epoch):
            read = [instead.get(sample, sample) for sample in batch.sample_ids.tolist()]
            assert np.array_equal(batch.y, labels[read])
            np.testing.assert_allclose(batch.x, images[read] / 255, rtol=1e-12)
    assert file.pixels.replaced == instead
    (told,) = {id(record): record for record in caplog.records}.values()  # two handlers may have caught the one record
    assert "(on node7)" in told.message
    assert all(left >= 10**9 - 2 for left in disk.left.values()), "a sample that cannot be read is asked for again and again"


def test_too_many_of_them_are_an_error(make_file, monkeypatch):
    file, images, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(2, " (on node7)", ())
    BadDisk(monkeypatch, file, {3, 4, 6})
    assert np.array_equal(file.pixels[:6], images[[0, 1, 2, 5, 5, 5]])
    with pytest.raises(UnreadableError, match=r"Sample 6 .* 3 such samples, and data.max_unreadable allows for 2 \(on node7\)"):
        file.pixels[6]


def test_a_file_that_is_gone_as_a_whole_is_an_error(make_file, monkeypatch):
    file, _, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(100, "", ())
    BadDisk(monkeypatch, file, set(range(9)), errno.ENOTCONN)
    with pytest.raises(UnreadableError, match="there are 9 such samples"):
        file.pixels[2]


def test_pauses_are_made_for_the_first_of_them_only(make_file, monkeypatch):
    file, _, _ = make_file(count=9, shape=SHAPE)
    file.pixels.policy = ReadPolicy(9, "", (1.0, 2.0))
    slept = []
    monkeypatch.setattr(block_reader.time, "sleep", slept.append)
    BadDisk(monkeypatch, file, {3, 4, 5, 6})
    file.pixels[:]
    assert slept == [1.0, 2.0]


def test_its_descriptor_goes_with_it(make_file):
    file, _, _ = make_file(count=9, shape=SHAPE)
    descriptor = file.pixels._descriptor
    os.fstat(descriptor)
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
