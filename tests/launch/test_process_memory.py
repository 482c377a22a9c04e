"""The memory of this process."""

from __future__ import annotations

import mmap

from hpctrain.launch.process_memory import peak_resident_bytes, resident_bytes


def test_memory_that_was_resident_is_remembered() -> None:
    before, peak_before = resident_bytes(), peak_resident_bytes()
    # Pages of its own: malloc may give memory that was freed before and is still resident.
    with mmap.mmap(-1, 64 << 20) as block:
        for _ in range(64):
            block.write(b"1" * (1 << 20))
        held = resident_bytes()
        assert held >= before + (32 << 20)
    assert peak_resident_bytes() >= max(held - (8 << 20), peak_before)
