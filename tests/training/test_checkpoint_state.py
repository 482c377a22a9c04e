"""Snapshots and sharded checkpoints: whole tensors, whatever grid, plan and averager give and take them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.base import for_holders
from hpctrain.averaging.sixteen_bits import PARAMETER_ERROR
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed, BucketedOptions
from hpctrain.averaging.strategies.lazy import Lazy, LazyOptions
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.averaging.strategies.sparse import Sparse, SparseOptions
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.core.errors import CheckpointError
from hpctrain.core.intervals import whole
from hpctrain.data.sampler import Reordering
from hpctrain.nn.layers import Layer
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage import checkpoint
from hpctrain.storage import shards as write_shares
from hpctrain.storage.atomic_write import partial_path
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, open_checkpoint, optimizer_key, read, write
from hpctrain.storage.hdf5_store import ShardedTensors
from hpctrain.storage.shards import publish, write_shard
from hpctrain.training.metrics import RunningSums
from hpctrain.training.replica import Replica, StrategyFactory
from hpctrain.training.snapshot import Position
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, replica_of

_B, _M = Parallelism.BATCH, Parallelism.MODEL
POSITION = Position(2, 6, 17, RunningSums(1.5, 4, 5, 6))

MIXED = {
    "plain": {"conv1": Parallelism.DOMAIN, "conv2": Parallelism.MODEL, "fc*": Parallelism.MODEL},
    "residual": {"*1": Parallelism.DOMAIN, "layer2.*": Parallelism.MODEL, "fc": Parallelism.MODEL},
}

NETS: dict[str, Callable[[], Layer]] = {"plain": nets.plain, "residual": nets.residual}

STRATEGIES: dict[str, StrategyFactory] = {
    "blocking": Blocking,
    "sharded": partial(Sharded, options=ShardedOptions(fc_exchange="never")),
    "bucketed": partial(Bucketed, options=BucketedOptions(bucket_bytes=512)),
}

GRIDS = [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2), (5, 1), (7, 1), (13, 1)]


def replica(comm: ThreadCommunicator, model: Layer, plan: ParallelPlan, strategy: StrategyFactory) -> Replica:
    """What a snapshot is taken of, on one rank."""
    task = Task(lambda: model, NumpyKernelSet(), partial(Sgd, momentum=0.9), plan=plan)
    return replica_of(task, comm, virtual_engine(comm), strategy)


def taken(replica: Replica, *, keep: bool = True) -> CheckpointContent:
    return replica.state(POSITION, {"ranks": 1}, keep=keep)


def alone(model: Layer) -> CheckpointContent:
    """A snapshot of one rank, with random numbers for its tensors."""
    random = np.random.default_rng(0)
    found = run_virtual(1, lambda comm: taken(replica(comm, model, ParallelPlan(), Blocking)))[0]
    return CheckpointContent({key: random.standard_normal(value.shape) for key, value in found.tensors.items()}, found.meta)


def reloaded(
    comm: ThreadCommunicator, model: Layer, plan: ParallelPlan, strategy: StrategyFactory, content: CheckpointContent
) -> CheckpointContent:
    """What a replica that has loaded a content has."""
    trained = replica(comm, model, plan, strategy)
    trained.load(content)
    return taken(trained)


def write_shards(comm: ThreadCommunicator, trained: Replica, position: Position, path: Path) -> None:
    """Each rank writes its share to a shard; rank 0 publishes them."""
    parts, meta = trained.own_parts(position, {"ranks": 1})
    shards = comm.allgather_object(write_shard(partial_path(path, "t"), comm.rank, parts))
    if comm.rank == 0:
        publish(partial_path(path, "t"), path, shards, meta)
    comm.allgather_object(None)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("default", list(Parallelism))
def test_what_is_put_is_taken_again(net: str, strategy: str, default: Parallelism) -> None:
    """Up to more ranks than channels, so that some hold nothing."""
    content = alone(NETS[net]())

    def again(comm: ThreadCommunicator, plan: ParallelPlan) -> CheckpointContent:
        trained = replica(comm, NETS[net](), plan, STRATEGIES[strategy])
        assert trained.load(content) == POSITION
        assert trained.global_step == POSITION.global_step
        return taken(trained, keep=comm.rank == 0)

    use = MIXED[net] if default is Parallelism.BATCH else {}
    for rows, cols in GRIDS:
        plan = ParallelPlan(rows, cols, default, use)
        first, *others = run_virtual(rows * cols, partial(again, plan=plan), seed=rows)
        assert first.meta == content.meta
        assert first.tensors.keys() == content.tensors.keys()
        for key, value in content.tensors.items():
            assert np.array_equal(first.tensors[key], value), f"{key} on {rows} x {cols}"
        assert all(not other.tensors for other in others)


def test_a_snapshot_of_another_model_is_refused_by_its_whole_shape() -> None:
    content = alone(nets.plain(classes=6))

    def put(comm: ThreadCommunicator) -> str:
        with pytest.raises(CheckpointError) as caught:
            replica(comm, nets.plain(), ParallelPlan(2, 1, Parallelism.MODEL), Blocking).load(content)
        return str(caught.value)

    for message in run_virtual(2, put):
        assert "parameters/fc2.weight has shape (11, 6) in the checkpoint and (11, 5) here" in message


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 3)])
def test_lazy_starts_with_empty_sums_where_others_kept_none(rows: int, cols: int) -> None:
    content, lazy = alone(nets.plain()), partial(Lazy, options=LazyOptions(layers=2, bucket_bytes=512))
    for again_taken in run_virtual(
        rows * cols, lambda comm: reloaded(comm, nets.plain(), ParallelPlan(rows, cols), lazy, content)
    ):
        added = {key for key in again_taken.tensors if key.startswith("optimizer/lazy_gradient/")}
        assert len(added) == 4
        assert not any(np.any(again_taken.tensors[key]) for key in added)
        for key, value in content.tensors.items():
            assert np.array_equal(again_taken.tensors[key], value), key


@pytest.mark.parametrize(
    "other", [Blocking, STRATEGIES["sharded"], partial(Lazy, options=LazyOptions(layers=1, bucket_bytes=512))]
)
def test_gradients_that_lazy_has_added_up_are_never_dropped(other: StrategyFactory) -> None:
    random = np.random.default_rng(0)
    lazy = partial(Lazy, options=LazyOptions(layers=2, bucket_bytes=512))
    empty = run_virtual(1, lambda comm: taken(replica(comm, nets.plain(), ParallelPlan(), lazy)))[0]
    key = "optimizer/lazy_gradient/conv2.weight"
    full = CheckpointContent({**empty.tensors, key: random.standard_normal(empty.tensors[key].shape)}, empty.meta)

    def put(comm: ThreadCommunicator, content: CheckpointContent) -> Position:
        return replica(comm, nets.plain(), ParallelPlan(1, 2), other).load(content)

    assert run_virtual(2, partial(put, content=empty)) == [POSITION, POSITION]
    with pytest.raises(
        CheckpointError, match=r"holds gradients of 1 parameters \(conv2.weight first\) that the averager lazy has not applied"
    ):
        run_virtual(2, partial(put, content=full))


SPARSE = partial(Sparse, options=SparseOptions(compress="always", least_elements=40, bucket_bytes=512, two_level=False))


@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (1, 2), (1, 1), (2, 2)])
def test_the_sum_of_what_nodes_keep_back_goes_on_on_any_grid(rows: int, cols: int) -> None:
    """As many nodes keep each its own; other numbers of nodes, and slices that are sent whole now, have the sum."""
    random = np.random.default_rng(0)
    empty = run_virtual(3, lambda comm: taken(replica(comm, nets.plain(), ParallelPlan(1, 3), SPARSE)))[0]
    kept = {key: random.standard_normal(value.shape) for key, value in empty.tensors.items() if "sparse_gradient" in key}
    assert len(kept) == 4
    content = CheckpointContent({**empty.tensors, **kept}, empty.meta)
    plan = ParallelPlan(rows, cols, Parallelism.MODEL)
    for found in run_virtual(rows * cols, lambda comm: reloaded(comm, nets.plain(), plan, SPARSE, content)):
        for key, value in kept.items():
            if (rows, cols) == (1, 3):
                assert np.array_equal(found.tensors[key], value)
            np.testing.assert_allclose(found.tensors[key].sum(axis=0), value.sum(axis=0), rtol=0, atol=1e-14)

    def dropped(comm: ThreadCommunicator) -> None:
        replica(comm, nets.plain(), plan, STRATEGIES["sharded"]).load(content)

    with pytest.raises(CheckpointError, match=r"holds gradients of 4 .* that the averager sparse has .* density 1 of sparse"):
        run_virtual(rows * cols, dropped)


def _lazy(layers: int = 2) -> StrategyFactory:
    return partial(Lazy, options=LazyOptions(layers=layers, bucket_bytes=512, fc_exchange="never", max_interval=4, check_every=1))


def _held(content: CheckpointContent) -> dict[str, np.ndarray]:
    return {key: values for key, values in content.tensors.items() if key.startswith("optimizer/lazy_gradient/")}


@pytest.mark.parametrize("strategy", [STRATEGIES["sharded"], _lazy(), partial(Sparse, options=SparseOptions(two_level=False))])
def test_a_rank_loads_alone(strategy: StrategyFactory) -> None:
    """Another one that cannot read its part reports it, instead of leaving this one waiting."""
    content = alone(nets.plain())

    def load_on_one(comm: ThreadCommunicator) -> None:
        trained = replica(comm, nets.plain(), ParallelPlan(cols=2), strategy)
        assert comm.rank or trained.load(content) == POSITION
        comm.allgather_object(None)

    run_virtual(2, load_on_one)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("net", "rows", "cols", "default"), [("plain", 1, 2, _B), ("plain", 2, 2, _M), ("narrow", 3, 1, _M)])
def test_a_resume_of_lazy_is_bitwise_at_any_step(net: str, rows: int, cols: int, default: Parallelism) -> None:
    """With several groups of parameters, too, and where ranks hold nothing of a layer; whether or not a checkpoint was taken."""
    model = {**NETS, "narrow": partial(nets.narrow, 5)}[net]
    task = Task(model, NumpyKernelSet(), partial(Sgd, momentum=0.9), batch=7, steps=12, plan=ParallelPlan(rows, cols, default))

    def program(comm: ThreadCommunicator) -> list[bool]:
        def new() -> Replica:
            return replica_of(task, comm, virtual_engine(comm), _lazy(3))

        def state(trained: Replica) -> CheckpointContent:
            trained.settle()
            trained.drain()
            content = trained.state(Position(global_step=trained.global_step), {})
            return CheckpointContent({key: values.copy() for key, values in content.tensors.items()}, content.meta)

        through, stopping = new(), new()
        steps = list(batches(task, through.groups.position, comm.size, through.tiles))
        states = [state(stopping)]
        for batch in steps:
            through.step(batch, task.lr)
            stopping.step(batch, task.lr)
            states.append(state(stopping))
        assert_same(state(through), states[-1])
        for step, content in enumerate(states):
            again, until = new(), min(step + 4, task.steps)  # past an averaging
            again.load(content)
            for batch in steps[step:until]:
                again.step(batch, task.lr)
            assert_same(state(again), states[until])
        return [any(np.any(values) for values in _held(content).values()) for content in states]

    for kept_back in run_virtual(rows * cols, program, seed=rows, deadline_seconds=240):
        assert sum(kept_back) > 3


def with_held_gradients(comm: ThreadCommunicator, strategy: StrategyFactory) -> Replica:
    """A replica on one of three ranks, whose gradients that are kept back are random numbers."""
    trained = replica(comm, nets.plain(), ParallelPlan(1, 3), strategy)
    random = np.random.default_rng(comm.rank)
    for averager in trained.averagers.values():
        for values in averager.held_gradients().values():
            values[...] = random.standard_normal(values.shape)
    return trained


def test_each_holder_gets_back_its_own_and_others_the_sum() -> None:
    """Gradients of every holder are in a checkpoint; split layers are whole there, and go to another grid."""
    model = nets.plain()
    strategy = _lazy(99)
    content = run_virtual(3, lambda comm: taken(with_held_gradients(comm, strategy)))[0]
    assert all(values.shape[0] == 3 for values in _held(content).values())
    for rows, cols in ((1, 3), (1, 2), (2, 2), (3, 1), (2, 3)):
        again = partial(reloaded, model=model, plan=ParallelPlan(rows, cols, _M), strategy=strategy, content=content)
        for found in run_virtual(rows * cols, again):
            assert found.meta["averaging"] == content.meta["averaging"] or rows > 1
            for key, values in _held(content).items():
                if len(_held(found)[key]) == 3:
                    np.testing.assert_array_equal(_held(found)[key], values)
                else:
                    np.testing.assert_array_equal(_held(found)[key][0], values.sum(axis=0))
                    assert not np.any(_held(found)[key][1:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_with_the_sum_of_all_holders_goes_on(ranks: int) -> None:
    """As they were written before every holder's own was kept."""
    model = nets.plain()
    content = run_virtual(1, lambda comm: taken(replica(comm, model, ParallelPlan(), _lazy())))[0]
    random = np.random.default_rng(2)
    sums = {key: random.standard_normal(values.shape[1:]) for key, values in _held(content).items()}
    old = CheckpointContent(
        {**content.tensors, **sums}, {key: value for key, value in content.meta.items() if key != "averaging"}
    )
    for found in run_virtual(ranks, lambda comm: reloaded(comm, model, ParallelPlan(1, ranks), _lazy(), old)):
        for key, values in sums.items():
            np.testing.assert_array_equal(_held(found)[key][0], values)
            assert not np.any(_held(found)[key][1:])


