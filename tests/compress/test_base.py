"""The seam of compressors: all of its methods must be given."""

import numpy as np
import pytest

from hpctrain.compress.base import Compressor


class Half(Compressor):
    """Keeps the first half of an array."""

    def __init__(self, size: int, dtype: str) -> None:
        super().__init__(size, dtype)
        self.message_size = size // 2 * self.dtype.itemsize

    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        message.view(self.dtype)[...] = values[: self.size // 2]

    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        values[...] = 0
        self.add_to(message, values)

    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        values[: self.size // 2] += message.view(self.dtype)

    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        values[: self.size // 2] -= message.view(self.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_message_is_as_long_as_the_compressor_says(dtype: str) -> None:
    half = Half(6, dtype)
    message, values = np.empty(half.message_size, np.uint8), np.arange(6, dtype=dtype)
    half.compress(values, message)
    half.decompress(message, again := np.ones(6, dtype))
    np.testing.assert_array_equal(again, [0, 1, 2, 0, 0, 0])


def test_a_compressor_without_a_way_back_is_none() -> None:
    class Lossy(Compressor):
        def compress(self, values: np.ndarray, message: np.ndarray) -> None: ...

    with pytest.raises(TypeError, match="decompress"):
        Lossy(1, "float32")  # type: ignore[abstract]
