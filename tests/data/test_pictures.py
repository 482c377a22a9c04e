"""Pictures as they lie on a disk have the pixels that the converters write, and one that is broken disturbs no other."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.convert import folder
from hpctrain.data.facts import ImageForm
from hpctrain.data.format import ImageFile
from hpctrain.data.pictures import DecodedPictures, picture_files
from hpctrain.errors import DataError, ShapeError
from tests.support.picture_files import write_pictures


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
    assert decoded.broken[1] == "The image cannot be decoded: it is of no format that hpctrain reads."


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
    assert f"left out, not a picture by the name: 1 ({folder / 'notes.txt'})" in caplog.text
    assert f"searched already: 1 ({folder / 'up'})" in caplog.text
    (folder / "gone").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"1 place \(.*photos/gone: No such file or directory\) cannot be read"):
        picture_files([folder])


def test_what_is_not_there_is_said_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no image; give one with files that end in"):
        picture_files([tmp_path / "empty"])
    with pytest.raises(DataError, match=r"There is no image .*nowhere.jpg; give the path of a picture file"):
        picture_files([tmp_path / "nowhere.jpg"])


def test_pictures_have_one_channel_or_three() -> None:
    with pytest.raises(ShapeError, match="images of 4 channels"):
        DecodedPictures([Path("a.png")], ImageForm((5, 5, 4)))
