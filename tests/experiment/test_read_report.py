"""The lines on where the samples of a run were read; whole runs are in test_data_cache.py."""

from __future__ import annotations

from hpctrain.data.read_counts import Origin, ReadCounts
from hpctrain.experiment.read_report import read_lines


def test_each_origin_that_gave_samples_is_told_within_80_columns() -> None:
    counts = ReadCounts()
    assert read_lines(counts.values()) == read_lines({}) == []
    counts.add(Origin.FILE, 1200, 3_000_000_000)
    assert read_lines(counts.values()) == ["samples read: 1,200 from the data files (3 GB)"]
    counts.add(Origin.LOCAL, 5, 10_000_000)
    counts.add(Origin.NODES, 6, 10_000_000)
    counts.add(Origin.MEMORY, 7, 10_000_000)
    assert read_lines(counts.values()) == [
        "samples read: 1,200 from the data files (3 GB),",
        "  5 from the nodes' local copies (0.01 GB), 7 from memory of the nodes (0.01 GB),",
        "  6 from other nodes (0.01 GB)",
    ]
