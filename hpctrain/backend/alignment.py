"""The alignment of every buffer that kernels read and write."""

from __future__ import annotations

ALIGNMENT_BYTES = 64  # a cache line, and the width of an AVX-512 register


def aligned(size_bytes: int) -> int:
    """The size, rounded up to a multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
