"""Hashes of a replica's state, and checksums by which ranks compare what they hold."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed, BucketedOptions
from hpctrain.averaging.strategies.lazy import Lazy, LazyOptions
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority, PriorityOptions
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.averaging.strategies.sparse import Sparse, SparseOptions
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.core.errors import CorruptedStateError
from hpctrain.core.intervals import even_intervals, relative, replace_dim, whole
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers import Adamw, Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.training import state_hashes as element_hash
from hpctrain.training.replica import Replica, StrategyFactory
from hpctrain.training.state_hashes import (
    MODULUS,
    ElementHash,
    PartPosition,
    StateHashes,
    digest,
    hash_of,
    hash_of_all,
    state_hashes,
)
from hpctrain.training.weight_watch import AgreedChecksums, CheckCadence, Checksums, RankReport, difference
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.emulated import kernels_on
from tests.support.training import Task, batches, replica_of
from tests.training.test_checkpoint_state import MIXED, POSITION

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


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("rows", "cols", "per_node"), [(1, 1, 1), (1, 3, 1), (1, 4, 2), (2, 2, 1)])
def test_hashes_are_those_of_the_checkpoint_after_any_training(strategy: str, rows: int, cols: int, per_node: int) -> None:
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
        kernels = kernels_on(device)
        task = Task(nets.plain, kernels, partial(Sgd, momentum=0.9), samples=19, steps=2, plan=ParallelPlan(1, 2))
        replica = trained(comm, task, strategy)
        return state_hashes(replica), of_content(replica.state(POSITION, {}))

    for found, expected in run_virtual(2, pair, ranks_per_node=1):
        assert found == expected


_MASK = MODULUS - 1


def slow_sum(values: np.ndarray) -> int:
    """The definition, one word after the other, with Python's integers."""
    total = 0
    for position, word in enumerate(values.reshape(-1).view(np.uint32).tolist()):
        x = position << 32 | word
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = x * factor & _MASK
            x ^= x >> 32
        total += x
    return total & _MASK


def random_array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (7, 9), (3, 3, 3, 5), (0, 4)])
def test_an_element_hash_is_the_sum_of_its_definition(shape: tuple[int, ...], dtype: str) -> None:
    values = random_array(shape, dtype)
    assert hash_of(values) == digest(slow_sum(values), shape, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 11])
