"""Random numbers as a pure function of a key and a counter: Philox4x32-10 (Salmon et al., SC 2011), vectorised.

There is no state, so any split of samples or indices over ranks, threads or calls yields the same numbers. A number is addressed
by (key, sample id, index): `key("dropout", seed, step, layer)` identifies the stream; index i of sample n is word i % 4 of the
counter (i // 4, n). The numbers are bitwise equal on every machine and with every NumPy version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Key = tuple[int, int]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BLOCK = 8192  # counters of a tile, whose state fits the nearest caches


def key(*parts: int | str) -> Key:
    """Return the key of a stream, two 32-bit words.

    The parts may be, for example, "dropout", seed, step and "classifier.1". The key is a cryptographic hash of the parts, their
    types and their lengths, so equal parts have equal keys in all processes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = (f"i{int(part)}" if isinstance(part, (int, np.integer)) else f"s{part}").encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    word = int.from_bytes(digest.digest(), "little")
    return word & 0xFFFFFFFF, word >> 32


class _WordScratch:
    """Buffers for the rounds on up to `size` counters. The words of a counter are (even[0], odd[0], even[1], odd[1])."""

    def __init__(self, size: int) -> None:
        self._buffers = np.empty((4, 2 * size), np.uint64)

    def state(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the views (2, size) uint64 `even` and `odd`, which the caller fills with 32-bit words of counters."""
        return self._view(0, size), self._view(1, size)

    def rounds(self, stream: Key, even: np.ndarray, odd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute the ten rounds and return (even, odd), which are buffers of this object."""
        size = even.shape[1]
        product, spare = self._view(2, size), self._view(3, size)
        for i in range(_ROUNDS):
            keys = [[(stream[0] + i * _WEYL[0]) & 0xFFFFFFFF], [(stream[1] + i * _WEYL[1]) & 0xFFFFFFFF]]
            np.multiply(even, _MULTIPLIERS, out=product)
            np.bitwise_xor(odd, np.array(keys, np.uint64), out=odd)
            np.right_shift(product, _HALF, out=spare)
            np.bitwise_xor(spare[::-1], odd, out=even)
            np.bitwise_and(product[::-1], _LOW, out=odd)
        return even, odd

    def _view(self, buffer: int, size: int) -> np.ndarray:
        return self._buffers[buffer, : 2 * size].reshape(2, size)


def _split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the low and the high 32 bits of 64-bit integers."""
    unsigned = values.astype(np.int64, copy=False).view(np.uint64)
    return unsigned & _LOW, unsigned >> _HALF


def _words(stream: Key, sample_ids: np.ndarray, blocks: np.ndarray) -> Iterator[tuple[slice, slice, np.ndarray, np.ndarray]]:
    """Yield (samples, blocks, even, odd) for all pairs of sample and block, in tiles. The words are valid until the next tile."""
    tile_blocks = min(_BLOCK, max(blocks.size, 1))
    tile_samples = max(1, min(_BLOCK // tile_blocks, sample_ids.size))
    scratch = _WordScratch(tile_samples * tile_blocks)
    sample_low, sample_high = _split(sample_ids)
    block_low, block_high = _split(blocks)
    for n in range(0, sample_ids.size, tile_samples):
        samples = slice(n, min(n + tile_samples, sample_ids.size))
        for b in range(0, blocks.size, tile_blocks):
            part = slice(b, min(b + tile_blocks, blocks.size))
            shape = (samples.stop - samples.start, part.stop - part.start)
            even, odd = scratch.state(shape[0] * shape[1])
            even[0].reshape(shape)[:], odd[0].reshape(shape)[:] = block_low[part], block_high[part]
            even[1].reshape(shape)[:] = sample_low[samples, None]
            odd[1].reshape(shape)[:] = sample_high[samples, None]
            even, odd = scratch.rounds(stream, even, odd)
            yield samples, part, even.reshape(2, *shape), odd.reshape(2, *shape)


def _blocks(indices: range | NDArray[np.integer]) -> tuple[np.ndarray, slice | np.ndarray]:
    """Return the numbers of the four-word blocks that cover `indices`, and the positions of the indices in the blocks' words."""
    if isinstance(indices, range) and indices.step == 1 and len(indices):
        first = indices.start // 4
        return np.arange(first, (indices.stop - 1) // 4 + 1), slice(indices.start - 4 * first, indices.stop - 4 * first)
    wanted = np.asarray(indices, np.int64)
    blocks, position = np.unique(wanted >> 2, return_inverse=True)
    return blocks, position.reshape(-1) * 4 + (wanted & 3)


def words(stream: Key, sample_ids: ArrayLike, indices: range | NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return uniform 32-bit words (N, len(indices)) for `sample_ids` (N,) int64 and `indices` (a range or a 1-D array)."""
    ids = np.asarray(sample_ids, np.int64)
    blocks, where = _blocks(indices)
    out = np.empty((ids.size, blocks.size, 4), np.uint32)
    for samples, part, even, odd in _words(stream, ids, blocks):
        tile = out[samples, part]
        tile[..., 0], tile[..., 1], tile[..., 2], tile[..., 3] = even[0], odd[0], even[1], odd[1]
    return out.reshape(ids.size, 4 * blocks.size)[:, where]


def uniform(
    stream: Key, sample_ids: ArrayLike, indices: range | NDArray[np.integer], dtype: DTypeLike = np.float64
) -> np.ndarray:
    """Return uniform numbers in [0, 1), (N, len(indices)): float64, multiples of 2**-32, or float32, multiples of 2**-24."""
    drawn = words(stream, sample_ids, indices)
    if np.dtype(dtype) == np.float32:
        return np.asarray((drawn >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24))
    return np.asarray(drawn * 2.0**-32)


def keep_mask(
    stream: Key, sample_ids: ArrayLike, indices: range | NDArray[np.integer], rate: float, out: np.ndarray | None = None
) -> NDArray[np.bool_]:
    """Return a mask (N, len(indices)) whose elements are True with probability 1 - rate.

    Element [n, j] depends only on (stream, sample_ids[n], indices[j], rate). The rate is exact to 2**-32.

    Args:
        out: bool array that receives the mask; default: a new array.
    """
    ids = np.asarray(sample_ids, np.int64)
    blocks, where = _blocks(indices)
    threshold = np.uint64(min(round(rate * 2**32), 2**32 - 1))
    mask = np.empty((ids.size, blocks.size, 4), np.bool_)
    for samples, part, even, odd in _words(stream, ids, blocks):
        tile = mask[samples, part]
        for word, values in enumerate((even[0], odd[0], even[1], odd[1])):
            np.greater_equal(values, threshold, out=tile[..., word])
    chosen = mask.reshape(ids.size, 4 * blocks.size)[:, where]
    if out is None:
        return chosen
    out[...] = chosen
    return out
