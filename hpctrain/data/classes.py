"""Classes by name: a file with the same class names in another order is mapped to one order; other classes are refused.

Names are compared in Unicode's composed form (`stored.normal_name`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.data.image_file import ImageFile
from hpctrain.data.format import normal_name
from hpctrain.core.errors import DataError


def difference(names: Sequence[str], others: Sequence[str]) -> str | None:
    """How two lists of class names differ, in words; None where they are the same, be it in another order.

    Where a name stands for several classes the order, too, must be the same: it is all that tells them apart.
    """
    names, others = [*map(normal_name, names)], [*map(normal_name, others)]
    if len(names) != len(others):
        return f"there are {len(names)} and {len(others)} classes{_only(names, others)}"
    if sorted(names) == sorted(others) and (len(set(names)) == len(names) or names == others):
        return None
    first = next(number for number, pair in enumerate(zip(names, others, strict=True)) if pair[0] != pair[1])
    return f"class {first} is {names[first]!r} and {others[first]!r}{_only(names, others)}"


def _only(names: Sequence[str], others: Sequence[str]) -> str:
    alone = [f"{name!r}" for one, other in ((names, others), (others, names)) for name in one if name not in other][:1]
    return f", {alone[0]} is in one of them only" if alone else ""


def in_order_of(file: ImageFile, names: Sequence[str], origin: str) -> ImageFile:
    """The same file with the classes in the order of `names`, which `origin` has: its labels are mapped by name.

    Raises:
        DataError: it has other classes, or another number of them; the message names the first difference.
    """
    differs = difference(file.class_names, names)
    if differs is not None:
        raise DataError(
            f"{file.path} has other classes than {origin}: {differs}. "
            f"Convert it again with the same class names, or use other data."
        )
    names = tuple(names)
    if names == file.class_names:
        return file
    label_of = {normal_name(name): label for label, name in enumerate(names)}
    if len(label_of) < len(names):  # a name stands for several classes; `difference` then requires the same order
        mapped = np.arange(len(names))
    else:
        mapped = np.array([label_of[normal_name(name)] for name in file.class_names], np.int64)
    moments = file.mean, file.std
    labels = mapped[file.labels]
    return ImageFile(file.path, file.images, labels, names, moments, file.manifest, file.pixels, file.fit, file.sums)