def test_momentum_without_a_place_is_never_dropped() -> None:
    content = alone(nets.plain())
    stray = CheckpointContent({**content.tensors, "optimizer/other/conv1.weight": np.ones(3)}, content.meta)
    with pytest.raises(CheckpointError, match=r"holds the other of 1 parameters \(conv1.weight first\)"):
        run_virtual(1, lambda comm: replica(comm, nets.plain(), ParallelPlan(), Blocking).load(stray))


def test_a_position_in_steps_is_whole_where_all_steps_were_alike():
    for samples, batch in ((75, 16), (64, 16), (7, 9)):
        steps = -(-samples // batch)
        for epoch, step in ((0, 0), (2, 0), (5, steps - 1)):
            assert Position(epoch, step * batch).in_steps(samples, batch) == epoch * steps + step
    assert Position(1, 8).in_steps(75, 16) == 5.5


ROUNDED: StrategyFactory = partial(Sharded, options=ShardedOptions(fc_exchange="never", wire_parameters="bfloat16"))


def _with_errors(content: CheckpointContent) -> CheckpointContent:
    """A snapshot of parameters that travel in 16 bits: the rounded ones, and what rounding took away."""
    tensors = dict(content.tensors)
    for key, exact in content.tensors.items():
        if key.startswith("parameters/"):
            tensors[key] = exact.astype(np.float16).astype(exact.dtype)
            tensors[optimizer_key(PARAMETER_ERROR, key.removeprefix("parameters/"))] = exact - tensors[key]
    return CheckpointContent(tensors, content.meta)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (2, 2), (3, 2)])
