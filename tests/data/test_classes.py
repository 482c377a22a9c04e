"""Classes by name: the same ones in any order mean the same, others are refused."""

import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.data.classes import difference, in_order_of
from hpctrain.errors import DataError

names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=6)


@given(names, st.randoms())
def test_any_order_of_different_names_is_the_same(given_names, random):
    different = list(dict.fromkeys(given_names))
    shuffled = random.sample(different, len(different))
    assert difference(different, shuffled) is None


@given(names, names)
def test_what_differs_is_said(first, second):
    words = difference(first, second)
    assert (words is None) == (first == second or (sorted(first) == sorted(second) and len(set(first)) == len(first)))
    if words is not None and len(first) == len(second):
        number = next(i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
        assert words.startswith(f"class {number} is '{first[number]}' and '{second[number]}'")


def test_names_are_compared_in_the_composed_form(make_file):
    composed = ["größe", "été", "猫"]
    decomposed = [unicodedata.normalize("NFD", name) for name in composed]
    assert decomposed != composed
    assert difference(composed, decomposed[::-1]) is None
    assert difference(composed, [*decomposed[:2], "dog"]) == "class 2 is '猫' and 'dog', '猫' is in one of them only"
    file, _, labels = make_file(classes=3)
    file.class_names = tuple(decomposed)
    mapped = in_order_of(file, composed[::-1], "the checkpoint")
    assert mapped.class_names == tuple(composed[::-1])
    assert np.array_equal(mapped.labels, 2 - labels)


def test_counts_and_the_name_that_is_alone():
    assert difference(["a", "b"], ["a", "b", "c"]) == "there are 2 and 3 classes, 'c' is in one of them only"
    assert difference(["a", "a"], ["a"]) == "there are 2 and 1 classes"


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(5)))
def test_labels_are_mapped_by_name(make_file, order):
    file, _, labels = make_file()
    mapped = in_order_of(file, [file.class_names[k] for k in order], "the checkpoint")
    assert [mapped.class_names[label] for label in mapped.labels] == [file.class_names[label] for label in labels]
    assert mapped.class_names == tuple(file.class_names[k] for k in order)
    assert mapped.images is file.images
    assert np.array_equal(file.labels, labels)
    mapped.verify()


def test_other_classes_are_refused_by_name(make_file):
    file, _, _ = make_file()
    with pytest.raises(DataError, match="other classes than the checkpoint: class 4 is 'class 4' and 'dog', 'class 4' is"):
        in_order_of(file, [*file.class_names[:4], "dog"], "the checkpoint")
