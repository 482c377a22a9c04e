"""The emulated device in tests: its kernels are built before the first test, so that no test starts a compiler.

A test asks for the fixture `emulated_device` (a factory of devices by seed) or `cuda_kernels` (a factory of kernel sets). Where
there is no g++ it is skipped, but fails in continuous integration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import Device, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.core.errors import BackendError, DivergedError
from hpctrain_testing.emulator import kernels
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.emulator.memory import EmulatedDeviceError

#: a source of tests alone
PLANTED = Path(__file__).parents[1] / "emulator" / "sources" / "planted.cu"
#: its text with each of the ways to switch between threads
PLANTED_TEXTS = {
    "registers": sources.text(PLANTED.stem, PLANTED.parent),
    "ucontext": f"#define CPU_UCONTEXT\n{sources.text(PLANTED.stem, PLANTED.parent)}",
}

#: texts of a kernel `add`, which adds 1 or 10 to the first element
ADDING_TEXTS = tuple(
    f"""#include "cuda_on_cpu.h"
extern "C" __global__ void add(float* x) {{ if (!blockIdx.x && !threadIdx.x) x[0] += {number}; }}
EXPORT(add)
"""
    for number in ("1.0f", "10.0f")
)

EmulatedDeviceFactory = Callable[..., EmulatedDevice]
CudaKernelsFactory = Callable[..., CudaKernelSet]


def kernels_on(device: Device, precision: Precision = "float64", *, graphs: bool = True) -> CudaKernelSet:
    """The cuda set on a device."""
    return CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision, graphs=graphs))


def assert_waits_matter(
    make: EmulatedDeviceFactory,
    results: Callable[[Callable[[int], CudaKernelSet]], Mapping[str, np.ndarray]],
    counts: Callable[[str], bool] = lambda wait: True,
) -> int:
    """Require that each place in the code that waits is needed, and return the number of these places.

    If the first rank leaves out the wait, the results must differ or an error must come, for some order of the work.

    Args:
        results: results of a program, from the kernel set of each of its ranks.
        counts: whether a wait is of interest, by its description.
    """
    first: list[EmulatedDevice] = []

    def kernels(rank: int, ignored_wait: int | None = None, seed: int = 1) -> CudaKernelSet:
        device = make(seed + rank, ignored_wait=ignored_wait if rank == 0 else None)
        first.extend([device] if rank == 0 else [])
        return kernels_on(device)

    expected = results(kernels)
    places: dict[str, list[int]] = {}
    for number, wait in enumerate(first[0].waits):
        if counts(wait):
            places.setdefault(wait.partition(" waits for ")[0] + wait.rpartition(" at ")[2], []).append(number)

    def fails(seed: int, number: int) -> bool:
        try:
            found = results(partial(kernels, ignored_wait=number, seed=seed))
        except (EmulatedDeviceError, DivergedError, ValueError):  # the device, the step's own look, a count that is NaN
            return True
        return any(not np.array_equal(found[name], values) for name, values in expected.items())

    for place, numbers in places.items():
        trials = ((seed, number) for seed in range(1, 5) for number in numbers[:: max(1, len(numbers) // 12)])
        assert any(fails(seed, number) for seed, number in trials), place
    return len(places)


class EmulatedDevices:
    """A plugin of pytest: the fixtures, and the build of all kernels where a test will ask for them."""

    def __init__(self) -> None:
        self._missing = ""
        self._error = ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Between collection and the first test, where no test is watched; see `tests.support.marking`."""
        if any("emulated_device" in getattr(item, "fixturenames", ()) for item in session.items):
            self._missing = "" if kernels.compiler() else "there is no g++ to build the kernels of the emulated device"
            try:
                prepare()
            except BackendError as error:
                self._error = str(error)

    def require(self) -> None:
        """Skip or fail the test where the kernels could not be built."""
        if self._missing and os.environ.get("CI") != "true":
            pytest.skip(self._missing)
        if self._error:
            pytest.fail(self._error, pytrace=False)

    @pytest.fixture
    def emulated_device(self) -> Iterator[EmulatedDeviceFactory]:
        """EmulatedDevice(seed). At the end of the test its memory is checked."""
        self.require()
        devices = []

        def make(*arguments: Any, **options: Any) -> EmulatedDevice:
            devices.append(EmulatedDevice(*arguments, **options))
            return devices[-1]

        yield make
        for device in devices:
            device.run_all()

    @pytest.fixture
    def cuda_kernels(self, emulated_device: EmulatedDeviceFactory) -> CudaKernelsFactory:
        """The cuda set on a new device: cuda_kernels(precision="float64", seed=0); its `runtime` has the device."""

        def make(precision: Precision = "float64", seed: int = 0) -> CudaKernelSet:
            return kernels_on(emulated_device(seed), precision)

        return make


def prepare() -> None:
    """Build all sources of the package and of the tests."""
    kernels.prepare([*map(sources.text, sources.names()), *PLANTED_TEXTS.values(), *ADDING_TEXTS])
