"""Hashes of a replica's state: those of its checkpoint's tensors, whatever ranks, grid and strategy hold it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed, BucketedOptions
from hpctrain.averaging.strategies.lazy import Lazy, LazyOptions
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority, PriorityOptions
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.averaging.strategies.sparse import Sparse, SparseOptions
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers.adamw import Adamw
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.train.element_hash import hash_of
from hpctrain.train.replica import Replica, StrategyFactory
from hpctrain.train.state_hashes import StateHashes, state_hashes
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, replica_of
from tests.train.test_snapshot import MIXED, POSITION

SPARSE = SparseOptions(compress="always", least_elements=40, bucket_bytes=512, density=0.3)
STRATEGIES: dict[str, StrategyFactory] = {
    "blocking": Blocking,
    "bucketed": partial(Bucketed, options=BucketedOptions(bucket_bytes=512)),
    "overlap": Overlap,
    "sharded": partial(Sharded, options=ShardedOptions(bucket_bytes=512, fc_exchange="always")),
    "rounded": partial(Sharded, options=ShardedOptions(bucket_bytes=512, fc_exchange="never", wire_parameters="bfloat16")),
    "priority": partial(Priority, options=PriorityOptions(slice_parameters=40, fc_exchange="never")),
    "lazy": partial(Lazy, options=LazyOptions(layers=2, bucket_bytes=512, fc_exchange="never", max_interval=3)),
    "sparse": partial(Sparse, options=SPARSE),
    "corrected": partial(Sparse, options=replace(SPARSE, momentum_correction=0.5)),
}
#: strategies that keep nothing but what one rank keeps, so that one checkpoint fits them all
PLAIN = ("blocking", "bucketed", "overlap", "sharded", "priority")
KEPT_BACK = ("lazy_gradient", "sparse_gradient", "sparse_momentum")
GRIDS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 2), (7, 1), (13, 1)]


def task_on(rows: int, cols: int, net: str = "residual") -> Task:
    """A training with averages of weights on a grid, its layers split in all ways."""
    plan = ParallelPlan(rows, cols, Parallelism.BATCH, MIXED[net] if rows > 1 else {})
    optimizer = partial(Sgd, momentum=0.9)
    return Task(getattr(nets, net), NumpyKernelSet(), optimizer, samples=19, steps=3, plan=plan, ema=EmaRule(0.3))


def made(comm: ThreadCommunicator, task: Task, strategy: str) -> Replica:
    return replica_of(task, comm, virtual_engine(comm), STRATEGIES[strategy], nominal_batch=task.batch)


def trained(comm: ThreadCommunicator, task: Task, strategy: str) -> Replica:
    """A replica after some steps, settled and drained."""
    replica = made(comm, task, strategy)
    for batch in batches(task, replica.groups.position, comm.size, replica.tiles):
        replica.step(batch, task.lr)
    replica.settle()
    replica.drain()
    return replica


def of_content(content: CheckpointContent) -> dict[str, str]:
    """The hashes of a checkpoint's tensors, without what is kept back."""
    tensors = content.tensors.items()
    return {key: hash_of(values) for key, values in tensors if not any(f"/{state}/" in key for state in KEPT_BACK)}


def random_content(net: str) -> CheckpointContent:
    """A checkpoint of one rank, with random numbers for its tensors."""
    random = np.random.default_rng(0)
    (content,) = run_virtual(1, lambda comm: made(comm, task_on(1, 1, net), "blocking").state(POSITION, {}))
    return CheckpointContent({key: random.standard_normal(value.shape) for key, value in content.tensors.items()}, content.meta)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("net", MIXED)
def test_one_checkpoint_has_the_same_hashes_on_any_ranks(net: str) -> None:
    """On more ranks than channels, too, of which some hold nothing of split layers."""
    content = random_content(net)
    expected = of_content(content)
    assert any("ema" in key for key in expected)
    assert any("momentum" in key for key in expected)

    def loaded(comm: ThreadCommunicator, grid: tuple[int, int], strategy: str) -> dict[str, str]:
        replica = made(comm, task_on(*grid, net), strategy)
        replica.load(content)
        return state_hashes(replica)

    for number, grid in enumerate(GRIDS):
        for strategy in PLAIN if grid in {(1, 3), (2, 2)} else (PLAIN[number % len(PLAIN)],):
            for found in run_virtual(grid[0] * grid[1], partial(loaded, grid=grid, strategy=strategy), seed=number):
                assert found == expected, (grid, strategy)


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("rows", "cols", "per_node"), [(1, 1, 1), (1, 3, 1), (1, 4, 2), (2, 2, 1)])
def test_they_are_those_of_the_checkpoint_behind_any_training(strategy: str, rows: int, cols: int, per_node: int) -> None:
    """Also where parts have copies, parameters are rounded, and gradients are kept back."""

    def pair(comm: ThreadCommunicator) -> tuple[dict[str, str], dict[str, str]]:
        momentum = 0.0 if strategy == "corrected" else 0.9
        replica = trained(comm, replace(task_on(rows, cols), optimizer=partial(Sgd, momentum=momentum)), strategy)
        return state_hashes(replica), of_content(replica.state(POSITION, {}))

    for found, expected in run_virtual(rows * cols, pair, ranks_per_node=per_node, seed=1):
        assert found == expected


