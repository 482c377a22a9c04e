"""Labels are checked before they index anything."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.labels import checked_labels
from hpctrain.errors import DataError


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64])
def test_labels_of_any_integer_dtype_become_int64(dtype: type) -> None:
    labels = checked_labels(np.array([0, 8, 3], dtype), 9)
    assert labels.dtype == np.int64
    assert labels.tolist() == [0, 8, 3]
    assert checked_labels(np.zeros(0, dtype), 9).size == 0


@pytest.mark.parametrize(("label", "nearest", "needed"), [(-1, 0, 6), (9, 8, 10), (250, 8, 251)])
def test_the_first_label_outside_is_named(label: int, nearest: int, needed: int) -> None:
    sentence = rf"Label {label} is outside .* 0 to 8; the nearest legal label is {nearest}, .* at least {needed} classes"
    with pytest.raises(DataError, match=sentence):
        checked_labels(np.array([5, label, 3]), 9)
