"""Trainings on stored pixels, of which the emulated device makes its input: those of images, bit by bit, and fewer bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.pixel_batch import PixelBatch
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.data import format as data_format
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.optim.optimizers.sgd import Sgd
from tests.support import nets
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.training import Task, replica_of

pytestmark = pytest.mark.slow

SHAPE, SAMPLES, BATCH = (9, 7, 3), 21, 8
SPECS = {
    "windows": [("pad_crop", {"padding": 2}), ("flip", {}), ("random_erasing", {"probability": 1.0})],
    "a resize": [("random_resized_crop", {"size": 7}), ("flip", {}), ("pad_crop", {"padding": 1})],
    "pixels of its own": [("trivial_augment_wide", {}), ("flip", {}), ("pad_crop", {"padding": 1})],
}


@dataclass
class _Training:
    """Parameters and losses at its end, and what each step has done on the device."""

    values: dict[str, np.ndarray]
    uploaded: list[int]
    pixels: list[int]
    waits: list[set[str]]
    late: list[str]


@pytest.fixture
def file(tmp_path: Path) -> ImageFile:
    """21 images at random."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8)
    path = tmp_path / "images.h5"
    data_format.write(path, SAMPLES, SHAPE, [*"abcde"], [(images, random.integers(0, 5, SAMPLES))])
    return ImageFile.open(path)


def _kernels(device: EmulatedDevice, precision: Precision = "float64") -> CudaKernelSet:
    return CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision))


def _train(file: ImageFile, specs: str, kernels: KernelSet, dtype: str, *, leaves_pixels: bool, epochs: int = 2) -> _Training:
    """Batches of 8, 8 and 5 samples in two micro-batches each; behind the first epoch memory is sealed."""
    pipeline = Pipeline(SPECS[specs], 3, file.mean, file.std, parameter_dtype(dtype))
    task = Task(
        nets.residual if specs == "a resize" else partial(nets.plain, dropout=0.3),
        kernels,
        partial(Sgd, momentum=0.9),
        image_shape=pipeline.output_shape(*SHAPE),
        dtype=dtype,
        batch=BATCH,
        micro_batches=2,
    )
    comm = SingleCommunicator()
    replica = replica_of(task, comm, ProgressEngine(rank=0, deadline_seconds=60, abort=comm.abort), Sharded)
    loader = Loader(file, Sampler(SAMPLES, BATCH, 5), pipeline, **replica.place, leaves_pixels=leaves_pixels)
    device = kernels.runtime.device if isinstance(kernels, CudaKernelSet) else EmulatedDevice()
    assert isinstance(device, EmulatedDevice)
    done, losses = _Training({}, [], [], [], device.counters.late_allocations), []
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            assert isinstance(batch.x, PixelBatch) == leaves_pixels
            before = device.counters.uploaded_bytes
            totals = replica.step(batch, task.lr)
            losses += [] if totals is None else [totals.loss]
            done.uploaded.append(device.counters.uploaded_bytes - before)
            done.pixels.append(batch.x.pixels.nbytes if isinstance(batch.x, PixelBatch) else batch.x.nbytes)
            done.waits.append({function for _, function in device.counters.synchronisations})
            device.counters.synchronisations.clear()
        device.seal()
    last = replica.settle()
    assert last is not None
    replica.drain()
    done.values = {
        "losses": np.array([*losses, last.loss]),
        **{name: np.array(kernels.arithmetic.to_host(p.data)) for name, p in replica.network.parameters.items()},
    }
    device.run_all()
    return done


@pytest.mark.sample(3)
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_training_on_pixels_is_that_on_images(
    file: ImageFile, emulated_device: EmulatedDeviceFactory, specs: str, dtype: Precision
) -> None:
    images, pixels, others = (
        _train(file, specs, _kernels(emulated_device(seed), dtype), dtype, leaves_pixels=leaves)
        for seed, leaves in ((0, False), (0, True), (4, True))
    )
    for name, values in images.values.items():
        np.testing.assert_array_equal(pixels.values[name], values, err_msg=name)
        np.testing.assert_array_equal(others.values[name], values, err_msg=name)
    if dtype == "float64":
        reference = _train(file, specs, NumpyKernelSet(), dtype, leaves_pixels=False)
        for name, values in reference.values.items():
            np.testing.assert_allclose(pixels.values[name], values, rtol=1e-10, atol=1e-10, err_msg=name)


def test_kernels_of_the_host_take_pixels_for_images(file: ImageFile) -> None:
    images, pixels = (
        _train(file, "windows", NumpyKernelSet(), "float64", leaves_pixels=leaves, epochs=1) for leaves in (False, True)
    )
    for name, values in images.values.items():
        np.testing.assert_array_equal(pixels.values[name], values, err_msg=name)


def test_steps_send_pixels_and_allocate_nothing(file: ImageFile, emulated_device: EmulatedDeviceFactory) -> None:
    """Beside them only what was sent with images as well, and some numbers for each image and micro-batch."""
    images, pixels = (
        _train(file, "windows", _kernels(emulated_device(1), "float32"), "float32", leaves_pixels=leaves)
        for leaves in (False, True)
    )
    assert [4 * size for size in pixels.pixels] == images.pixels
    for step in range(1, 6):
        samples = (8, 8, 5)[step % 3]
        assert images.uploaded[step] - images.pixels[step] < 2000
        more = pixels.uploaded[step] - pixels.pixels[step] - (images.uploaded[step] - images.pixels[step])
        assert (
            44 * samples <= more <= 44 * samples + 2 * 16 * 4
        )  # two micro-batches of four parts, each to a multiple of 16 bytes
    assert pixels.late == images.late == []
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for function in set().union(*pixels.waits[2:]):
        assert f"`{'.'.join(function.split('.')[-2:])}`" in page


def test_bits_do_not_depend_on_graphs(file: ImageFile, emulated_device: EmulatedDeviceFactory) -> None:
    def kernels(*, graphs: bool) -> CudaKernelSet:
        captured = _kernels(emulated_device(2))
        return captured if graphs else CudaKernelSet(replace(captured.runtime, graphs=False))

    with_graphs, without = (
        _train(file, "windows", kernels(graphs=graphs), "float64", leaves_pixels=True) for graphs in (True, False)
    )
    for name, values in without.values.items():
        np.testing.assert_array_equal(with_graphs.values[name], values, err_msg=name)
