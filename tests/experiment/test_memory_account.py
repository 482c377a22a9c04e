"""The account of a run's memory: over all ranks, in words, and in the metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hpctrain.backend.backend import make_backend
from hpctrain.backend.mirrors import PinnedBytes
from hpctrain.experiment import memory_account
from hpctrain.experiment.memory_account import PeakMemory
from hpctrain.launch.process_memory import resident_bytes
from hpctrain.virtual.run import run_virtual
from tests.support.heard import Heard

PEAK = PeakMemory(612_345_678, 3, 600_000_000.0)


def _of_ranks(resident: list[int], devices: list[int | None]) -> list[PeakMemory]:
    """Every rank's account, where ranks have peaks of their own, which those of one process have not."""

    def one(comm: Any) -> PeakMemory:
        device = devices[comm.rank]
        pinned = None if device is None else PinnedBytes(2 * device, 1)
        used = SimpleNamespace(kernels=SimpleNamespace(used_bytes=lambda: device, pinned_bytes=lambda: pinned))
        own = SimpleNamespace(
            size=comm.size, allgather_object=lambda mine: comm.allgather_object((resident[comm.rank], *mine[1:]))
        )
        return memory_account.over_ranks(own, used)  # type: ignore[arg-type]

    return run_virtual(len(resident), one)


def test_the_rank_that_held_most_counts_and_every_rank_knows_it() -> None:
    assert _of_ranks([10, 40, 40, 30], [None] * 4) == [PeakMemory(40, 1, 30.0)] * 4


def test_memory_of_gpus_is_that_of_the_fullest() -> None:
    assert _of_ranks([10, 20], [5, 7]) == [PeakMemory(20, 1, 15.0, 7, PinnedBytes(14, 1))] * 2


def test_pinned_memory_has_a_line_and_records() -> None:
    pinned = PinnedBytes(3_000_000, 12_345_678)
    assert memory_account.pinned_line(pinned) == "pinned memory of a rank 15.3 MB: messages 3.0 MB, images 12.3 MB"
    values = memory_account.facts(PeakMemory(20, 1, 15.0, 7, pinned), 5)
    assert (values["device_bytes"], values["pinned_message_bytes"], values["pinned_image_bytes"]) == (7, 3_000_000, 12_345_678)


def test_a_run_says_and_records_the_peak_of_its_process() -> None:
    heard = Heard()
    before = resident_bytes()
    run_virtual(1, lambda comm: memory_account.finish(comm, make_backend("numpy"), heard, (20, 26)))
    ((kind, values),) = heard.records
    assert kind == "memory"
    assert (values["step"], values["rank"], "device_bytes" in values) == (26, 0, False)
    assert values["peak_bytes"] == values["mean_bytes"] >= before
    assert heard.lines == [f"peak memory {values['peak_bytes'] / 1e6:,.0f} MB"]


def test_a_job_that_trained_nothing_has_no_account() -> None:
    heard = Heard()
    run_virtual(1, lambda comm: memory_account.finish(comm, make_backend("numpy"), heard, (26, 26)))
    assert not heard.records
    assert not heard.lines


def test_the_line_names_the_rank_where_there_are_several() -> None:
    assert memory_account.line(PEAK, 1) == "peak memory 612 MB"
    assert memory_account.line(PEAK, 4) == "peak memory 612 MB on rank 3, 600 MB in the mean"
    longest = memory_account.line(PeakMemory(812_345_678_900, 16_383, 798e9, 139e9), 16_384)
    assert longest == "peak memory 812,346 MB on rank 16383, 798,000 MB in the mean; 139,000 MB of a GPU"
    assert len(longest) <= 90


def test_the_facts_have_memory_of_gpus_only_where_there_are_some() -> None:
    facts = {"step": 9, "peak_bytes": 612_345_678, "rank": 3, "mean_bytes": 600_000_000.0}
    assert memory_account.facts(PEAK, 9) == facts
    assert memory_account.facts(PeakMemory(612_345_678, 3, 600_000_000.0, 5), 9) == facts | {"device_bytes": 5}