def test_rounded_parameters_and_what_rounding_took_away_are_put_and_taken_again(rows: int, cols: int) -> None:
    exact = alone(nets.residual())
    content = _with_errors(exact)

    def program(comm: ThreadCommunicator, strategy: StrategyFactory, given: CheckpointContent) -> CheckpointContent:
        trained = replica(comm, nets.residual(), ParallelPlan(rows, cols, Parallelism.BATCH, MIXED["residual"]), strategy)
        trained.load(given)
        return taken(trained, keep=comm.rank == 0)

    def put(strategy: StrategyFactory, given: CheckpointContent) -> dict[str, np.ndarray]:
        return dict(run_virtual(rows * cols, partial(program, strategy=strategy, given=given))[0].tensors)

    same = put(ROUNDED, content)
    assert all(np.array_equal(content.tensors[key], value) for key, value in same.items())
    # A group of one rank sends nothing, and makes its parameters exact.
    assert any(PARAMETER_ERROR in key for key in same)
    for strategy in (Blocking, STRATEGIES["sharded"]):  # no rank keeps errors now: the parameters are exact, and nothing is lost
        plain = put(strategy, content)
        assert plain.keys() == exact.tensors.keys()
        assert all(np.array_equal(exact.tensors[key], value) for key, value in plain.items())
    begun = put(ROUNDED, exact)  # nothing has been rounded yet
    for key, value in begun.items():
        assert np.array_equal(exact.tensors[key], value) if key in exact.tensors else not value.any()


