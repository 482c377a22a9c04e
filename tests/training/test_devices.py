"""Training on emulated devices, one or one a rank, and with split layers: the numbers of NumPy in float64, whatever is late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet, StepContext
from hpctrain.backend.pixels import PixelBatch
from hpctrain.backend.specs import parameter_dtype
from hpctrain.core.errors import BackendError
from hpctrain.data.image_file import ImageFile
from hpctrain.data.loader import Batch, Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.data.writer import write_data_file
from hpctrain.nn.layers import Layer
from hpctrain.nn.program import Program
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import Adamw, Lars, Sgd
from hpctrain.parallel.moves import moved, moved_back
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph
from hpctrain.training.replica import Replica, StrategyFactory
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support import nets
from tests.support.emulated import EmulatedDeviceFactory, assert_waits_matter, kernels_on
from tests.support.training import Result, Task, assert_same_training, batches, replica_of, train

WAYS: dict[str, tuple[type, dict[str, Any]]] = {
    "sharded": (Sharded, {"bucket_bytes": 2000}),
    "overlap": (Overlap, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 2000}),
    "priority": (Priority, {"slice_parameters": 400}),
}


def _task(**changes: Any) -> Task:
    """37 samples in batches of 8: uneven shares on 3 ranks, and a last batch that some ranks have nothing of."""
    optimizer = partial(Sgd, momentum=0.9, weight_decay=1e-3)
    return replace(Task(partial(nets.plain, dropout=0.3), NumpyKernelSet(), optimizer, micro_batches=1), **changes)


def assert_documented(functions: Iterable[str]) -> None:
    """docs/gpu.md names each function in which a step waits for its device."""
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for function in functions:
        assert f"`{'.'.join(function.split('.')[-2:])}`" in page, function


@pytest.mark.slow
def test_every_place_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """A training of two ranks, one of which leaves a wait of its transport out, ends otherwise for some order of the work."""
    task = _task(steps=3, plan=ParallelPlan(1, 2))

    def counts(wait: str) -> bool:  # the last one comes a step later than it must, see test_mirrors
        return ("CudaMirrors" in wait or "CudaTransit" in wait) and not wait.endswith(".mirror")

    places = assert_waits_matter(emulated_device, lambda kernels: trained(task, WAYS["sharded"], kernels)[0].parameters, counts)
    assert places == 3  # nothing is received that has not been sent something before


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "split"), [("sharded", False), ("sharded", True), ("bucketed", False), ("priority", False)])
def test_steps_allocate_nothing_and_wait_only_where_documented(
    strategy: str, split: bool, emulated_device: EmulatedDeviceFactory
) -> None:
    kind, options = WAYS[strategy]
    task = replace(task_of("residual", "mixed", 2, 1) if split else _task(), steps=9, samples=40)

    def program(comm: ThreadCommunicator) -> list[str]:
        device = emulated_device(comm.rank)
        of_rank = replace(task, kernels=kernels_on(device))
        planned_once = {} if strategy == "bucketed" else {"replan": False}
        replica = replica_of(of_rank, comm, virtual_engine(comm), kind, nominal_batch=8, **options, **planned_once)
        for step, batch in enumerate(batches(task, comm.rank, comm.size, replica.tiles)):
            replica.step(batch, task.lr)
            replica.settle()
            if step == 4:  # the second step is captured; as many mirrors as are ever on their way are there by now
                device.seal()
                device.counters.synchronisations.clear()
        replica.drain()
        assert_documented(function for _, function in device.counters.synchronisations)
        return device.counters.late_allocations

    assert run_virtual(2, program) == [[], []]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("sharded", 2), ("sharded", 3), ("priority", 3), ("bucketed", 2), ("overlap", 3)]
)
def test_bytes_over_the_bus_follow_from_the_schedule(strategy: str, ranks: int, emulated_device: EmulatedDeviceFactory) -> None:
    """In integers: each slice leaves, with the owned part of its parameters; sums of owned parts and the others' parts arrive."""
    task, (kind, options) = _task(steps=4), WAYS[strategy]

    def program(comm: ThreadCommunicator) -> None:
        device = emulated_device(comm.rank)
        kernels = kernels_on(device)
        replica = replica_of(
            replace(task, kernels=kernels), comm, virtual_engine(comm), kind, nominal_batch=task.batch, **options
        )
        for batch in batches(task, comm.rank, comm.size):
            replica.step(batch, task.lr)
        replica.drain()
        (averager,) = replica.averagers.values()
        assert averager.schedule is not None
        left = arrived = 0
        for piece in averager.schedule.slices:
            left += piece.size if strategy in ("bucketed", "overlap") else piece.size + piece.owned_size(comm.rank, comm.size)
            arrived += piece.size  # summed: all of it, or the owned part, and the others' parts once they are gathered
        mirrors = kernels.arithmetic.mirrors()
        assert mirrors is not None
        assert device.counters.downloaded_bytes["to the host"] == 8 * left * task.steps
        assert device.counters.uploaded_bytes["from the host"] == 8 * arrived * task.steps
        summed = strategy in ("bucketed", "overlap")  # in place; else gradients, sums of owned parts and parameters have mirrors
        assert mirrors.pinned_bytes == 8 * (arrived if summed else left + arrived)

    run_virtual(ranks, program)


