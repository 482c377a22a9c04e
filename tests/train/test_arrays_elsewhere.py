"""A rank whose arrays are not on the host trains, evaluates and resumes like one whose arrays are, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.errors import BackendError, DivergedError
from hpctrain.models import interchange
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.pad_channels import PadChannels
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import Position
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.late_kernels import LateKernelSet
from tests.support.training import Task, batches, made_up, replica_of

STRATEGIES: Mapping[str, tuple[type, dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 2000}),
    "overlap": (Overlap, {}),
    "lazy": (Lazy, {"max_interval": 3, "check_every": 1}),
    "priority": (Priority, {}),
    "sharded": (Sharded, {"bucket_bytes": 2000}),
    "exchanging": (Sharded, {"fc_exchange": "always"}),
}
OPTIMIZERS: Mapping[str, Callable[[], Optimizer]] = {
    "sgd": partial(Sgd, momentum=0.9, nesterov=True, weight_decay=0.01),
    "clipped": partial(Sgd, momentum=0.0, clip_norm=0.5),
    "lars": partial(Lars, momentum=0.9, weight_decay=0.01, trust_coefficient=0.1),
}


def _task(kernels: KernelSet, optimizer: str = "sgd", **changes: Any) -> Task:
    options = {"model": partial(nets.plain, dropout=0.3), "steps": 5, "samples": 21, **changes}
    return Task(kernels=kernels, optimizer=OPTIMIZERS[optimizer], **options)


def _replica(task: Task, strategy: str) -> Replica:
    kind, options = STRATEGIES[strategy]
    progress = ProgressEngine(rank=0, deadline_seconds=60.0, abort=lambda code: None)
    return replica_of(task, SingleCommunicator(), progress, kind, nominal_batch=task.batch, **options)


def _trained(task: Task, strategy: str) -> tuple[Replica, list[float]]:
    replica, losses = _replica(task, strategy), []
    for batch in batches(task, 0, 1):
        totals = replica.step(batch, task.lr)
        # Whatever the step has not copied by now is lost.
        batch.x.fill(np.nan)
        losses += [] if totals is None else [totals.loss, float(totals.statistics.sum())]
    return replica, losses


def _everything(replica: Replica, losses: list[float], task: Task) -> dict[str, np.ndarray]:
    """All that a training leaves: sums of its steps, an evaluation, a checkpoint, weights for other frameworks."""
    images, labels, _ = made_up(task)
    sums = replica.evaluate(ArrayLoader(images, labels, Sampler(len(images), task.batch, shuffle=False), **replica.place))
    content = replica.state(Position(), {})
    return {
        "losses": np.array(losses),
        "evaluation": np.array([sums.loss, sums.top1, sums.top5, sums.count]),
        **content.tensors,
        **{f"export/{name}": array for name, array in interchange.export(replica.network).items()},
    }


def _assert_equal(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if np.asarray(first[name]).tobytes() != np.asarray(second[name]).tobytes()]
    assert not different


def _shadows_are_fresh(network: Network) -> None:
    for group in network.groups.values():
        data, shadow = (network.kernels.arithmetic.to_host(array) for array in (group.data, group.shadow))
        assert np.array_equal(shadow, data.astype(np.float32))


def padded() -> Layer:
    """Padded channels beside a convolution: no kernel set knows them."""
    body = {"conv": Conv2d(3, 8, 3, padding=1)}
    return Sequential({"block": Residual(body, PadChannels(2, 3)), "flatten": Flatten(), "fc": Linear(9 * 7 * 8, 5)})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_alike_with_every_optimiser(strategy: str, optimizer: str) -> None:
    results = []
    for kernels in (LateKernelSet(), NumpyKernelSet()):
        task = _task(kernels, optimizer)
        results.append(_everything(*_trained(task, strategy), task))
        if isinstance(kernels, LateKernelSet):
            kernels.queue.wait()
    _assert_equal(*results)


@pytest.mark.parametrize(
    "changes", [{"model": nets.residual}, {"model": padded}, {"micro_batches": 3}], ids=["residual", "padded", "micro-batches"]
)
@pytest.mark.parametrize("strategy", ["blocking", "sharded"])
def test_every_kind_of_network_and_micro_batches_train_alike(strategy: str, changes: dict[str, Any]) -> None:
    results = []
    for kernels in (LateKernelSet(), NumpyKernelSet()):
        task = _task(kernels, **changes)
        results.append(_everything(*_trained(task, strategy), task))
    _assert_equal(*results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_goes_on_from_its_checkpoint_on_either_side(strategy: str) -> None:
    task, on_host = _task(LateKernelSet()), _task(NumpyKernelSet())
    content = _trained(task, strategy)[0].state(Position(), {})
    results = []
    for other in (task, on_host):
        replica = _replica(other, strategy)
        replica.load(content)
        if other is task:
            _shadows_are_fresh(replica.network)
        for batch in batches(other, 0, 1):
            replica.step(batch, other.lr)
        results.append(_everything(replica, [], other))
        if other is task:
            _shadows_are_fresh(replica.network)
    _assert_equal(*results)


def test_weights_of_other_frameworks_come_and_go() -> None:
    source, target = (Network(nets.residual(), (9, 7, 3), LateKernelSet(), dtype="float64", seed=seed) for seed in (1, 2))
    interchange.restore(target, interchange.export(source))
    _assert_equal(interchange.export(source), interchange.export(target))
    _shadows_are_fresh(target)


@pytest.mark.parametrize("kernels", [LateKernelSet, NumpyKernelSet])
@pytest.mark.parametrize("strategy", ["blocking", "lazy", "sharded"])
def test_the_first_layer_that_is_not_finite_is_named(kernels: type[KernelSet], strategy: str) -> None:
    """Its NaN has reached all other layers by the time that anybody asks."""
    task = _task(kernels())
    replica = _replica(task, strategy)
    arithmetic, parameter = task.kernels.arithmetic, replica.network.parameters["fc1.weight"]

    def run() -> None:
        for number, batch in enumerate(batches(task, 0, 1)):
            if number == 2:
                replica.drain()
                values = np.array(arithmetic.to_host(parameter.data))
                values[3, 4] = np.nan
                arithmetic.from_host(parameter.data, values)
            replica.step(batch, task.lr)

    with pytest.raises(DivergedError, match=r"^Layer fc1 is the first.*whose parameters are not finite after step 2"):
        run()


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("exchanging", "lazy")])
def test_a_step_waits_when_backward_is_enqueued_and_only_then(strategy: str) -> None:
    """For the loss, the batch statistics and the finite flags, with nothing left to be enqueued in between.

    An exchange of inputs and errors waits for them besides, and lazy averaging for the norms that its interval follows from.
    """
    kernels = LateKernelSet()
    task = _task(kernels)
    replica = _replica(task, strategy)
    parts = replica.network.program(task.batch, training=True).plan.backward
    for batch in batches(task, 0, 1):
        kernels.queue.waits.clear()
        replica.step(batch, task.lr)
        first, *others = kernels.queue.waits
        assert first >= len(parts)
        assert others == [0, 0]


def test_a_world_of_one_rank_takes_arrays_that_its_transport_does_not() -> None:
    """As under an MPI launcher that starts one rank."""

    def run(comm: ThreadCommunicator, kernels: KernelSet) -> dict[str, np.ndarray]:
        task = _task(kernels, steps=3)
        kind, options = STRATEGIES["sharded"]
        replica = replica_of(task, comm, virtual_engine(comm), kind, nominal_batch=task.batch, **options)
        for batch in batches(task, 0, 1):
            replica.step(batch, task.lr)
        return _everything(replica, [], task)

    _assert_equal(*(run_virtual(1, partial(run, kernels=kernels()), seed=1)[0] for kernels in (LateKernelSet, NumpyKernelSet)))


def _cuda(emulated_device: EmulatedDeviceFactory, precision: Precision) -> CudaKernelSet:
    device = emulated_device(0)
    return CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision, graphs=False))


@pytest.mark.parametrize(
    ("strategy", "optimizer", "model"),
    [
        ("exchanging", "sgd", nets.plain),
        ("sharded", "lars", padded),
    ],
)
def test_a_device_trains_like_the_host(
    emulated_device: EmulatedDeviceFactory, strategy: str, optimizer: str, model: Callable[[], Layer]
) -> None:
    results = []
    for kernels in (_cuda(emulated_device, "float64"), NumpyKernelSet()):
        task = _task(kernels, optimizer, model=model, steps=3)
        results.append(_everything(*_trained(task, strategy), task))
    assert results[0].keys() == results[1].keys()
    for name, expected in results[1].items():
        scale = float(np.abs(expected).max(initial=1e-9))
        np.testing.assert_allclose(results[0][name], expected, rtol=0.0, atol=1e-12 * scale, err_msg=name)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 1e-5), ("bfloat16", 1e-2)])
def test_a_device_trains_in_other_precisions(
    emulated_device: EmulatedDeviceFactory, precision: Precision, tolerance: float
) -> None:
    """Losses follow those of float64; parameters stay float32, and rounded copies of them fresh."""
    kernels = _cuda(emulated_device, precision)
    losses = []
    for task in (
        _task(kernels, model=nets.residual, steps=3, dtype=kernels.runtime.dtype),
        _task(NumpyKernelSet(), model=nets.residual, steps=3),
    ):
        replica, sums = _trained(task, "sharded")
        losses.append(np.array(sums[::2]))
        assert replica.network.parameter_dtype == ("float32" if task.kernels is kernels else "float64")
        for group in replica.network.groups.values() if precision == "bfloat16" and task.kernels is kernels else ():
            data, shadow = (kernels.arithmetic.to_host(array) for array in (group.data, group.shadow))
            assert np.array_equal(shadow, bfloat16_values(bfloat16_bits(data)))
    np.testing.assert_allclose(*losses, rtol=tolerance)


def test_layers_of_numpy_are_refused() -> None:
    from tests.testing.test_operator_gradients import Cube

    model = Sequential({"cube": Cube(), "flatten": Flatten(), "fc": Linear(9 * 7 * 3, 2)})
    network = Network(model, (9, 7, 3), LateKernelSet())
    with pytest.raises(BackendError, match=r"Layer cube: Its code computes with NumPy.*backends numpy and onednn can do it\.$"):
        network.program(2, training=True)
