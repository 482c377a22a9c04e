"""The machine of a measurement, and the memory of this process."""

from __future__ import annotations

import json
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
    block = np.ones(64 << 17)  # 64 MiB: more than malloc ever takes from memory that was freed before and is still resident
    held = resident_bytes()
    assert held >= before + block.nbytes // 2
    del block
    assert peak_resident_bytes() >= max(held - (8 << 20), peak_before)
