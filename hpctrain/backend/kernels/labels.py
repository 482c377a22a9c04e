"""Labels of a batch, checked before anything is computed with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.core.errors import DataError


@dataclass(frozen=True)
class MixedLabels:
    """Two labels of each sample, first and second (N,); the first has the share `weight`. Accuracies count the larger one."""

    first: np.ndarray
    second: np.ndarray
    weight: float


def checked_labels(labels: np.ndarray, classes: int) -> np.ndarray:
    """The labels (N,) of any integer dtype as int64, all of them in [0, classes).

    Raises:
        DataError: the first label outside, with the nearest legal one.
    """
    labels = np.asarray(labels).astype(np.int64)
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        nearest = 0 if wrong[0] < 0 else classes - 1
        raise DataError(
            f"Label {wrong[0]} is outside the model's classes 0 to {classes - 1}; the nearest legal label is {nearest}, "
            f"or the model needs at least {int(labels.max()) + 1} classes."
        )
    return labels
