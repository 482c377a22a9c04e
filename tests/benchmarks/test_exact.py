"""The table of the price of one order of sums: ratios of the same round, bytes over the ordinary step's."""

from __future__ import annotations

from benchmarks.exact import markdown
from benchmarks.overlap import VARIANTS


def _turns(*seconds: float, sent: float) -> list[dict[str, float]]:
    return [{"step_seconds": one, "payload_bytes": sent} for one in seconds]


def test_a_row_for_each_number_of_shards() -> None:
    rounds = {
        "sharded": _turns(1.0, 2.0, 4.0, sent=100),
        "micro-2": _turns(1.1, 2.2, 4.4, sent=100),
        "exact-4": _turns(1.21, 2.42, 4.84, sent=101),
        "micro-4": _turns(1.2, 2.4, 4.8, sent=100),
        "exact-8": _turns(1.2, 2.4, 4.8, sent=150),
    }
    assert set(rounds) <= set(VARIANTS)
    rounds["bare gradients"] = [{"seconds": 0.1}] * 3  # a run times MPI's own calls beside the steps
    rows = markdown({"rate": "1gbit", "rounds": rounds}).splitlines()
    assert rows[0] == "1gbit, 3 rounds"
    assert rows[-2] == "| 4 | 1.210 [1.210, 1.210] | 1.100 [1.100, 1.100] | 1.100 [1.100, 1.100] | 1.010 |"
    assert rows[-1] == "| 8 | 1.200 [1.200, 1.200] | 1.200 [1.200, 1.200] | 1.000 [1.000, 1.000] | 1.500 |"
