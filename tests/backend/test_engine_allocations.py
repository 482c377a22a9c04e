"""A step allocates nothing that grows with the batch once two steps have run: everything lies in the planned arena."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.operators import Array, KernelSet
from hpctrain.bench.engine_step import EngineStep, workload

SMALL, LARGE = 4, 32
PIXELS = 28
# an activation of one more image of the first stage is 28 * 28 * 16 floats; what may remain are the loss's rows of 10 classes
PER_IMAGE_BYTES = PIXELS * PIXELS * 16 * 4
ALLOWED_PER_IMAGE_BYTES = 2_000


@pytest.fixture(params=["numpy", "onednn"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    reason = available() if name == "onednn" else None
    if reason is not None:
        pytest.skip(reason)
    return name


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def _warm(backend: str, batch: int) -> EngineStep:
    step = EngineStep(workload("small", batch, PIXELS), backend)
    for _ in range(2):
        step.run()
    return step


def _peak_bytes(step: EngineStep) -> int:
    """The most that Python and NumPy held at once during a step, above what they held before it."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    step.run()
    return tracemalloc.get_traced_memory()[1] - before


@pytest.mark.slow
def test_no_array_of_a_step_grows_with_the_batch(backend: str, traced: None) -> None:
    small, large = (_peak_bytes(_warm(backend, batch)) for batch in (SMALL, LARGE))
    grown = (large - small) / (LARGE - SMALL)
    assert grown < ALLOWED_PER_IMAGE_BYTES, f"{grown:.0f} bytes an image"


def test_the_measure_sees_an_array_that_grows(traced: None) -> None:
    """The bound is far below one activation, and arrays are traced."""
    step = _warm("numpy", LARGE)
    run = step.run

    class Leaky:
        def run(self) -> float:
            copy = np.ones(LARGE * PER_IMAGE_BYTES, np.uint8)
            assert copy.size
            return run()

    assert _peak_bytes(Leaky()) > LARGE * ALLOWED_PER_IMAGE_BYTES  # type: ignore[arg-type]


@pytest.mark.slow
def test_steps_keep_nothing(backend: str, traced: None) -> None:
    step = _warm(backend, LARGE)
    step.run()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(10):
        step.run()
    gc.collect()
    assert tracemalloc.get_traced_memory()[0] - before < 2_000


class _Heap(ctypes.Structure):
    """struct mallinfo2 of the C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def _native_bytes() -> int:
    """Held through malloc by anything in this process, in arenas and in mappings of their own."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the C library does not tell what malloc holds")
    libc.mallinfo2.restype = _Heap
    heap = libc.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


@pytest.mark.slow
def test_native_code_keeps_nothing(backend: str) -> None:
    """What the kernels allocate outside of Python's sight is given back too."""
    step = _warm(backend, LARGE)
    gc.collect()
    before = _native_bytes()
    for _ in range(10):
        step.run()
    gc.collect()
    assert _native_bytes() - before < LARGE * PER_IMAGE_BYTES // 4


@pytest.mark.parametrize("kind", [NumpyKernelSet, OnednnKernelSet])
def test_set_up_allocates_and_steps_do_not(kind: type[KernelSet], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel set is asked for memory when programs are made, never by a step."""
    if kind is OnednnKernelSet and available() is not None:
        pytest.skip(str(available()))
    asked: list[int] = []
    allocate = kind.allocate

    def counted(self: KernelSet, size_bytes: int) -> Array:
        asked.append(size_bytes)
        return allocate(self, size_bytes)

    monkeypatch.setattr(kind, "allocate", counted)
    step = EngineStep(workload("small", SMALL, PIXELS), kind.name)
    assert max(asked) >= step.program.activation_bytes
    count = len(asked)
    for _ in range(3):
        step.run()
    assert len(asked) == count
