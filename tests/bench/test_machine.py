"""The machine of a measurement."""

from __future__ import annotations

import json
import os

import numpy as np

from hpctrain.bench.machine import machine


def test_the_machine_is_told_as_json() -> None:
    facts = machine()
    assert json.loads(json.dumps(facts)) == facts
    assert 1 <= facts["cores"] <= facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["numpy"] == np.__version__
