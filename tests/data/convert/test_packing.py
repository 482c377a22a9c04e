"""Pictures put into data files: what is kept, what is left out, and what an interruption leaves."""

import numpy as np
import pytest

from hpctrain.data.convert import packing
from hpctrain.data.convert.packing import DecodedPicture, PictureForm, pack
from hpctrain.data.format import ImageFile
from hpctrain.errors import DataError

SHAPE = (3, 4, 3)


def pictures(count=10, broken=()):
    random = np.random.default_rng(0)
    made = [
        DecodedPicture(random.integers(0, 256, SHAPE, np.uint8), number % 3, random.bytes(number + 1)) for number in range(count)
    ]
    return [f"file {number}" if number in broken else picture for number, picture in enumerate(made)]


@pytest.fixture(params=[False, True], ids=["pixels", "files"])
def form(request):
    return PictureForm(SHAPE[:2], "crop", 3, request.param)


def write(form, path, given, skip=False, source="x"):
    told = []
    with form.writer(path, len(given), SHAPE, list("abc"), source) as writer:
        begin = writer.done
        found = pack(writer, given[begin:], told.append, skip=skip)
        skipped = writer.skipped
        if not skip and found:
            raise DataError("unreadable")
    assert sum(told) == len(given) - begin
    return begin, found, skipped


def contents(path):
    file = ImageFile.open(path)
    return [file.pixels.stored(number) for number in range(len(file))], file.labels.tolist()


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_everything_is_stored_in_order(form, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(packing, "_CHUNK_BYTES", chunk)
    write(form, tmp_path / "a.h5", pictures())
    stored, labels = contents(tmp_path / "a.h5")
    assert stored == [picture.content if form.keep_files else picture.pixels.tobytes() for picture in pictures()]
    assert labels == [number % 3 for number in range(10)]


@pytest.mark.parametrize("broken", [(0,), (3, 4), (9,), tuple(range(9))])
@pytest.mark.parametrize("items", [1, 4, 100])
def test_pictures_that_cannot_be_decoded_are_left_out(form, tmp_path, monkeypatch, broken, items):
    monkeypatch.setattr(packing, "_CHUNK_ITEMS", items)
    _, found, skipped = write(form, tmp_path / "a.h5", pictures(broken=broken), skip=True)
    assert found == skipped == [f"file {number}" for number in broken]
    kept = [number for number in range(10) if number not in broken]
    assert contents(tmp_path / "a.h5")[1] == [number % 3 for number in kept]
    with pytest.raises(DataError, match="unreadable"):
        write(form, tmp_path / "b.h5", pictures(broken=broken))
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


@pytest.mark.parametrize("at", range(1, 10))
def test_an_interrupted_one_goes_on_and_ends_in_the_same_bytes(form, tmp_path, monkeypatch, at):
    monkeypatch.setattr(packing, "_CHUNK_ITEMS", 2)
    given = pictures(broken=(1, 6))
    write(form, tmp_path / "whole.h5", given, skip=True)

    def interrupted():
        yield from given[:at]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), form.writer(tmp_path / "a.h5", 10, SHAPE, list("abc"), "x") as writer:
        pack(writer, interrupted(), lambda count: None, skip=True)
    begin, _, skipped = write(form, tmp_path / "a.h5", given, skip=True)
    assert begin == at // 2 * 2
    assert skipped == ["file 1", "file 6"]
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "whole.h5"]


def test_sources_have_names_of_their_own():
    forms = [
        PictureForm((3, 4), "crop", 3),
        PictureForm((4, 3), "crop", 3),
        PictureForm(None, "crop", 3),
        PictureForm((3, 4), "squash", 3),
        PictureForm((3, 4), "crop", 1),
    ]
    forms += [PictureForm((3, 4), "crop", 3, True)]
    names = {
        form.source(items, classes, skips) for form in forms for items in ([1], [2]) for classes in ("a", "b") for skips in (0, 1)
    }
    assert len(names) == len(forms) * 8
    assert forms[0].source(["é\udcff"], ["a"]) == forms[0].source(["é\udcff"], ["a"])


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match=r"The image cannot be read: No such file or directory\."):
        PictureForm(None, "crop", 3).picture(tmp_path / "none.jpg", 0)
