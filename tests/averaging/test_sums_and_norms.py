"""Norms of whole parameters on grids, in one order; sums of shards and of factors; and the bytes of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging import slicing
from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.group_sums import NORM_BLOCK, JointNorms, ReadSums, ShardGradients, TreeNorms
from hpctrain.averaging.slicing import cut, fused, sufficient_factor_slices
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.sufficient_factors import SufficientFactorExchange, exchanging_layers, linear_layers, moves_less
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.groups import GridAxis, ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.intervals import ShardsOfRank, even
from hpctrain.nn.parameter import FlatGroup, GroupLayout, Parameter, ParameterSpec
from hpctrain.optim.base import Norms, Optimizer
from hpctrain.optim.optimizers import Lars, Sgd
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support.averaging import HIDDEN, INPUTS, OUTPUTS, STRATEGIES, averaged, exchanged, make_group, one_step, shares

GRID_SAMPLES, GRID_STEPS = 7, 6

#: in forward order: (name, shape, whether its rows are split); odd sizes, so that blocks and parts are uneven
WHOLE = (
    ("conv.weight", (5, 3), False),
    ("conv.bias", (5,), False),
    ("fc.weight", (7, 3), True),
    ("fc.bias", (7,), True),
    ("unused", (3, 2), True),
    ("norm.weight", (4,), False),
    ("last.weight", (2, 3), False),
)

GRID_OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "clip": partial(Sgd, momentum=0.9, weight_decay=1e-2, clip_norm=0.3),
    "lars": partial(Lars, weight_decay=1e-2, trust_coefficient=0.1),
    "lars, clip": partial(Lars, weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.3),
    "neither": partial(Sgd, momentum=0.9),
}

GRID_STRATEGIES: dict[str, Callable[..., GradientAverager]] = {
    "blocking": partial(averaged, Blocking),
    "overlap": partial(averaged, Overlap),
    "bucketed": partial(averaged, Bucketed, bucket_bytes=100),
    "sharded": partial(averaged, Sharded, bucket_bytes=60),
    "sharded, window": partial(averaged, Sharded, bucket_bytes=60, window=1, replan=False),
    "priority": partial(averaged, Priority, slice_parameters=4, window=1),
}


def _first_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(sum(name.encode())).standard_normal(shape)


def _rows(count: int, row: int, rows: int) -> slice:
    sizes = even(count, rows)
    begin = sum(sizes[:row])
    return slice(begin, begin + sizes[row])


class _Part:
    """What one rank holds of the network, and how it makes gradients.

    Args:
        samples: this rank's in the group of split parameters, and in that of replicated ones.
    """

    def __init__(self, row: int, rows: int, samples: dict[str, slice]) -> None:
        self.groups: dict[str, FlatGroup] = {}
        self._samples = samples
        self._at: dict[str, slice] = {}
        names = [name for name, _, _ in WHOLE]
        for group in samples:
            mine = {name: shape for name, shape, split in WHOLE if split is (group == "model") or len(samples) == 1}
            specs = {}
            for name, shape in mine.items():
                self._at[name] = _rows(shape[0], row, rows) if group == "model" else slice(None)
                local = (len(range(shape[0])[self._at[name]]), *shape[1:])
                specs[name] = ParameterSpec(local, lambda random, shape: np.zeros(shape), decay=len(shape) > 1)
            self.groups[group] = FlatGroup(specs, "float64", orders={name: names.index(name) for name in mine})
            for parameter in self.groups[group].parameters.values():
                shape = mine[parameter.name]
                parameter.data[...] = _first_values(parameter.name, shape)[self._at[parameter.name]]

    def forward_order(self) -> list[tuple[str, Parameter]]:
        pairs = [(group, each) for group, flat in self.groups.items() for each in flat.parameters.values()]
        return sorted(pairs, key=lambda pair: pair[1].order)

    def differentiate(self, step: int, group: str, parameter: Parameter) -> None:
        """The sum over this rank's samples; an element's gradient depends on its place in the whole parameter."""
        shape = next(shape for name, shape, _ in WHOLE if name == parameter.name)
        place = np.arange(np.prod(shape)).reshape(shape)[self._at[parameter.name]]
        parameter.grad[...] = 0
        for sample in range(GRID_SAMPLES)[self._samples[group]]:
            parameter.grad[...] += np.sin(parameter.data * (1 + sample) + place + step) / GRID_SAMPLES


def _train(part: _Part, averagers: dict[str, GradientAverager], progress: ProgressEngine) -> dict[str, np.ndarray]:
    """Some steps as a network makes them; copies of what this rank holds."""
    layers = part.forward_order()
    used = [pair for pair in layers if pair[1].name != "unused"]
    for step in range(GRID_STEPS):
        for averager in averagers.values():
            averager.begin_step(0.1)
        for group, parameter in used:
            averagers[group].before_forward([parameter])
            progress.poll()
        for group, parameter in reversed(used):
            part.differentiate(step, group, parameter)
            averagers[group].grad_ready(parameter)
            averagers[group].data_free(parameter)
        for averager in averagers.values():
            averager.end_backward()
    for averager in averagers.values():
        averager.drain()
    return {parameter.name: parameter.data.copy() for _, parameter in layers}


def _alone(optimizer: str) -> dict[str, np.ndarray]:
    comm, engine = lone_rank()
    part = _Part(0, 1, {"all": slice(None)})
    return _train(part, {"all": averaged(Blocking, part.groups["all"], GRID_OPTIMIZERS[optimizer](), comm, engine)}, engine)


def _on_grid(
    strategy: str, optimizer: str, rows: int, cols: int, virtual: ThreadCommunicator, counters: Counters | None = None
) -> dict[str, np.ndarray]:
    engine = virtual_engine(virtual)
    comm: Communicator = virtual if counters is None else CountingCommunicator(virtual, counters)
    grid = ProcessGrid(comm, rows, cols)
    part = _Part(grid.row, rows, {"all": _rows(GRID_SAMPLES, comm.rank, comm.size), "model": _rows(GRID_SAMPLES, grid.col, cols)})
    norms = JointNorms(comm, engine, tuple(part.groups.values()))
    comms: dict[str, Communicator] = {"all": comm, "model": grid.along(GridAxis.DATA)}
    averagers = {
        name: GRID_STRATEGIES[strategy](group, GRID_OPTIMIZERS[optimizer](), comms[name], engine, norms=norms)
        for name, group in part.groups.items()
    }
    return _train(part, averagers, engine)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", GRID_OPTIMIZERS)
@pytest.mark.parametrize("strategy", GRID_STRATEGIES)
@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (1, 3), (2, 1)], ids=str)
def test_a_grid_with_split_layers_equals_one_process(grid: tuple[int, int], strategy: str, optimizer: str) -> None:
    rows, cols = grid
    whole = _alone(optimizer)
    for seed in (None, 1):
        results = run_virtual(rows * cols, lambda comm: _on_grid(strategy, optimizer, rows, cols, comm), seed=seed)
        for rank, found in enumerate(results):
            for name, shape, split in WHOLE:
                expected = whole[name][_rows(shape[0], rank % rows, rows)] if split else whole[name]
                assert np.linalg.norm(found[name] - expected) <= 1e-10 * max(1e-3, np.linalg.norm(expected)), (rank, name)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["clip", "lars, clip"])
@pytest.mark.parametrize("strategy", GRID_STRATEGIES)
def test_no_schedule_of_messages_changes_a_bit(strategy: str, optimizer: str) -> None:
    expected = run_virtual(6, lambda comm: _on_grid(strategy, optimizer, 3, 2, comm))
    for seed in range(6):
        for rank, found in enumerate(run_virtual(6, lambda comm: _on_grid(strategy, optimizer, 3, 2, comm), seed=seed)):
            for name, _, split in WHOLE:
                assert found[name].tobytes() == expected[rank][name].tobytes(), (seed, rank, name)
                twin = expected[rank % 3 if split else 0][name]
                assert found[name].tobytes() == twin.tobytes(), "copies of a parameter differ"


@pytest.mark.parametrize(("optimizer", "messages"), [("lars, clip", GRID_STEPS), ("neither", 0)])
def test_the_norms_of_all_groups_are_one_message_a_step_if_they_are_needed(optimizer: str, messages: int) -> None:
    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        counters = Counters()
        _on_grid("sharded", optimizer, 2, 2, comm, counters)
        norms = counters.total(operation="iallreduce")
        return norms.operations, norms.payload_bytes

    assert run_virtual(4, program) == [(messages, messages * 2 * 8 * len(WHOLE))] * 4


SIZES = (3, 5 * NORM_BLOCK + 7, 0, 40, 2 * NORM_BLOCK - 50, NORM_BLOCK)


def _group() -> FlatGroup:
    specs = {f"p{i}": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for i, size in enumerate(SIZES)}
    group = FlatGroup(specs, "float64")
    random = np.random.default_rng(0)
    for flat in (group.data, group.grad):
        flat[...] = random.standard_normal(group.size) * 10.0 ** random.integers(-3, 4, group.size)
    return group


def _whole(group: FlatGroup) -> np.ndarray:
    norms = TreeNorms(group, [(0, group.size)])
    norms.clear(slice(None))
    norms.add_partial(group, group.segments)
    norms.complete(slice(None))
    return norms.squares


@given(st.integers(1, 9), st.integers(1, 8 * NORM_BLOCK), st.integers(50, 8 * NORM_BLOCK))
def test_any_slices_on_any_ranks_have_the_bits_of_one(ranks: int, least: int, most: int) -> None:
    group = _group()
    slices = cut(group, fused(group, least), most, NORM_BLOCK)
    assert sum(sum(piece.counts(ranks)) for piece in slices) == group.size
    parts = [piece.part(rank, ranks) for piece in slices for rank in range(ranks)]
    of_ranks = [TreeNorms(group, parts) for _ in range(ranks)]
    for rank, norms in enumerate(of_ranks):
        norms.clear(slice(None))
        for piece in slices:
            norms.add_partial(group, group.covering(*piece.part(rank, ranks)))
    total = np.sum([norms.message(slice(None)) for norms in of_ranks], axis=0)
    of_ranks[0].message(slice(None))[...] = total
    of_ranks[0].complete(slice(None))
    assert of_ranks[0].squares.tobytes() == _whole(group).tobytes()


def test_tree_norms_equal_the_plain_norms() -> None:
    group = _group()
    plain = Norms(group)
    plain.add_partial(group, group.segments)
    assert np.allclose(_whole(group), plain.squares, rtol=1e-13, atol=0)
    assert _whole(group).tobytes() != plain.squares.tobytes()  # another order: bits are compared for a reason


def test_some_places_are_cleared_summed_and_completed_alone() -> None:
    group = _group()
    norms = TreeNorms(group, [(0, group.size)])
    norms.add_partial(group, group.segments)
    norms.complete(slice(None))
    before = norms.squares.copy()
    norms.clear(slice(1, 3))
    assert not norms.message(slice(1, 3)).any()
    assert norms.message(slice(3, 6)).all()
    norms.complete(slice(1, 3))
    assert not norms.squares[1:3].any()
    assert np.array_equal(norms.squares[3:], before[3:])


@given(cut=st.integers(0, 70), begin=st.integers(0, 70), size=st.integers(0, 70), written=st.integers(0, 1))
def test_sums_of_a_part_are_those_before_its_write(cut: int, begin: int, size: int, written: int) -> None:
    group = make_group()
    owned = group.covering(min(begin, group.size), min(begin + size, group.size))
    parts = [group.covering(0, cut), group.covering(cut, group.size)]
    reads = ReadSums(group, parts, owned)
    sums = np.concatenate([fetch.result() for fetch in reads.complete()])
    assert int(sums.sum(dtype=np.uint32)) == int(group.data.view(np.uint32).sum(dtype=np.uint32))
    assert len(sums) == len(reads.names) == len(reads.owned)
    assert any(reads.owned) == any(segment.size for segment in owned)
    take = reads.begin()
    take(written)
    first, last = ((0, min(cut, group.size)), (min(cut, group.size), group.size))[written]
    group.data[first:last] += 1.0
    assert np.concatenate([fetch.result() for fetch in reads.complete()]).tolist() == sums.tolist()
    take(1 - written)  # what a step posts late does not reach the next one
    after = np.concatenate([fetch.result() for fetch in reads.complete()])
    assert (after != sums).any() == (first < last)


def _terms(shares: np.ndarray, share: ShardsOfRank) -> list[np.ndarray]:
    own = shares.copy()
    for step in share.additions:
        own[step.left] += own[step.right]
    return [own[place] for place in share.sums]


@pytest.mark.parametrize(
    ("shards", "ranks"), [(1, 1), (8, 1), (8, 2), (8, 8), (6, 1), (6, 2), (6, 3), (12, 2), (24, 8), (24, 1), (7, 1)]
)
@pytest.mark.parametrize("homes", [False, True])
def test_a_step_leaves_the_terms_of_the_tree(shards: int, ranks: int, homes: bool) -> None:
    for rank in range(ranks):
        share = ShardsOfRank(rank, ranks, shards)
        group = make_group()
        gradients = ShardGradients(group, share, homes=homes)
        random = np.random.default_rng(rank)
        for _ in range(2):  # buffers serve again
            own = (random.standard_normal((share.count, group.size)) * 10.0 ** random.integers(-5, 6)).astype(group.dtype)
            for place, shard in enumerate(own):
                for parameter in group.parameters.values():
                    home = gradients.buffer_for(parameter, place)
                    segment = group.segment(parameter.name)
                    home[...] = shard[segment.start : segment.stop].reshape(home.shape)
                    gradients.add(parameter, place) if place < share.count - 1 else gradients.complete(parameter)
            found = gradients.terms(1, group.size)
            for term, expected in zip(found if isinstance(found, tuple) else (found,), _terms(own, share), strict=True):
                assert term.tobytes() == expected[1:].tobytes()


@pytest.mark.parametrize(("shards", "most"), [(1, 0), (2, 1), (8, 3), (16, 4), (64, 6), (6, 2), (7, 2)])
def test_there_are_few_buffers(shards: int, most: int) -> None:
    assert len(ShardGradients(make_group(), ShardsOfRank(0, 1, shards))._buffers) == most


def test_homes_are_the_groups_own_where_nothing_waits() -> None:
    group = make_group()
    parameter = next(iter(group.parameters.values()))
    for homes, own in ((False, [True] * 4), (True, [False, True, False, True])):
        gradients = ShardGradients(group, ShardsOfRank(0, 1, 4), homes=homes)
        assert [gradients.buffer_for(parameter, place) is parameter.grad for place in range(4)] == own


def test_parameters_need_not_keep_step_with_each_other() -> None:
    """Side by side, shards bring the gradients of one layer before those of the next."""
    group = make_group()
    gradients = ShardGradients(group, ShardsOfRank(0, 1, 4))
    for parameter in reversed(group.parameters.values()):
        for place in range(4):
            parameter.grad[...] = 10.0**place
            gradients.add(parameter, place) if place < 3 else gradients.complete(parameter)
    assert {value for parameter in group.parameters.values() for value in parameter.grad.ravel().tolist()} == {1111.0}


def test_terms_may_be_asked_for_until_the_next_step_adds_a_shard() -> None:
    """Messages are posted when their turn comes, which may be under the first forward of the next step."""
    group = make_group()
    gradients = ShardGradients(group, ShardsOfRank(0, 2, 6))
    for shard in range(3):
        group.grad[...] = shard + 1.0
        for parameter in group.parameters.values() if shard < 2 else ():
            gradients.add(parameter, shard)
    for parameter in reversed(group.parameters.values()):
        gradients.complete(parameter)
    gradients.start()
    found = gradients.terms(0, group.size)
    assert isinstance(found, tuple)
    assert [set(term.tolist()) for term in found] == [{3.0}, {3.0}]


FACTOR_INPUTS, FACTOR_OUTPUTS = 11, 3


def _spec(*shape: int, sufficient_factors: bool = True) -> ParameterSpec:
    return ParameterSpec(shape, lambda random, shape: np.zeros(shape), sufficient_factors=sufficient_factors)


@pytest.mark.parametrize("counts", [(2, 2), (3, 0, 1), (0, 0, 4, 5), (9, 9, 9)])  # the last one: more than the nominal batch
@pytest.mark.parametrize("sends", [True, False])
def test_rows_of_the_gradient_are_those_of_one_process(counts: tuple[int, ...], sends: bool) -> None:
    random = np.random.default_rng(3)
    x, dy = random.standard_normal((sum(counts), FACTOR_INPUTS)), random.standard_normal((sum(counts), FACTOR_OUTPUTS))
    ranks = len(counts)

    def program(comm: ThreadCommunicator) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
        group = FlatGroup({"w": _spec(FACTOR_INPUTS, FACTOR_OUTPUTS), "b": _spec(FACTOR_OUTPUTS)}, "float64")
        slices = sufficient_factor_slices(group, "w", ("b",), ranks, 1)
        exchange = SufficientFactorExchange(group, slices, comm, 8)
        engine = virtual_engine(comm)

        def wait(handle: Handle) -> None:
            engine.wait_handle(handle, "exchange")

        first = sum(counts[: comm.rank])
        own = slice(first, first + counts[comm.rank])
        exchange.begin_step(counts)
        exchange.pack_inputs(x[own] if sends else None)
        wait(exchange.post_inputs())
        exchange.pack_errors(dy[own] if sends else None)
        wait(exchange.post_errors())
        for piece in range(len(slices)):
            exchange.multiply(piece)
        return [piece.part(comm.rank, ranks) for piece in slices], group.grad, group.parameters["b"].grad

    gradient = (x.T @ dy).reshape(-1) if sends else np.zeros(FACTOR_INPUTS * FACTOR_OUTPUTS)
    covered = []
    for parts, grad, bias in run_virtual(ranks, program):
        np.testing.assert_allclose(bias, dy.sum(0) if sends else 0.0, rtol=1e-12, atol=1e-12)
        for start, stop in parts:
            np.testing.assert_allclose(grad[start:stop], gradient[start:stop], rtol=1e-12, atol=1e-12)
            covered += range(start, stop)
    assert sorted(covered) == list(range(FACTOR_INPUTS * FACTOR_OUTPUTS))


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 1000), st.integers(2, 64))
def test_the_exchange_is_chosen_where_it_moves_less(inputs: int, outputs: int, batch: int, ranks: int) -> None:
    """Against P times the elements that leave a rank, without the parameters' gather, which both need."""
    exchange, gradients = inputs * batch / ranks + outputs * batch, inputs * outputs
    assert moves_less(inputs, outputs, batch, ranks) == (exchange < gradients)
    layout = GroupLayout({"w": _spec(inputs, outputs), "b": _spec(outputs)})
    found = exchanging_layers(layout, ranks, "auto", batch, 1)
    assert found == ({"w": ("b",)} if exchange < gradients else {})