def test_no_cut_changes_an_element_hash(dtype: str, dim: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split in any dim, and the flat part of each holder cut again by its owners, in chunks of odd length."""
    monkeypatch.setattr(element_hash, "CHUNK", 13)
    values = random_array((7, 5, 9), dtype)
    hasher, total = ElementHash(), 0
    for interval in even_intervals(values.shape[dim], parts):
        box = replace_dim(whole(values.shape), dim, interval)
        part = np.ascontiguousarray(values[relative(box, whole(values.shape))]).reshape(-1)
        position = PartPosition.of(values.shape, box)
        for begin, end in even_intervals(part.size, 3):
            total += hasher.sum_of(part[begin:end], begin, position)
    assert total % MODULUS == slow_sum(values)


def test_shape_and_dtype_are_part_of_an_element_hash() -> None:
    zeros = [np.zeros(6, "float32"), np.zeros((2, 3), "float32"), np.zeros(3, "float64"), np.zeros((0, 3), "float64")]
    assert len({hash_of(values) for values in zeros}) == len(zeros)


def test_one_hash_of_all_knows_names_and_no_order() -> None:
    assert hash_of_all({"a": "1", "b": "2"}) == hash_of_all({"b": "2", "a": "1"})
    assert len({hash_of_all({"a": "1", "b": "2"}), hash_of_all({"a": "2", "b": "1"}), hash_of_all({"a": "1"})}) == 3


CHECKSUMS = st.integers(0, 2**32 - 1)


@given(columns=st.integers(1, 40), rows=st.integers(1, 4), common=CHECKSUMS, data=st.data())
def test_sums_tell_whether_all_of_a_group_are_equal(columns: int, rows: int, common: int, data: st.DataObject) -> None:
    ranks = columns * rows
    alike = [range(ranks)], [range(row, ranks, rows) for row in range(rows)]
    of_all, of_rows = [common] * ranks, [data.draw(CHECKSUMS) for _ in range(rows)] * columns
    odd, kind, other = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 1)), data.draw(CHECKSUMS)
    values = (of_all, of_rows)[kind]
    alone = (ranks, columns)[kind] == 1
    equal = values[odd] == other
    agreed = [AgreedChecksums(alike, rank) for rank in range(ranks)]

    def well(found: int | None = None) -> bool:
        numbers = [one.numbers((of_all[rank], of_rows[rank]), found=rank == found) for rank, one in enumerate(agreed)]
        return agreed[0].agree(np.sum(numbers, axis=0))

    assert well()
    assert not well(found=odd)
    values[odd] = other
    assert well() == (equal or alone)


def test_sums_of_many_ranks_are_exact() -> None:
    """200,000 ranks have the largest numbers, and one of them differs in one bit."""
    alike = [range(200_000)], [range(200_000)]
    agreed = AgreedChecksums(alike, 7)
    most = agreed.numbers((2**32 - 1, 2**32 - 1), found=False)
    assert agreed.agree(200_000 * most)
    assert not agreed.agree(199_999 * most + agreed.numbers((2**32 - 1, 2**32 - 2), found=False))


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_with_other_settings_on_one_rank_is_an_error_on_all_ranks(strategy: str, seed: int) -> None:
    """For any averager, grid, rank and step, with and without checks; ranks raise it before they settle the following step."""
    random = np.random.default_rng([seed, *strategy.encode()])
    rows, cols = GRIDS[random.integers(1, 6)]
    odd, step = random.integers(rows * cols), random.integers(3)
    what, checks = ("lr", "weight_decay")[random.integers(2)], CheckCadence(int(random.integers(3)))

    def said(comm: ThreadCommunicator) -> str:
        made_here: list[Sgd] = []

        def optimizer() -> Sgd:
            made_here.append(Sgd(momentum=0.0))
            return made_here[-1]

        task = replace(task_on(rows, cols), optimizer=optimizer, checks=checks, ema=None)
        replica = made(comm, task, strategy)
        try:
            for number, batch in enumerate(batches(task, replica.groups.position, comm.size, replica.tiles)):
                differs = number == step and comm.rank == odd
                for one in made_here if what == "weight_decay" and differs else ():
                    object.__setattr__(one, "weight_decay", 0.5)
                replica.step(batch, task.lr * (1 + 2.0**-52 * (what == "lr" and differs)))
            replica.settle()
        except CorruptedStateError as error:
            assert replica.global_step == step + 1
            return str(error)
        return ""

    sentences = run_virtual(rows * cols, said, seed=seed, ranks_per_node=1)
    assert len(set(sentences)) == 1
    assert f"other values in step {step + 1} than rank" in sentences[0]
    assert f": {what} is " in sentences[0]


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0), np.float64(0), np.int64(0), False])
def test_equal_settings_of_other_types_are_equal(zero: object) -> None:
    """The checksums of settings are equal if and only if the values are, whatever their types."""
    ours, other = Sgd(momentum=0.0), Sgd(momentum=0.0)
    for value, one in ((zero, ours), (np.float32(0.5), other)):
        object.__setattr__(one, "weight_decay", value)
    for arguments in (False, True):
        expected = Sgd(momentum=0.0).settings(arguments=arguments)
        assert repr(ours.settings(arguments=arguments)) == repr(expected)
        assert repr(other.settings(arguments=arguments)) != repr(expected)


NAMES = ("parameter conv.weight", "the momentum of conv.weight", "parameter fc.weight")


def _report(*digests: int, split: int = 0, found: tuple[str, ...] = ()) -> RankReport:
    of_split = Checksums(("parameter fc2.weight",), np.array([split], np.uint32), (False,))
    return RankReport((Checksums(NAMES, np.array(digests, np.uint32), (False,) * len(NAMES)), of_split), found)


def _difference(*reports: RankReport, splits: int = 1) -> tuple[str, tuple[int, ...]]:
    ranks = range(len(reports))
    classes = [ranks[split::splits] for split in range(splits)]
    return difference(reports, ([ranks], classes), [rank + 10 for rank in ranks], 9)


@pytest.mark.parametrize(
    ("digests", "ranks", "text"),
    [
        ([(1, 2, 3), (1, 2, 4), (1, 2, 3)], (11,), "rank 11 holds other bits of parameter fc.weight than ranks 10, 12"),
        (
            [(1, 2, 3), (1, 4, 4), (1, 2, 3)],
            (11,),
            "rank 11 holds other bits of the momentum of conv.weight (and 1 more) than ranks 10, 12",
        ),
        (
            [(1, 2, 3), (2, 2, 3), (1, 2, 3), (3, 2, 3), (1, 2, 3)],
            (11, 13),
            "ranks 11, 13 hold other bits of parameter conv.weight than ranks 10, 12, 14",
        ),
        (
            [(1, 2, 3), (2, 2, 3)],
            (10, 11),
            "rank 10 and rank 11 hold different bits of parameter conv.weight, and there is no majority",
        ),
        (
            [(1, 2, 3), (1, 2, 3), (2, 2, 3), (2, 2, 3)],
            (10, 11, 12, 13),
            "ranks 10-11 and ranks 12-13 hold different bits of parameter conv.weight, and there is no majority",
        ),
    ],
)
def test_what_is_said(digests: list[tuple[int, ...]], ranks: tuple[int, ...], text: str) -> None:
    assert _difference(*(_report(*of_rank) for of_rank in digests)) == (f"After step 9 {text}", ranks)


def test_a_rank_that_finds_changes_of_its_own_is_named_alone() -> None:
    found = _report(1, 2, 3, found=("the momentum of fc.weight", "parameter fc.weight"))
    text, ranks = _difference(_report(1, 2, 3), _report(1, 2, 4), found)
    assert ranks == (12,)
    assert text.startswith(
        "On rank 12 the momentum of fc.weight (and 1 more) changed between two updates, although nothing wrote"
    )


@pytest.mark.parametrize(("owned", "ranks"), [((True, False), (11,)), ((False, True), (10,)), ((True, True), (10, 11))])
def test_of_two_ranks_the_owner_is_right(owned: tuple[bool, bool], ranks: tuple[int, ...]) -> None:
    """If both ranks update the values, both are named."""
    sums = [Checksums(NAMES[:1], np.array([rank], np.uint32), (owned[rank],)) for rank in range(2)]
    text, wrong = difference([RankReport((one,)) for one in sums], ([range(2)],), [10, 11], 9)
    assert wrong == ranks
    assert ("which owns it" in text) == (len(ranks) == 1)


def test_a_message_that_was_damaged_blames_no_rank() -> None:
    text, wrong = _difference(_report(1, 2, 3), _report(1, 2, 3))
    assert wrong == ()
    assert text.endswith("a message between ranks was damaged")


def test_split_parameters_are_compared_among_those_that_hold_the_same_part() -> None:
    reports = [_report(1, 2, 3, split=number) for number in (1, 2, 1, 2, 1, 3)]
    text = "After step 9 rank 15 holds other bits of parameter fc2.weight than ranks 11, 13"
    assert _difference(*reports, splits=2) == (text, (15,))
