"""Facts of the data: through JSON and back to the last bit, the same for the same content, another for any other."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.data.classes import in_order_of
from hpctrain.data.facts import DataFacts, ImageForm
from hpctrain.data.format import ImageFile


def test_json_keeps_every_bit(make_file):
    facts = DataFacts.of(make_file()[0])
    facts = replace(facts, mean=(0.1 + 0.2, 1 / 3, np.nextafter(0.5, 1).item()))
    assert DataFacts.from_meta(json.loads(json.dumps(facts.to_meta()))) == facts


def test_no_image_is_read(make_file):
    class Untouchable:
        def __init__(self, shape):
            self.shape = shape

        def __getattr__(self, name):
            raise AssertionError(f"{name} of the images was asked for")

    file, images, _ = make_file()
    file.images, kept = Untouchable(file.images.shape), file.images
    facts = DataFacts.of(file)
    file.images = kept
    assert (facts.samples, facts.shape) == (len(images), images.shape[1:])


def test_the_same_content_has_the_same_facts_in_any_file(make_file, tmp_path):
    file, images, labels = make_file()
    data_format.write(
        tmp_path / "again.h5",
        len(images),
        images.shape[1:],
        file.class_names,
        [(images[:5], labels[:5]), (images[5:], labels[5:])],
    )
    assert DataFacts.of(ImageFile.open(tmp_path / "again.h5")) == DataFacts.of(file)


@pytest.mark.parametrize("what", ["images", "labels", "class_names"])
def test_any_other_content_has_other_facts(make_file, tmp_path, what):
    file, images, labels = make_file()
    names = list(file.class_names)
    if what == "images":
        images = images.copy()
        images[3, 0, 0, 0] ^= 1
    elif what == "labels":
        labels = (labels + (np.arange(len(labels)) == 2)) % len(names)
    else:
        names[0] = "another"
    data_format.write(tmp_path / "other.h5", len(images), images.shape[1:], names, [(images, labels)])
    here, other = DataFacts.of(file), DataFacts.of(ImageFile.open(tmp_path / "other.h5"))
    assert getattr(here, what) != getattr(other, what)


@pytest.mark.parametrize("fit", [None, "crop", "squash"])
def test_the_fit_of_pictures_is_kept_and_by_default_that_of_the_converters(make_file, tmp_path, fit):
    _, images, labels = make_file()
    path, names = tmp_path / "fitted.h5", [f"class {number}" for number in range(5)]
    data_format.write(path, len(images), images.shape[1:], names, [(images, labels)], fit)
    file = ImageFile.open(path)
    facts = DataFacts.of(in_order_of(file, names[::-1], "another file"))
    assert (file.fit, facts.fit) == (fit, fit)
    assert ("fit" in facts.to_meta()) is (fit is not None)  # what says nothing is as before
    assert DataFacts.from_meta(json.loads(json.dumps(facts.to_meta()))) == facts
    form = ImageForm.of(facts)
    assert form == ImageForm.of(file) == ImageForm(images.shape[1:], fit or "crop")
    assert ImageForm.from_meta(json.loads(json.dumps(form.to_meta()))) == form
