"""The arithmetic service of the oneDNN set: its equations, its threads, and the absence of a second pool of threads in a step."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from hpctrain.backend.arithmetic import Corrections, MomentRule, UpdateRun
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.onednn import arithmetic
from hpctrain.backend.onednn.arithmetic import OnednnArithmetic, Team
from hpctrain.backend.onednn.binding import Primitive
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.comm.waiting import ProgressThread

SIZE = 700
RULE = MomentRule(0.9, 0.75, 1e-3)
THREADS = st.integers(1, 3)


@contextmanager
def openmp_threads(count: int, **constants: int) -> Iterator[None]:
    """Set the number of OpenMP's threads, and constants of the module."""
    with threadpool_limits(limits=count, user_api="openmp"), pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(arithmetic, name, value)
        yield


def values(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@st.composite
def runs(draw: st.DrawFn) -> list[UpdateRun]:
    """Draw adjacent runs that cover the elements [3, 600), each with its scale and decay, and one offset of the state."""
    cuts = sorted({3, 600, *draw(st.lists(st.integers(4, 599), max_size=3))})
    offset = draw(st.integers(-3, 90))
    numbers = st.tuples(st.sampled_from([1.0, 0.25]), st.sampled_from([0.0, 0.01]))
    return [UpdateRun(low, high, *draw(numbers), offset) for low, high in pairwise(cuts)]


def updated(service: HostArithmetic, dtype: str, kind: str, through: Sequence[UpdateRun]) -> list[np.ndarray]:
    """Return the data, the gradient and the states after one update."""
    w, g, m = (values(seed).astype(dtype) for seed in range(3))
    v = values(3).astype(dtype) ** 2
    if kind in ("descent", "nesterov"):
        service.descent(w, g, m, factor=0.9, nesterov=kind == "nesterov").update(through, 0.1)
    elif kind == "plain":
        service.descent(w, g, m[:0], factor=0.0, nesterov=False).update(through, 0.1)
    elif kind == "moments":
        service.moment_descent(w, g, m, v, RULE).update(through, Corrections(1.5, 2.5), 0.1)
    elif kind == "decayed gradient":
        service.moment_descent(w, g, m, v, replace(RULE, decoupled=False)).update(through, Corrections(1.5, 2.5), 0.1)
    else:
        service.moment_descent(w, g, m, v, RULE).direct(through, Corrections(1.5, 2.5))
    return [w, g, m, v]


KINDS = ["descent", "nesterov", "plain", "moments", "decayed gradient", "direction"]


@settings(deadline=None, max_examples=40)
@given(kind=st.sampled_from(KINDS), through=runs(), threads=THREADS, chunk=st.sampled_from([64, 100, 1 << 18]))
def test_updates_are_those_of_the_host(
    onednn: OnednnKernelSet, kind: str, through: list[UpdateRun], threads: int, chunk: int
) -> None:
    """Finds a wrong operand, factor or offset of a pass, and elements at the ends of runs and chunks that are left out."""
    with openmp_threads(threads, CHUNK=chunk):
        mine = updated(OnednnArithmetic(onednn._engine), "float32", kind, through)
    for array, wanted in zip(mine, updated(HostArithmetic(), "float64", kind, through), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=2e-6, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(kind=st.sampled_from(KINDS), threads=THREADS, chunk=st.sampled_from([50, 64, 1 << 18]), cuts=st.sets(st.integers(1, 599)))
def test_neither_threads_nor_cuts_change_a_bit(
    onednn: OnednnKernelSet, kind: str, threads: int, chunk: int, cuts: set[int]
) -> None:
    """Finds rounding that depends on a range's length, for example in remainders of vectors."""
    with openmp_threads(1):
        expected = updated(OnednnArithmetic(onednn._engine), "float32", kind, [UpdateRun(0, 600, 0.25, 0.01)])
    parts = [UpdateRun(low, high, 0.25, 0.01) for low, high in pairwise(sorted({0, 600, *cuts}))]
    with openmp_threads(threads, CHUNK=chunk):
        mine = updated(OnednnArithmetic(onednn._engine), "float32", kind, parts)
    assert [array.tobytes() for array in mine] == [array.tobytes() for array in expected]


@settings(deadline=None, max_examples=25)
@given(threads=THREADS, shape=st.tuples(st.integers(0, 5), st.integers(1, 40)), dtype=st.sampled_from(["float32", "float64"]))
def test_shared_work_is_that_of_the_host(onednn: OnednnKernelSet, threads: int, shape: tuple[int, int], dtype: str) -> None:
    """Finds ranges that overlap or leave out rows."""
    first, second = (values(seed, shape[0] * shape[1]).reshape(shape).astype(dtype) for seed in range(2))
    box = ((0, shape[0]), (1, shape[1]))
    spoiled = second.copy()
    spoiled.reshape(-1)[-1:] = np.nan

    def outcome(service: HostArithmetic) -> list[Any]:
        arrays = [first.copy() for _ in range(7)]
        service.add(arrays[0], second)
        service.subtract(arrays[1], second.reshape(-1))
        service.copy(arrays[2], second)
        service.fill(arrays[3], 0.5)
        service.from_host(arrays[4], second.astype(np.float64))
        service.copy_box(arrays[5], box, second, box, accumulate=True)
        service.copy_box(arrays[6], box, second, box)
        finite = service.fetch_finite([first, spoiled, first[:0]]).result().tolist()
        return [
            *(array.tobytes() for array in arrays),
            finite,
            service.square_sums([first.reshape(-1), second.reshape(-1)]).tolist(),
        ]

    with openmp_threads(threads, GRAIN=1):
        mine = outcome(OnednnArithmetic(onednn._engine))
    assert mine == outcome(HostArithmetic())


def test_a_moving_average_stays_at_a_constant(onednn: OnednnKernelSet) -> None:
    """Finds an average computed as kept * target + (1 - kept) * source, whose rounding changes equal weights."""
    service = OnednnArithmetic(onednn._engine)
    target, source = values(0), values(1)
    expected = 0.9 * target.astype(np.float64) + 0.1 * source
    service.average_into(target, source, 0.9)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)
    target[:] = source
    service.average_into(target, source, 0.9)
    np.testing.assert_array_equal(target, source)


def test_no_pass_runs_in_plain_loops(onednn: OnednnKernelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds a formula for which oneDNN has no generated code, only plain loops that are a hundred times slower."""
    names: list[str] = []
    make = Primitive.__init__

    def initialised(primitive: Primitive, *arguments: Any) -> None:
        make(primitive, *arguments)
        names.append(primitive.implementation)

    monkeypatch.setattr(Primitive, "__init__", initialised)
    service = OnednnArithmetic(onednn._engine)
    for kind in KINDS:
        updated(service, "float32", kind, [UpdateRun(0, 600, 0.5, 0.01)])
    service.average_into(values(0), values(1), 0.5)
    assert names
    assert all(name.startswith("jit") for name in names), names


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_team_covers_a_range_once_in_the_callers_context(onednn: OnednnKernelSet, threads: int) -> None:
    seen, workers = np.zeros(10, np.int64), set[int]()

    def work(start: int, stop: int) -> None:
        seen[start:stop] += 1
        workers.add(threading.get_native_id())
        assert np.geterr()["over"] == "raise"

    with openmp_threads(threads), np.errstate(over="raise"):
        Team(onednn._engine.library).share(10, work)
    assert seen.tolist() == [1] * 10
    assert len(workers) == threads


def test_a_team_raises_what_a_thread_raises(onednn: OnednnKernelSet) -> None:
    """Finds an exception in a callback that ctypes prints and drops."""

    def work(start: int, stop: int) -> None:
        if start:
            raise ValueError(f"from {start}")

    team = Team(onednn._engine.library)
    with openmp_threads(2), pytest.raises(ValueError, match="from 5"):
        team.share(10, work)


_SHORT_TEAM = """
from hpctrain.backend.onednn.arithmetic import Team
from hpctrain.backend.onednn.binding import Engine
ranges = []
Team(Engine().library).share(10, lambda start, stop: ranges.append((start, stop)))
print(ranges)
"""


@pytest.mark.job
@pytest.mark.parametrize("limit", ["OMP_THREAD_LIMIT", "OMP_DYNAMIC"])
def test_a_team_that_is_smaller_than_expected_leaves_nothing_out(limit: str) -> None:
    """Finds ranges for threads that OpenMP does not start."""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", limit: "1" if limit == "OMP_THREAD_LIMIT" else "true"}
    ended = subprocess.run([sys.executable, "-c", _SHORT_TEAM], env=environment, check=True, capture_output=True, text=True)
    ranges = sorted(json.loads(ended.stdout.replace("(", "[").replace(")", "]")))
    assert [ranges[0][0], ranges[-1][1]] == [0, 10]
    assert all(before[1] == after[0] for before, after in pairwise(ranges))


@given(m=st.integers(0, 9), k=st.integers(0, 9), n=st.integers(0, 9), flipped=st.booleans())
def test_products_are_those_of_the_host(onednn: OnednnKernelSet, m: int, k: int, n: int, flipped: bool) -> None:
    """Finds wrong strides of columns of a larger matrix, and products without terms that leave the target as it is."""
    whole, b = values(0, (k + 1) * (m + 5)).reshape(k + 1, m + 5), values(1, k * n).reshape(k, n)
    a = whole[:k, 2 : 2 + m].T if flipped else np.ascontiguousarray(whole[:k, 2 : 2 + m].T)
    mine, expected = np.full((m, n), np.nan, np.float32), np.zeros((m, n), np.float32)
    OnednnArithmetic(onednn._engine).multiply(a, b, mine)
    HostArithmetic().multiply(a, b, expected)
    np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.job
def test_no_second_pool_works_during_a_training() -> None:
    """Finds matrix products of NumPy in a step whose threads compete with OpenMP's for the cores (docs/adr/0033)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "tests.support.thread_pools"]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
    seconds = json.loads(ended.stdout)
    assert (seconds.pop("products of NumPy") > 0.01, len(seconds)) == (True, 5)  # a second pool is detected
    assert max(seconds.values()) < 0.001, seconds


def test_a_thread_that_moves_messages_computes_alone(onednn: OnednnKernelSet) -> None:
    """Finds a second team of OpenMP's threads, started by updates on the progress thread."""
    sizes: list[int] = []
    team = Team(onednn._engine.library)
    with openmp_threads(2):
        thread = ProgressThread(lambda: sizes.append(team.size), contextlib.nullcontext())
        with thread:
            while not sizes:
                pass
        thread.close()
        assert team.size == 2
    assert set(sizes) == {1}