def test_parameters_in_16_bits_are_refused(emulated_device: EmulatedDeviceFactory) -> None:
    task = _task()

    def program(comm: ThreadCommunicator) -> None:
        of_rank = replace(task, kernels=kernels_on(emulated_device(comm.rank)))
        with pytest.raises(BackendError, match=r"^wire_parameters is bfloat16, but backend cuda sends parameters unrounded"):
            replica_of(of_rank, comm, virtual_engine(comm), Sharded, wire_parameters="bfloat16")

    run_virtual(2, program)


SINGLE_RANK_MODELS: list[Callable[[], Layer]] = [partial(nets.plain, dropout=0.3), partial(nets.residual, synchronised=False)]
STRATEGIES: list[StrategyFactory] = [Blocking, Bucketed, Sharded, Priority, Lazy]

SINGLE_RANK_OPTIMIZERS: list[Callable[[], Optimizer]] = [
    partial(Sgd, momentum=0.9, weight_decay=1e-3),
    partial(Sgd, momentum=0.8, nesterov=True),
    partial(Sgd, momentum=0.0, clip_norm=0.5),
    partial(Lars, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.1),
]


def _single_rank_task(seed: int) -> Task:
    """All pairs of a model, a strategy and an optimiser within 40 seeds; one to three micro-batches."""
    model, optimizer = SINGLE_RANK_MODELS[seed % 2], SINGLE_RANK_OPTIMIZERS[seed // 2 % 4]
    return Task(model, NumpyKernelSet(), optimizer, steps=5, micro_batches=1 + seed % 3, smoothing=0.1)


def _replica(task: Task, kernels: KernelSet, strategy: StrategyFactory) -> Replica:
    return replica_of(replace(task, kernels=kernels), *lone_rank(), strategy)


def _train(
    task: Task, kernels: KernelSet, strategy: StrategyFactory, *, after_step: Callable[[int], None] = lambda step: None
) -> dict[str, np.ndarray]:
    """Parameters, running statistics, optimiser state and the steps' losses, by name."""
    replica = _replica(task, kernels, strategy)
    losses = []
    for step, batch in enumerate(batches(task, 0, 1)):
        totals = replica.step(batch, task.lr)
        losses += [] if totals is None else [(totals.loss, totals.top1, totals.top5)]
        after_step(step)
    last = replica.settle()
    assert last is not None
    replica.drain()
    network, to_host = replica.network, kernels.arithmetic.to_host
    (averager,) = replica.averagers.values()
    return {
        "losses": np.array([*losses, (last.loss, last.top1, last.top5)]),
        **{name: np.array(to_host(parameter.data)) for name, parameter in network.parameters.items()},
        **{name: view.copy() for name, view in network.statistics.views.items()},
        **{
            f"{state} of {name}": values.copy()
            for name, parameter in network.parameters.items()
            for state, values in averager.full_state(parameter).items()
        },
    }


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_training_is_that_of_numpy(emulated_device: EmulatedDeviceFactory, seed: int) -> None:
    task, strategy = _single_rank_task(seed), STRATEGIES[seed // 2 % 5]
    device = emulated_device(seed)
    sets = (kernels_on(device, graphs=bool(seed % 4)), NumpyKernelSet())
    assert_same_training(*(Result(_train(task, kernels, strategy), {}) for kernels in sets))
    device.finish()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("model", SINGLE_RANK_MODELS)
def test_bits_do_not_depend_on_streams_or_graphs(emulated_device: EmulatedDeviceFactory, model: Callable[[], Layer]) -> None:
    task = replace(_single_rank_task(0), model=model)
    results = [
        _train(task, kernels_on(emulated_device(seed), graphs=graphs), Sharded) for seed in (0, 7) for graphs in (False, True)
    ]
    for other in results[1:]:
        for name, values in results[0].items():
            np.testing.assert_array_equal(other[name], values, err_msg=name)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", SINGLE_RANK_OPTIMIZERS)
@pytest.mark.parametrize("model", SINGLE_RANK_MODELS)
def test_steps_of_one_rank_allocate_nothing_and_wait_where_it_is_said(
    emulated_device: EmulatedDeviceFactory, model: Callable[[], Layer], optimizer: Callable[[], Optimizer]
) -> None:
    task = replace(_single_rank_task(0), model=model, optimizer=optimizer, samples=40, batch=8, steps=9)
    device = emulated_device(3)
    waits: list[set[str]] = []

    def after_step(step: int) -> None:
        if step == 0:  # the second step is captured
            device.seal()
        waits.append({function for _, function in device.counters.synchronisations})
        device.counters.synchronisations.clear()

    _train(task, kernels_on(device), Sharded, after_step=after_step)
    assert device.counters.late_allocations == []
    assert_documented(set().union(*waits[2:]))


@pytest.mark.slow
def test_every_place_of_one_rank_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """A training that leaves a wait out ends otherwise, or receives the reason, for some order of the work.

    Some waits are implied by another one just before: of several copies that are on their way, all but the last. So it is asked
    of each place in the code, not of each wait.
    """
    task = replace(_single_rank_task(0), steps=4)

    def results(kernels: Callable[[int], CudaKernelSet]) -> Mapping[str, np.ndarray]:
        own = kernels(0)
        found = _train(task, own, Sharded)
        own.runtime.device.finish()
        return found

    assert assert_waits_matter(emulated_device, results) >= 2


class _InNumpy(Sgd):
    """An optimiser that says nothing of arrays elsewhere."""

    any_arrays = False


def test_an_optimiser_in_numpy_is_refused_where_the_arrays_are_elsewhere(emulated_device: EmulatedDeviceFactory) -> None:
    task = replace(_single_rank_task(0), optimizer=_InNumpy)
    _replica(task, NumpyKernelSet(), Sharded)
    with pytest.raises(BackendError, match=r"^The optimizer _InNumpy computes with NumPy, .* backend cuda; implement it .*\.$"):
        _replica(task, kernels_on(emulated_device()), Sharded)


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
    write_data_file(path, SAMPLES, SHAPE, [*"abcde"], [(images, random.integers(0, 5, SAMPLES))])
    return ImageFile.open(path)


def _train_on_images(
    file: ImageFile, specs: str, kernels: KernelSet, dtype: str, *, leaves_pixels: bool, epochs: int = 2
) -> _Training:
    """Batches of 8, 8 and 5 samples in two micro-batches each; after the first epoch memory is sealed."""
    pipeline = Pipeline(SPECS[specs], 3, file.mean, file.std, parameter_dtype(dtype))
    model, shape = nets.residual if specs == "a resize" else partial(nets.plain, dropout=0.3), pipeline.output_shape(*SHAPE)
    task = Task(model, kernels, partial(Sgd, momentum=0.9), shape, dtype=dtype, batch=BATCH, micro_batches=2)
    replica = replica_of(task, *lone_rank(), Sharded)
    loader = Loader(file, Sampler(SAMPLES, BATCH, 5), pipeline, **replica.place, leaves_pixels=leaves_pixels)
    device = kernels.runtime.device if isinstance(kernels, CudaKernelSet) else EmulatedDevice()
    assert isinstance(device, EmulatedDevice)
    done, losses = _Training({}, [], [], [], device.counters.late_allocations), []
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            assert isinstance(batch.x, PixelBatch) == leaves_pixels
            before = device.counters.uploaded_bytes.total()
            totals = replica.step(batch, task.lr)
            losses += [] if totals is None else [totals.loss]
            done.uploaded.append(device.counters.uploaded_bytes.total() - before)
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


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_training_on_pixels_is_that_on_images(
    file: ImageFile, emulated_device: EmulatedDeviceFactory, specs: str, dtype: Precision
) -> None:
    images, pixels, others = (
        _train_on_images(file, specs, kernels_on(emulated_device(seed), dtype), dtype, leaves_pixels=leaves)
        for seed, leaves in ((0, False), (0, True), (4, True))
    )
    for name, values in images.values.items():
        np.testing.assert_array_equal(pixels.values[name], values, err_msg=name)
        np.testing.assert_array_equal(others.values[name], values, err_msg=name)
    if dtype == "float64":
        reference = _train_on_images(file, specs, NumpyKernelSet(), dtype, leaves_pixels=False)
        for name, values in reference.values.items():
            np.testing.assert_allclose(pixels.values[name], values, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.slow
def test_kernels_of_the_host_take_pixels_for_images(file: ImageFile) -> None:
    images, pixels = (
        _train_on_images(file, "windows", NumpyKernelSet(), "float64", leaves_pixels=leaves, epochs=1) for leaves in (False, True)
    )
    for name, values in images.values.items():
        np.testing.assert_array_equal(pixels.values[name], values, err_msg=name)


@pytest.mark.slow
def test_steps_send_pixels_and_allocate_nothing(file: ImageFile, emulated_device: EmulatedDeviceFactory) -> None:
    """Steps send nothing else but what they send with images as well, and some numbers for each image and micro-batch."""
    images, pixels = (
        _train_on_images(file, "windows", kernels_on(emulated_device(1), "float32"), "float32", leaves_pixels=leaves)
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
    assert_documented(set().union(*pixels.waits[2:]))


_MIXED = {
    "plain": {"conv1": Parallelism.DOMAIN, "conv2": Parallelism.MODEL, "fc1": Parallelism.MODEL, "fc2": Parallelism.BATCH},
    "residual": {"layer2.*": Parallelism.MODEL, "fc": Parallelism.MODEL},
    "narrow": {"conv": Parallelism.MODEL, "fc*": Parallelism.MODEL},
}
MODELS: dict[str, Callable[[], Layer]] = {
    "plain": partial(nets.plain, dropout=0.3),
    "residual": nets.residual,
    "narrow": partial(nets.narrow, classes=5),
}
OPTIMIZERS: list[Callable[[], Optimizer]] = [
    partial(Sgd, momentum=0.9, weight_decay=1e-3),
    partial(Sgd, momentum=0.8, nesterov=True, clip_norm=0.5),
    partial(Lars, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.1),
    partial(Adamw, epsilon=0.1, beta2=0.9, weight_decay=1e-3),
]
SPLIT_STRATEGIES: list[tuple[type, dict[str, Any]]] = [
    (Sharded, {"bucket_bytes": 2000}),
    (Bucketed, {"bucket_bytes": 2000}),
    (Priority, {"slice_parameters": 400}),
    (Lazy, {"max_interval": 1}),
    (Blocking, {}),
]
#: with many small messages, by seed
PRESSING: dict[int, tuple[type, dict[str, Any]]] = {3: (Priority, {"slice_parameters": 100}), 7: (Sharded, {"bucket_bytes": 400})}


def plan_of(model: str, kind: str, rows: int, cols: int) -> ParallelPlan:
    """Return a plan of this kind on a grid."""
    if kind == "mixed":
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, _MIXED[model])
    if kind == "tiles":
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, tiles=(1, rows))
    return ParallelPlan(rows, cols, Parallelism(kind))


def task_of(model: str, kind: str, rows: int, cols: int, **changes: Any) -> Task:
    """37 samples in batches of 8: uneven shares, and a last batch that some ranks have nothing of."""
    task = Task(MODELS[model], NumpyKernelSet(), OPTIMIZERS[0], steps=5, plan=plan_of(model, kind, rows, cols))
    return replace(task, **changes)


def trained(
    task: Task, strategy: tuple[type, dict[str, Any]], kernels: Callable[[int], KernelSet], *, seed: int | None = None
) -> list[Result]:
    kind, options = strategy

    def program(comm: ThreadCommunicator) -> Result:
        of_rank = replace(task, kernels=kernels(comm.rank))
        return train(of_rank, comm, virtual_engine(comm), kind, nominal_batch=task.batch, **options)

    return run_virtual(task.plan.rows * task.plan.cols, program, seed=seed)


def alone(task: Task) -> Result:
    return trained(replace(task, plan=ParallelPlan()), (Blocking, {}), lambda rank: NumpyKernelSet())[0]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_orders_of_streams_and_messages(seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    """Uneven micro-batches, norms over both groups of parameters, and batches of which a split group has no sample."""
    model, kind = list(MODELS)[seed % 3], ("mixed", "tiles", "model", "domain")[seed % 4]
    rows, cols = ((2, 1), (3, 1), (2, 2))[seed // 4 % 3]
    changes: dict[str, Any] = {"micro_batches": 1 + seed % 2} if model != "residual" else {}
    task = task_of(model, kind, rows, cols, optimizer=OPTIMIZERS[seed % 4], **changes)
    results = trained(task, SPLIT_STRATEGIES[seed % 5], lambda rank: kernels_on(emulated_device(100 * seed + rank)), seed=seed)
    assert_same_training(results[0], alone(task))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "model", "kind"), [(3, "residual", "mixed"), (7, "residual", "mixed"), (7, "narrow", "model")])
def test_two_groups_of_parameters_do_not_wait_for_each_other_with_nccl(
    seed: int, model: str, kind: str, emulated_device: EmulatedDeviceFactory
) -> None:
    """All of NCCL has one stream: operations of both groups there would be enqueued in another order on another rank.

    The last training has one group alone: that of parameters that ranks hold parts of.
    """
    task = task_of(model, kind, 2, 2, transport="nccl", optimizer=OPTIMIZERS[seed % 4])
    results = trained(task, PRESSING[seed], lambda rank: kernels_on(emulated_device(100 * seed + rank)), seed=seed)
    expected = alone(task)
    for result in results:
        assert_same_training(result, expected)


@pytest.mark.sample(1)
@pytest.mark.slow
def test_every_place_of_moves_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """Passes of two ranks, one of which leaves a wait of its moves out, end otherwise for some order of the work.

    Averaging waits at the same places: so there is none, and each rank keeps its own gradients. Two waits are left to
    test_mirrors: that before a mirror is used again, and that of a rank which only receives, into a place that is still read.
    """
    task = task_of("plain", "mixed", 2, 1, steps=2)

    def counts(wait: str) -> bool:
        mirrors = "CudaMirrors" in wait or "CudaTransit" in wait
        return mirrors and not wait.startswith("from the host") and not wait.endswith((".mirror", "._forget"))

    assert assert_waits_matter(emulated_device, partial(passes, task), counts) == 3


def passes(task: Task, kernels: Callable[..., KernelSet]) -> dict[str, np.ndarray]:
    """The gradients of the first rank after forward and backward passes over a few batches, whose sums stay its own."""

    def program(comm: ThreadCommunicator) -> dict[str, np.ndarray]:
        replica = replica_of(replace(task, kernels=kernels(comm.rank)), comm, virtual_engine(comm), Blocking)
        found = {}
        for number, batch in enumerate(batches(task, comm.rank, comm.size, replica.tiles)):
            run = replica.network.program(batch.share.counts, training=True)
            forward_and_backward(run, batch)
            for name, parameter in replica.network.parameters.items():
                found[f"{number} {name}"] = np.array(replica.network.kernels.arithmetic.to_host(parameter.grad))
        return found

    return run_virtual(2, program)[0]


def forward_and_backward(run: Program, batch: Batch) -> None:
    """A step without its update."""
    run.set_input(batch.x)
    run.forward(StepContext(sample_ids=batch.sample_ids))
    sums = run.loss(batch.y, batch.global_count)
    run.backward()
    sums.result()


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "domain", "mixed"])
@pytest.mark.parametrize("grid", [(2, 1), (3, 1), (2, 2)], ids=lambda grid: "x".join(map(str, grid)))
def test_bytes_over_the_bus_are_those_of_the_plan(
    grid: tuple[int, int], kind: str, emulated_device: EmulatedDeviceFactory
) -> None:
    """In integers: what a rank sends leaves, what it receives arrives, in forward and, the other way round, in backward."""
    task = task_of("plain", kind, *grid)

    def program(comm: ThreadCommunicator) -> None:
        device = emulated_device(comm.rank)
        kernels = kernels_on(device)
        replica = replica_of(replace(task, kernels=kernels), comm, virtual_engine(comm), Blocking)
        network, distribution = replica.network, replica.distribution
        assert distribution is not None
        sent = received = 0
        for batch in batches(task, replica.groups.position, comm.size, replica.tiles):
            counts = batch.share.counts
            forward_and_backward(network.program(counts, training=True), batch)
            partitioned = distribution.partitioned(network.graph(sum(counts)), counts)
            for there, back in words(partitioned, distribution.group.rank):
                sent, received = sent + there, received + back
        assert sent > 0
        mirrors, counters = kernels.arithmetic.mirrors(), device.counters
        assert (counters.downloaded_bytes["to the host"], counters.uploaded_bytes["from the host"]) == (8 * sent, 8 * received)
        assert mirrors.pinned_bytes == distribution.group.buffer_bytes

    run_virtual(grid[0] * grid[1], program)


def words(graph: PartitionedGraph, rank: int) -> Iterator[tuple[int, int]]:
    """(sent, received) of a rank in each pass of each move. No gradient goes back to what has no parameters before it."""
    trained = {0: False}
    for step in graph.steps:
        parameters = step.node is not None and bool(step.node.parameters)
        trained[step.output] = parameters or any(trained[tensor] for tensor in step.inputs)
        if step.move is not None:
            there, back = moved(*step.move)[rank], moved_back(*step.move)[rank]
            yield (back, there) if step.summed else (there, back)
            if trained[step.inputs[0]]:
                yield (there, back) if step.summed else (back, there)