def test_a_position_stores_no_empty_optional_fields() -> None:
    assert POSITION.to_meta() == {"epoch": 2, "samples": 6, "global_step": 17, "sums": asdict(POSITION.sums)}
    assert Position.from_meta({"position": POSITION.to_meta()}) == POSITION
    eventful = replace(POSITION, skipped=3, skipped_in_a_row=1, reorderings=(Reordering(0, 5, 1), Reordering(2, 0, 2)))
    again = Position.from_meta(json.loads(json.dumps({"position": eventful.to_meta()})))
    assert again == eventful
    assert again.reorderings[1].number == 2


RESIDUAL, WEIGHT = "sparse_gradient", "fc1.weight"
KEY = optimizer_key(RESIDUAL, WEIGHT)  # (72, 11): over 3 ranks 288, 288 and 216 elements
TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.5), batch=9, steps=3)

#: a grid whose data groups keep back unlike much, with ranks of a node and a least size of what is not sent whole
UNLIKE_GRIDS = {
    "the last part is sent whole": ((3, 2), 1, 250),
    "the last group has fewer nodes": ((2, 4), 5, 250),  # 3 + 1 ranks, of which each is a holder, and 2 + 2
}


def _strategy(least_elements: int, *, two_level: bool = True) -> StrategyFactory:
    options = SparseOptions(density=0.1, compress="always", least_elements=least_elements, two_level=two_level)
    return partial(Sparse, options=options)


