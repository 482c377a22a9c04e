"""One rank's part of a network: which parameters it holds, who contributes for a statistic, and what each rank must read."""

import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.boxes import consecutive, even_intervals
from hpctrain.comm.grid import ProcessGrid
from hpctrain.data.loader import cut
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import Network
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain.parallel.redistribute import RedistributeOperator
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets

SHAPE = (9, 7, 3)
_D, _M = Parallelism.DOMAIN, Parallelism.MODEL


def _network(comm: ThreadCommunicator, model: Layer, plan: ParallelPlan) -> tuple[Network, GridGroups, GridDistribution]:
    engine = virtual_engine(comm)
    groups = GridGroups(ProcessGrid(comm, plan.rows, plan.cols))
    group = groups.split_group(engine)
    assert group is not None
    distribution = GridDistribution(plan, group)
    mergers = groups.mergers(engine)
    network = Network(model, SHAPE, NumpyKernelSet(), dtype="float64", seed=2, mergers=mergers, distribution=distribution)
    return network, groups, distribution


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_parts_of_parameters_are_those_of_the_whole_network(rows: int) -> None:
    """The first values do not depend on the split; every element of a split parameter lies on one rank."""
    whole = Network(nets.plain(), SHAPE, NumpyKernelSet(), dtype="float64", seed=2)
    plan = ParallelPlan(rows, 1, Parallelism.BATCH, {"conv1": _M, "conv2": _M, "fc1": _M})

    def program(comm: ThreadCommunicator) -> tuple[dict[str, np.ndarray], dict[str, int | None], set[str], set[str]]:
        network, _, _ = _network(comm, nets.plain(), plan)
        dims = {name: None if shard is None else shard.dim for name, shard in network.shards.items()}
        values = {name: parameter.data.copy() for name, parameter in network.parameters.items()}
        return values, dims, set(network.groups["all"].parameters), set(network.groups["model"].parameters)

    results = run_virtual(rows, program)
    _, dims, every, split = results[0]
    assert split == {f"{layer}.{role}" for layer in ("conv1", "conv2", "fc1") for role in ("weight", "bias")}
    assert every == {"fc2.weight", "fc2.bias"}
    for name, parameter in whole.parameters.items():
        parts = [values[name] for values, *_ in results]
        dim = dims[name]
        assert dim == (None if name in every else 1 if name == "fc1.weight" else 0)
        joined = parts[0] if dim is None else np.concatenate(parts, axis=dim)
        np.testing.assert_array_equal(joined, parameter.data, err_msg=name)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("use", [_D, _M])
@pytest.mark.parametrize("rows", [2, 3])
def test_memory_of_a_program_is_the_arena_and_its_messages(rows: int, use: Parallelism, early: bool) -> None:
    """Known before the program is made: one buffer for all moves, and one more for each that travels under computation."""
    names = frozenset(full for full, _ in nets.residual().walk()) if early else frozenset()
    plan = ParallelPlan(rows, 1, use, overlapped=names)

    def program(comm: ThreadCommunicator) -> int:
        network, _, distribution = _network(comm, nets.residual(), plan)
        needed = network.arena_bytes(2, training=True)
        assert distribution.group.buffer_bytes == 0
        made = network.program((2,) * rows, training=True)
        moves = [step.operator for step in made.steps if isinstance(step.operator, RedistributeOperator)]
        apart = sum(move.message_bytes for move in moves if move.begins_early)
        assert needed == made.plan.arena_bytes + distribution.group.buffer_bytes + apart
        assert distribution.group.buffer_bytes > 0
        return apart

    assert (sum(run_virtual(rows, program)) > 0) == (early and use is _D)


def test_optimiser_state_and_gradients_are_a_share() -> None:
    plan = ParallelPlan(3, 1, _M)
    sizes = run_virtual(3, lambda comm: _network(comm, nets.plain(), plan)[0].groups["model"].size)
    whole = Network(nets.plain(), SHAPE, NumpyKernelSet(), dtype="float64").groups["all"].size
    assert sum(sizes) == whole
    assert max(sizes) < 0.4 * whole


@pytest.mark.parametrize("use", Parallelism)
def test_every_statistic_is_spoken_for_once_per_sample(use: Parallelism) -> None:
    counts = (2, 0, 3)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        network, _, _ = _network(comm, nets.residual(), ParallelPlan(3, 1, use))
        network.statistics.batch[...] = 1.0
        return network.statistics.weighted(counts[comm.rank], sum(counts))

    assert (np.sum(run_virtual(3, program), axis=0) == sum(counts)).all()


@pytest.mark.parametrize("use", [_D, _M])
def test_what_must_be_read_is_what_the_program_takes(use: Parallelism) -> None:
    plan = ParallelPlan(2, 2, use)

    def program(comm: ThreadCommunicator) -> None:
        network, groups, distribution = _network(comm, nets.residual(), plan)
        boxes = distribution.tiles_by_counts(network.graph)
        for counts in ((2, 1), (0, 1), (0, 0)):
            box = boxes(counts)[groups.split_rank]
            assert network.program(counts, training=True).x.shape == tuple(stop - start for start, stop in box)
            whole_height = box[1] == (0, SHAPE[0])
            assert whole_height == (use is _M)

    run_virtual(4, program)


@pytest.mark.slow
@pytest.mark.parametrize("net", ["plain", "residual"])
@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize("rows", [2, 4])
def test_evaluation_equals_one_rank(net: str, use: Parallelism, rows: int) -> None:
    """With running statistics, after which training goes on in the same memory."""
    make = nets.plain if net == "plain" else nets.residual
    images = np.random.default_rng(0).standard_normal((5, *SHAPE))
    counts = tuple(stop - start for start, stop in even_intervals(5, rows))

    def fill(network: Network) -> None:
        for name, view in network.statistics.views.items():
            view[...] = np.random.default_rng(len(name)).random(view.shape) + 0.5

    alone = Network(make(), SHAPE, NumpyKernelSet(), dtype="float64", seed=2)
    fill(alone)
    expected = alone.program(5, training=False)
    expected.x[...] = images
    logits = expected.forward(StepContext(training=False)).copy()

    def program(comm: ThreadCommunicator) -> np.ndarray:
        network, _, distribution = _network(comm, make(), ParallelPlan(rows, 1, use))
        fill(network)
        training = network.program(counts, training=True)
        training.x[...] = 1.0
        training.forward(StepContext(sample_ids=np.arange(5), global_count=5))
        evaluation = network.program(counts, training=False)
        evaluation.x[...] = cut(images, distribution.partitioned(network.graph(5), counts).layouts[0].boxes[comm.rank])
        return evaluation.forward(StepContext(training=False)).copy()

    for part, found in zip(consecutive(counts), run_virtual(rows, program), strict=True):
        np.testing.assert_allclose(found, logits[slice(*part)], rtol=1e-11, atol=1e-13)
