"""Parts of converters: parallel work keeps its order, arrays are cut into chunks, class names are read."""

import threading
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.convert import common
from hpctrain.data.convert.common import LeftOut
from hpctrain.errors import DataError


@pytest.mark.parametrize("threads", [1, 3])
def test_parallel_results_keep_their_order_and_a_bounded_window(threads):
    lock, state = threading.Lock(), {"ahead": 0, "taken": 0, "started": 0}

    def work(item):
        with lock:
            state["started"] += 1
            state["ahead"] = max(state["ahead"], state["started"] - state["taken"])
        return item * item

    results = []
    for result in common.in_order(work, range(100), threads):
        results.append(result)
        with lock:
            state["taken"] += 1
    assert results == [i * i for i in range(100)]
    assert state["ahead"] <= 4 * threads + 1


def test_an_error_in_a_worker_ends_the_whole():
    started = []

    def work(item):
        started.append(item)
        if item == 3:
            raise DataError("bad item")
        return item

    with pytest.raises(DataError, match="bad item"):
        list(common.in_order(work, range(1000), 2))
    assert len(started) < 30


def test_slices_hold_every_sample_in_order():
    images = np.zeros((13, 1024, 1024, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(13)
    done = []
    chunks = list(common.slices(images, np.arange(13), done.append))
    assert len(chunks) > 1
    assert np.concatenate([images[:, 0, 0, 0] for images, _ in chunks]).tolist() == list(range(13))
    assert np.concatenate([labels for _, labels in chunks]).tolist() == list(range(13))
    assert sum(done) == 13


def test_class_names_are_one_a_line(tmp_path):
    (tmp_path / "names").write_text("first\n\n second one \n")
    assert common.read_names(tmp_path / "names") == ["first", "second one"]
    for content, message in (("a\nb\na\n", "holds a twice"), ("\n", "is empty")):
        (tmp_path / "names").write_text(content)
        with pytest.raises(DataError, match=message):
            common.read_names(tmp_path / "names")
    with pytest.raises(DataError, match="no file of class names"):
        common.read_names(tmp_path / "none")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_names_are_read_as_editors_of_any_system_write_them(tmp_path, encoding, end):
    names = ["größe", "猫", "кот"]
    for form in ("NFC", "NFD"):
        (tmp_path / "names").write_bytes(unicodedata.normalize(form, end.join(names)).encode(encoding))
        assert common.read_names(tmp_path / "names") == names
    (tmp_path / "names").write_text(end.join([names[0], unicodedata.normalize("NFD", names[0])]))
    with pytest.raises(DataError, match="twice"):
        common.read_names(tmp_path / "names")


def test_names_are_read_from_regular_files_of_a_bounded_size(tmp_path):
    with (tmp_path / "names").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"names cannot be read: it has 1,099,511,627,776 bytes"):
        common.read_names(tmp_path / "names")
    with pytest.raises(DataError, match="is no regular file"):
        common.read_names(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (
            range(1, 27),
            "have 26 values from 1 to 26, but none is 0; name all 27 classes in --class-names, or number the labels from 0 to 25",
        ),
        ([0, 1, 3], "have 3 values from 0 to 3, but none is 2; name all 4"),
        ([0, 1, 2, 255], "have 4 values from 0 to 255, but none is 3; name all 256"),
        ([1 << 40], "largest label is 1099511627776"),
    ],
)
def test_labels_that_do_not_say_how_many_classes_there_are_need_names(labels, sentence):
    with pytest.raises(DataError, match=sentence):
        common.numbered_names(np.array(labels), "a file")


def test_labels_without_a_gap_are_named_by_number():
    assert common.numbered_names(np.array([2, 0, 1, 0]), "a file") == ["0", "1", "2"]
    assert common.numbered_names(np.array([1, 0]), "a file", 2) == ["0", "1"]
    with pytest.raises(DataError, match="none is 2"):
        common.numbered_names(np.array([1, 0]), "a file", 3)


def test_a_terminal_is_not_told_what_to_do():
    said = str(LeftOut("hidden", tuple(f"{number}\x1b[31m\n\u202e\udcff" for number in range(8))))
    assert said == "left out, hidden: 8 (" + ", ".join(rf"{n}\x1b[31m\n\u202e\udcff" for n in range(5)) + ", and 3 more)"
    assert said.isprintable()
