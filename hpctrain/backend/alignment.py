"""The alignment of buffers that kernels read and write."""

from __future__ import annotations

ALIGNMENT_BYTES = 64  # a cache line, and the width of an AVX-512 register


def aligned(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The size, rounded up to a multiple of the alignment; by default that of a CPU."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes
