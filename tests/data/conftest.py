"""Small data files, and real images where they are at hand."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.convert.common import PictureForm, pack
from hpctrain.data.image_file import ImageFile
from hpctrain.data.writer import write_data_file


@pytest.fixture
def make_file(tmp_path):
    """make_file(count, (H, W, C), classes): a data file of random images."""

    def make(count=13, shape=(7, 9, 3), classes=5, name="images.h5"):
        rng = np.random.default_rng(count)
        images = rng.integers(0, 256, (count, *shape), np.uint8)
        labels = rng.integers(0, classes, count)
        path = tmp_path / name
        write_data_file(path, count, shape, [f"class {i}" for i in range(classes)], [(images, labels)])
        return ImageFile.open(path), images, labels

    return make


@pytest.fixture
def make_encoded(tmp_path):
    """make_encoded(count, (H, W, C), classes): a data file of picture files, and one of the pixels that they decode to."""

    def make(count=13, shape=(7, 9, 3), classes=5):
        sources = picture_contents(count)
        labels = np.arange(count) % classes
        names = [f"class {i}" for i in range(classes)]
        files = []
        for name, keep in (("encoded.h5", True), ("pixels.h5", False)):
            form = PictureForm(shape[:2], "crop", shape[2], keep)
            pictures = [form.picture(content, int(label)) for content, label in zip(sources, labels, strict=True)]
            with form.writer(tmp_path / name, count, shape, names) as writer:
                pack(writer, pictures, lambda count: None)
            files.append(ImageFile.open(tmp_path / name))
        return files[0], files[1]

    return make


def picture_contents(count, seed=5):
    """JPEG and PNG files of several kinds and sizes."""
    random = np.random.default_rng(seed)
    contents = []
    for number in range(count):
        height, width = random.integers(8, 40, 2)
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        kind = ("RGB", "L", "CMYK", "P")[number % 4]
        file = io.BytesIO()
        image.convert(kind).save(file, "PNG" if kind == "P" else "JPEG")
        contents.append(file.getvalue())
    return contents


@pytest.fixture(scope="session")
def shared_data():
    """shared_data(name): the path of a file of real images; skips where it is absent."""
    default = Path(__file__).parents[2].parent / "shared" / "data"
    directory = Path(os.environ.get("HPCTRAIN_SHARED_DATA", default))

    def find(name):
        path = directory / name
        if not path.is_file():
            pytest.skip(f"{name} is not in {directory} (HPCTRAIN_SHARED_DATA)")
        return path

    return find