def test_which_layers_may_exchange() -> None:
    layout = make_group()
    layers = {"a.weight": ("a.bias",), "unused.weight": ("unused.bias",), "b.weight": ("b.bias",)}
    assert linear_layers(layout) == layers
    assert exchanging_layers(layout, 2, "always", None, 1) == layers
    assert exchanging_layers(layout, 2, "auto", None, 1) == {}  # the batch is not known
    assert exchanging_layers(layout, 1, "auto", 1, 1) == {}  # one rank
    assert exchanging_layers(layout, 2, "always", None, 2) == {}  # several micro-batches
    assert exchanging_layers(layout, 2, "never", 1, 1) == {}
    assert exchanging_layers(GroupLayout({"w": _spec(0, 4)}), 2, "always", 1, 1) == {}  # nothing of it is here


OPERATIONS = {
    OperationKind.ALLREDUCE: "iallreduce",
    OperationKind.REDUCE_SCATTER: "ireduce_scatter",
    OperationKind.ALLGATHER: "iallgather",
    OperationKind.INPUTS: "ialltoall",
}

ITEM_BYTES = 8
PAIR_BYTES = ITEM_BYTES + 4  # with its position


def _count(strategy: str, ranks: int) -> list[tuple[Counters, dict[OperationKind, int]]]:
    """Of each rank: the counters of one step, and what its schedule says."""
    kind, options = STRATEGIES[strategy]

    def program(comm: ThreadCommunicator) -> tuple[Counters, dict[OperationKind, int]]:
        counters = Counters()
        counting = CountingCommunicator(comm, counters)
        averager = averaged(kind, make_group(), Sgd(), counting, virtual_engine(comm), **options)
        for step in range(7):  # past any new ordering
            one_step(averager, step)
        averager.drain()
        before = counters.snapshot()
        one_step(averager, 7)
        averager.drain()
        assert averager.schedule is not None
        return counters.since(before), dict(exchanged(averager.schedule, comm.rank, shares(7, ranks)))

    return run_virtual(ranks, program)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_hands_over_what_its_schedule_says(strategy: str, ranks: int) -> None:
    for counters, expected in _count(strategy, ranks):
        expected[OperationKind.ALLGATHER] = expected.get(OperationKind.ALLGATHER, 0) + expected.pop(OperationKind.ERRORS, 0)
        pairs = expected.pop(OperationKind.SPARSE, 0) // 2
        for kind, operation in OPERATIONS.items():
            n_bytes = ITEM_BYTES * expected.get(kind, 0) + (PAIR_BYTES * pairs if kind is OperationKind.ALLGATHER else 0)
            assert counters.total(operation=operation).exchanged_bytes == n_bytes, operation


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("strategy", ["overlap", "bucketed", "sharded", "priority", "lazy, every step"])
def test_gradients_and_parameters_together_are_one_allreduce(strategy: str, ranks: int) -> None:
    n = make_group().size
    total = sum(counters.total().exchanged_bytes for counters, _ in _count(strategy, ranks))
    assert total == 2 * (ranks - 1) * n * ITEM_BYTES


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_exchange_moves_inputs_errors_and_rows(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Per linear layer K b + M B + K M, (P - 1) / P of it on average; biases are complete without a message."""
    linear = ((INPUTS, HIDDEN), (2, 3), (HIDDEN, OUTPUTS))
    rest = make_group().size - sum(k * m + m for k, m in linear)
    batch = sum(shares(7, ranks))
    inputs = 0
    for k, _ in linear:
        for rank, count in enumerate(shares(7, ranks)):
            inputs += count * (k - k // ranks - (rank < k % ranks))
    expected = (ranks - 1) * (2 * rest + sum(m * batch + k * m for k, m in linear)) + inputs
    for least_rows in (slicing._LEAST_ROWS, 1):  # whole weights, and weights in slices of few rows
        monkeypatch.setattr(slicing, "_LEAST_ROWS", least_rows)
        monkeypatch.setitem(STRATEGIES, "exchange", (Sharded, {"bucket_bytes": 16, "fc_exchange": "always"}))  # type: ignore[arg-type]
        total = sum(counters.total().exchanged_bytes for counters, _ in _count("exchange", ranks))
        assert total == expected * ITEM_BYTES
