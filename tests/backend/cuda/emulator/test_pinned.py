"""Pinned memory: not zeroed, and known to the device that gave it."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.emulator.pinned import PinnedMemory


def test_memory_is_not_zeroed() -> None:
    assert np.isnan(PinnedMemory().allocate(40).view(np.float32)).all()


def test_views_of_pinned_memory_are_pinned() -> None:
    pinned = PinnedMemory()
    memory = pinned.allocate(48)
    view = memory[8:40].view(np.float64).reshape(2, 2)
    raw = pinned.require(view)
    raw[:] = 0
    assert (view == 0).all()
    assert (memory[:8] == 0xFF).all()
    assert pinned.require(np.zeros((3, 0))).size == 0


def test_other_memory_is_refused() -> None:
    pinned = PinnedMemory()
    memory = pinned.allocate(48)
    with pytest.raises(ValueError, match="takes pinned memory"):
        pinned.require(np.zeros(3))
    with pytest.raises(ValueError, match="takes contiguous memory"):
        pinned.require(memory[::2])
    with pytest.raises(ValueError, match="takes pinned memory"):
        PinnedMemory().require(memory)
    address = memory.ctypes.data
    del memory
    assert address not in pinned._ends
