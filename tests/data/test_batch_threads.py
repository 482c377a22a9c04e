"""Threads that share a batch out: each sample once, whatever their number, and errors when nobody works any more."""

from __future__ import annotations

import gc
import threading
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from hpctrain.data.batch_threads import CHUNK_BYTES, BatchThreads, default_threads


@hypothesis.given(st.integers(1, 5), st.integers(0, 70), st.sampled_from([0, 1, CHUNK_BYTES // 7, CHUNK_BYTES, 9 * CHUNK_BYTES]))
@hypothesis.settings(deadline=None, max_examples=40)
def test_each_sample_is_made_once(threads: int, samples: int, sample_bytes: int) -> None:
    made: list[int] = []
    seen: set[int] = set()

    def work(thread: int, first: int, last: int) -> None:
        assert 0 <= thread < threads
        assert first < last
        seen.add(thread)
        made.extend(range(first, last))

    shared = BatchThreads(threads)
    for _ in range(2):
        made.clear()
        shared.run(samples, sample_bytes, work)
        assert sorted(made) == list(range(samples))


def test_threads_work_beside_each_other_and_end_with_the_object() -> None:
    gc.collect()
    shared, together = BatchThreads(3), threading.Barrier(3, timeout=30)
    others: set[threading.Thread] = set()

    def work(thread: int, first: int, last: int) -> None:
        others.add(threading.current_thread())
        together.wait()

    shared.run(3, CHUNK_BYTES, work)
    others.remove(threading.current_thread())
    assert len(others) == 2
    del shared
    gc.collect()
    for thread in others:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize("broken", [0, 5])
def test_an_error_is_raised_once_nobody_works_any_more(broken: int) -> None:
    at_work: list[int] = []

    def work(thread: int, first: int, last: int) -> None:
        at_work.append(thread)
        try:
            time.sleep(0.01)
            if first <= broken < last:
                raise OSError("a sample cannot be read")
        finally:
            at_work.remove(thread)

    shared = BatchThreads(3)
    with pytest.raises(OSError, match="a sample cannot be read"):
        shared.run(9, CHUNK_BYTES, work)
    assert not at_work
    shared.run(9, CHUNK_BYTES, lambda thread, first, last: None)


def test_most_cores_are_left_to_the_network() -> None:
    assert [default_threads(cores) for cores in (1, 2, 4, 7, 8, 16, 128)] == [1, 1, 1, 1, 2, 4, 8]
