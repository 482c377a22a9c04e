"""The part of gradients that messages leave out, kept until a later message says it: residual + sent = gradient."""

from __future__ import annotations

import numpy as np


class ErrorFeedback:
    """The residual of one array of gradients.

    A step adds its gradient, has a message made of `values`, and subtracts what the message says from them:

        feedback.add(gradient)
        compressor.compress(feedback.values, message)
        compressor.subtract_from(message, feedback.values)

    Args:
        size: elements of the array. dtype: "float32" or "float64".

    Attributes:
        values: between steps the residual; after `add` residual and gradient. (size,), the state for a checkpoint.
    """

    def __init__(self, size: int, dtype: str) -> None:
        self.values = np.zeros(size, dtype)

    def add(self, gradient: np.ndarray) -> None:
        """Add a step's gradient (size,) to the residual."""
        np.add(self.values, gradient, out=self.values)