def _replica(comm: ThreadCommunicator, grid: tuple[int, int], strategy: StrategyFactory) -> tuple[Task, Replica]:
    task = replace(TASK, plan=ParallelPlan(*grid, Parallelism.MODEL))
    return task, replica_of(task, comm, virtual_engine(comm), strategy)


def _steps(replica: Replica, task: Task, first: int, stop: int) -> None:
    groups = replica.groups
    for batch in list(batches(task, groups.position, groups.all_ranks.size, replica.tiles))[first:stop]:
        replica.step(batch, task.lr)
    replica.settle()
    replica.drain()


def _state(replica: Replica) -> CheckpointContent:
    return replica.state(Position(global_step=replica.global_step), {"ranks": 1}, copied=True)


@dataclass(frozen=True)
class _Course:
    """A training's state before its last step, that of another one that has loaded it, and both at their ends.

    holders: those of this rank's part of the weight before the last step.
    """

    taken: CheckpointContent
    loaded: CheckpointContent
    end: CheckpointContent
    end_of_loaded: CheckpointContent
    holders: int


def _course(comm: ThreadCommunicator, grid: tuple[int, int], least_elements: int, path: Path) -> _Course:
    """The course of a training; its state before the last step is written to shards, too."""
    task, trained = _replica(comm, grid, _strategy(least_elements))
    _steps(trained, task, 0, 2)
    content = _state(trained)
    (averager,) = (one for one in trained.averagers.values() if WEIGHT in one.group.parameters)
    holders = len(averager.full_state(averager.group.parameters[WEIGHT]).get(RESIDUAL, ()))
    write_shards(comm, trained, Position(global_step=2), path)
    _steps(trained, task, 2, 3)
    _, again = _replica(comm, grid, _strategy(least_elements))
    again.load(content)
    loaded = _state(again)
    _steps(again, task, 2, 3)
    return _Course(content, loaded, _state(trained), _state(again), holders)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "per_node", "least_elements"), UNLIKE_GRIDS.values(), ids=UNLIKE_GRIDS)