def test_a_flipped_bit_changes_the_hash_of_its_tensor_alone() -> None:
    content = random_content("plain")
    random = np.random.default_rng(1)

    def loaded(comm: ThreadCommunicator) -> list[dict[str, str]]:
        replica = made(comm, task_on(2, 2, "plain"), "sharded")
        hashes, found = StateHashes(replica), list[dict[str, str]]()
        for tensors in variants:
            replica.load(CheckpointContent(tensors, content.meta))
            found.append(hashes.take())
        return found

    keys = [key for key, values in content.tensors.items() if values.size]
    variants = [content.tensors]
    for key in keys:
        values = content.tensors[key].copy()
        values.reshape(-1).view(np.uint64)[random.integers(values.size)] ^= np.uint64(1 << int(random.integers(64)))
        variants.append({**content.tensors, key: values})
    for first, *others in run_virtual(4, loaded):
        for key, changed in zip(keys, others, strict=True):
            assert [name for name in first if first[name] != changed[name]] == [key]


def test_each_element_is_taken_account_of_on_one_rank() -> None:
    """A bit that one rank alone holds otherwise changes a hash where it is that rank's to take account of, and nowhere else."""

    def changed(comm: ThreadCommunicator) -> list[bool]:
        replica = made(comm, task_on(1, 3, "plain"), "blocking")
        hashes, shows = StateHashes(replica), list[bool]()
        data = replica.network.groups["all"].data
        for element in range(0, data.size, 41):
            before = hashes.take()
            if comm.rank == 1:
                data[element] += 1.0
            shows.append(hashes.take() != before)
        return shows

    first, *others = run_virtual(3, changed)
    assert all(shows == first for shows in others)
    third = len(first) / 3
    assert third - 2 <= sum(first) <= third + 2
    assert not any(first[: int(third) - 1])


def test_keys_come_as_a_reader_looks_for_them() -> None:
    """Parameters first, in forward order, then statistics, then states of the optimiser."""
    for found in run_virtual(2, lambda comm: state_hashes(made(comm, task_on(1, 2), "sharded"))):
        keys = list(found)
        parameters = [key for key in keys if key.startswith("parameters/")]
        kinds = list(dict.fromkeys(key.rsplit("/", 1)[0] for key in keys))
        assert kinds == ["parameters", "statistics", "averaged_statistics", "optimizer/ema", "optimizer/momentum"]
        assert parameters[0] == "parameters/conv1.weight"
        assert parameters[-1] == "parameters/fc.bias"


@pytest.mark.parametrize("cols", [1, 2])
def test_frozen_parameters_are_among_them(cols: int) -> None:
    def pair(comm: ThreadCommunicator) -> tuple[dict[str, str], dict[str, str]]:
        task = Task(nets.plain, NumpyKernelSet(), partial(Adamw, weight_decay=0.1), plan=ParallelPlan(1, cols), frozen=("conv1",))
        replica = made(comm, task, "sharded")
        return state_hashes(replica), of_content(replica.state(POSITION, {}))

    for found, expected in run_virtual(cols, pair):
        assert found == expected
        assert "parameters/conv1.weight" in found
        assert not any(key.startswith("optimizer/") and "conv1." in key for key in found)


@pytest.mark.usefixtures("emulated_device")
@pytest.mark.parametrize("strategy", ["blocking", "sharded", "sparse"])
def test_arrays_of_devices_have_the_hashes_of_their_values(strategy: str) -> None:
    def pair(comm: ThreadCommunicator) -> tuple[dict[str, str], dict[str, str]]:
        device = EmulatedDevice(comm.rank)
        kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64"))
        task = Task(nets.plain, kernels, partial(Sgd, momentum=0.9), samples=19, steps=2, plan=ParallelPlan(1, 2))
        replica = trained(comm, task, strategy)
        return state_hashes(replica), of_content(replica.state(POSITION, {}))

    for found, expected in run_virtual(2, pair, ranks_per_node=1):
        assert found == expected
