"""Parts of converters: parallel work keeps its order, arrays are cut into chunks, class names are read."""

import threading

import numpy as np
import pytest

from hpctrain.data.convert import common
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


def test_long_lists_are_cut():
    assert common.listed("image", ["a"]) == "1 image (a)"
    assert common.listed("image", list("abcd"), 2) == "4 images (a, b, and 2 more)"