def test_groups_that_keep_back_unlike_much_write_whole_tensors_and_go_on_with_the_same_bits(
    grid: tuple[int, int], per_node: int, least_elements: int, tmp_path: Path
) -> None:
    path = checkpoint_path(tmp_path, 2, sharded=True)
    course = partial(_course, grid=grid, least_elements=least_elements, path=path)
    courses = run_virtual(grid[0] * grid[1], course, seed=1, ranks_per_node=per_node)
    holders = {course.holders for course in courses}
    assert len(holders) == 2, "all groups keep back alike"
    content = courses[0].taken
    assert content.tensors[KEY].shape == (max(holders), 72, 11)
    assert content.tensors[KEY].any()
    assert_same(read(path), content)
    for of_rank in courses:
        assert_same(of_rank.taken, content)
        assert_same(of_rank.loaded, content)
        assert_same(of_rank.end_of_loaded, of_rank.end)


def test_what_one_part_alone_has_left_of_an_earlier_run_is_written_again() -> None:
    """Here all is sent whole, and only the parts of which something was kept back remember it, until the first step."""
    before = run_virtual(1, lambda comm: _state(_replica(comm, (1, 1), _strategy(10**9))[1]))[0]
    kept_back = np.zeros((2, 72, 11))
    kept_back[:, :, 1] = np.random.default_rng(0).standard_normal((2, 72))
    content = CheckpointContent({**before.tensors, KEY: kept_back}, before.meta)

    def again(comm: ThreadCommunicator) -> CheckpointContent:
        _, replica = _replica(comm, (3, 2), _strategy(10**9, two_level=False))
        replica.load(content)
        return _state(replica)

    for found in run_virtual(6, again):
        np.testing.assert_array_equal(found.tensors[KEY].sum(axis=0), kept_back.sum(axis=0))


def test_zeros_after_the_last_holder_are_of_no_rank() -> None:
    kept_back = np.random.default_rng(0).standard_normal((4, 3))
    assert np.array_equal(for_holders(kept_back, 4), kept_back)
    assert np.array_equal(for_holders(kept_back, 2), [kept_back.sum(axis=0), np.zeros(3)])
    kept_back[2:] = 0.0
    assert np.array_equal(for_holders(kept_back, 2), kept_back[:2])


SHARD_GRIDS = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (2, 2), (4, 1)]


@pytest.fixture
def small_parts_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_shares, "_SMALLEST_SHARED_BYTES", 300)


def plan_of(rows: int, cols: int) -> ParallelPlan:
    return ParallelPlan(rows, cols, Parallelism.BATCH, MIXED["plain"] if rows > 1 else {})


def save(
    comm: ThreadCommunicator, content: CheckpointContent, grid: tuple[int, int], path: Path, strategy: StrategyFactory
) -> None:
    """Each rank of that grid writes its share of a content to a shard."""
    trained = replica(comm, nets.plain(), plan_of(*grid), strategy)
    trained.load(content)
    write_shards(comm, trained, POSITION, path)


def load(comm: ThreadCommunicator, path: Path, grid: tuple[int, int], strategy: StrategyFactory) -> CheckpointContent:
    trained = replica(comm, nets.plain(), plan_of(*grid), strategy)
    assert trained.load(open_checkpoint(path)) == POSITION
    return trained.state(POSITION, {"ranks": 1}, copied=True)


