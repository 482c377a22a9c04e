"""The machine of a measurement, and the memory of this process."""

from __future__ import annotations

import json
import mmap
import os

import numpy as np

from hpctrain.bench.machine import machine, peak_resident_bytes, resident_bytes


def test_the_machine_is_told_as_json() -> None:
    facts = machine()
    assert json.loads(json.dumps(facts)) == facts
    assert 1 <= facts["cores"] <= facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["numpy"] == np.__version__


def test_memory_that_was_resident_is_remembered() -> None:
    before, peak_before = resident_bytes(), peak_resident_bytes()
    # Pages of its own: malloc may give memory that was freed before and is still resident.
    with mmap.mmap(-1, 64 << 20) as block:
        for _ in range(64):
            block.write(b"1" * (1 << 20))
        held = resident_bytes()
        assert held >= before + (32 << 20)
    assert peak_resident_bytes() >= max(held - (8 << 20), peak_before)
