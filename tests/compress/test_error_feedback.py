"""Nothing is lost: all messages and the last residual are the sum of all gradients."""

import numpy as np
import pytest

from hpctrain.compress.error_feedback import ErrorFeedback
from hpctrain.compress.top_k import TopK


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_messages_and_residual_are_the_sum_of_the_gradients(dtype: str) -> None:
    numbers = np.random.default_rng(1)
    compressor, feedback = TopK(500, dtype, 5), ErrorFeedback(500, dtype)
    message = np.empty(compressor.message_size, np.uint8)
    received, total = np.zeros(500, dtype), np.zeros(500, dtype)
    for step in range(50):
        gradient = numbers.integers(-1000, 1000, 500).astype(dtype)  # sums of them are exact
        total += gradient
        feedback.add(gradient)
        corrected = feedback.values.copy()
        compressor.begin_step(step)
        compressor.compress(feedback.values, message)
        compressor.subtract_from(message, feedback.values)
        compressor.decompress(message, sent := np.empty(500, dtype))
        np.testing.assert_array_equal(feedback.values + sent, corrected)
        received += sent
    assert feedback.values.any()
    np.testing.assert_array_equal(received + feedback.values, total)


def test_the_residual_starts_at_zero() -> None:
    feedback = ErrorFeedback(3, "float64")
    assert feedback.values.dtype == np.float64
    assert not feedback.values.any()