def assert_same(left: CheckpointContent, right: CheckpointContent) -> None:
    assert left.meta == right.meta
    assert set(left.tensors) == set(right.tensors)
    for key, values in right.tensors.items():
        assert (left.tensors[key].dtype, left.tensors[key].shape) == (values.dtype, values.shape), key
        assert left.tensors[key].tobytes() == values.tobytes(), key


@pytest.mark.usefixtures("small_parts_are_shared")
@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "readers"), [(Blocking, SHARD_GRIDS), (STRATEGIES["sharded"], [(1, 3), (2, 2)])], ids=["blocking", "sharded"]
)
def test_any_ranks_read_what_any_others_wrote(tmp_path: Path, strategy: StrategyFactory, readers: list[tuple[int, int]]) -> None:
    """In a single file, too, and from one to the other."""
    content = alone(nets.plain())
    for number, grid in enumerate(SHARD_GRIDS):
        path, single = checkpoint_path(tmp_path, number, sharded=True), checkpoint_path(tmp_path, number)
        run_virtual(grid[0] * grid[1], partial(save, content=content, grid=grid, path=path, strategy=strategy), seed=number)
        stored = read(path)
        assert_same(stored, content)
        write(single, stored)
        for source, grids in ((path, readers), (single, [readers[number % len(readers)]])):
            for other in grids:
                ranks = other[0] * other[1]
                for taken in run_virtual(ranks, partial(load, path=source, grid=other, strategy=strategy)):
                    assert_same(taken, content)


@pytest.mark.usefixtures("small_parts_are_shared")
def test_each_element_is_written_once_and_shares_are_even(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 7, sharded=True)
    run_virtual(4, partial(save, content=alone(nets.plain()), grid=(2, 2), path=path, strategy=Blocking))
    sizes = [sum(part.size for part in _parts(path, rank)) for rank in range(4)]
    assert sum(sizes) == sum(values.size for values in read(path).tensors.values())
    assert max(sizes) < 1.4 * min(sizes)


def _parts(path: Path, rank: int) -> list[np.ndarray]:
    return list(checkpoint.read(path / f"shard-{rank:05d}.h5").tensors.values())


@pytest.mark.usefixtures("small_parts_are_shared")
def test_a_part_opens_the_shards_that_have_it_only(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 7, sharded=True)
    run_virtual(4, partial(save, content=alone(nets.plain()), grid=(1, 4), path=path, strategy=Blocking))
    tensors = open_checkpoint(path).tensors
    assert isinstance(tensors, ShardedTensors)
    expected = tensors["parameters/fc1.weight"]
    tensors.close()
    for rank in (0, 2, 3):
        (path / f"shard-{rank:05d}.h5").rename(path / f"moved-{rank}")
    begin, stop = 72 // 4, 2 * 72 // 4
    box = ((begin, stop), whole(expected.shape)[1])
    assert np.array_equal(tensors.part("parameters/fc1.weight", box), expected[begin:stop])


@pytest.mark.usefixtures("small_parts_are_shared")
def test_what_ranks_keep_back_is_each_ones_own(tmp_path: Path) -> None:
    strategy = partial(Lazy, options=LazyOptions(layers=2, bucket_bytes=512))
    kept = run_virtual(3, partial(_lazy_on_three_ranks, path=checkpoint_path(tmp_path, 7, sharded=True), strategy=strategy))
    assert_same(kept[1], kept[0])
    assert_same(read(checkpoint_path(tmp_path, 7, sharded=True)), kept[0])
    pending = [key for key in kept[0].tensors if "lazy_gradient" in key]
    assert any(len(np.unique(kept[0].tensors[key])) > 1 for key in pending)


def _lazy_on_three_ranks(comm: ThreadCommunicator, path: Path, strategy: StrategyFactory) -> CheckpointContent:
    trained = with_held_gradients(comm, strategy)
    write_shards(comm, trained, POSITION, path)
    return trained.state(POSITION, {"ranks": 1}, copied=True)
