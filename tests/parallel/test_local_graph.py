"""Graphs of ranks, told apart by their work alone."""

from collections.abc import Callable

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.layer import Layer
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.local_graph import LocalGraph, local_graphs, training_plan, whole_graph
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.redistribute import RedistributeSpec, ReduceScatterSpec
from hpctrain.parallel.split_group import unused_group
from hpctrain.parallel.transfer import transfer
from tests.support import nets
from tests.support.planned import job_of
from tests.support.training import Task

KERNELS = NumpyKernelSet()


def graphs(
    rows: int,
    use: Parallelism,
    samples: int,
    net: Callable[[], Layer] = nets.plain,
    image_shape: tuple[int, int, int] = (9, 7, 3),
) -> list[LocalGraph]:
    job = job_of(Task(net, KERNELS, Sgd, image_shape))
    counts = tuple(samples for _ in range(rows))
    return local_graphs(partition_graph(job.graph_of(samples * rows), ParallelPlan(rows, 1, use), counts), range(rows))


@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_equal_graphs_need_the_same_memory_and_do_the_same(rows: int, use: Parallelism) -> None:
    by_graph: dict[LocalGraph, tuple[object, ...]] = {}
    for local in graphs(rows, use, 2):
        plan = compile_graph(local.graph, KERNELS, training=True)
        facts = plan.arena_bytes, plan.forward, plan.backward, [step.name for step in plan.steps], plan.tensors
        assert by_graph.setdefault(local, facts) == facts
        assert training_plan(local, KERNELS).arena_bytes == plan.arena_bytes
    assert len(by_graph) <= rows


@pytest.mark.parametrize("use", Parallelism)
def test_moves_have_the_words_of_their_pieces(use: Parallelism) -> None:
    group = unused_group()
    job = job_of(Task(nets.plain, KERNELS, Sgd))
    partitioned = partition_graph(job.graph_of(6), ParallelPlan(3, 1, use), (3, 2, 1))
    for rank, local in enumerate(local_graphs(partitioned, range(3))):
        for node in partitioned.local(rank, group).nodes:
            spec = node.spec
            if isinstance(spec, RedistributeSpec):
                share = transfer(spec.source, spec.target, rank)
                assert (local.moves[node.output].sent, local.moves[node.output].received) == (share.send_size, share.receive_size)
            elif isinstance(spec, ReduceScatterSpec):
                share = transfer(spec.target, spec.everything, rank)
                assert (local.moves[node.output].received, local.moves[node.output].sent) == (share.send_size, share.receive_size)
            else:
                assert node.output not in local.moves


def test_ranks_inside_of_an_image_are_equal_and_those_at_its_edges_are_not() -> None:
    top, *inside, bottom = graphs(8, Parallelism.DOMAIN, 1, nets.residual, (64, 4, 3))
    assert len({*inside}) < len(inside)
    assert not {top, bottom} & {*inside}


def test_a_graph_of_other_samples_or_names_is_another() -> None:
    job = job_of(Task(nets.plain, KERNELS, Sgd))
    other = job_of(Task(nets.residual, KERNELS, Sgd))
    assert whole_graph(job.graph_of(2)) == whole_graph(job.graph_of(2))
    assert len({whole_graph(one) for one in (job.graph_of(2), job.graph_of(3), other.graph_of(2))}) == 3


def test_dropouts_that_begin_elsewhere_are_alike() -> None:
    job = job_of(Task(lambda: nets.plain(dropout=0.5), KERNELS, Sgd))
    partitioned = partition_graph(job.graph_of(4), ParallelPlan(2, 1), (2, 2))
    assert len(set(local_graphs(partitioned, range(2)))) == 1


def test_plans_of_equal_graphs_are_one_and_share_operators_of_equal_layers() -> None:
    job = job_of(Task(nets.residual, KERNELS, Sgd, (8, 8, 3)))
    plan = training_plan(whole_graph(job.graph_of(2)), KERNELS)
    assert training_plan(whole_graph(job.graph_of(2)), KERNELS) is plan
    assert len({id(step.operator) for step in plan.steps}) < len(plan.steps)
    alone = compile_graph(job.graph_of(2), KERNELS, training=True)
    assert (plan.memory, plan.forward, plan.backward, plan.tensors) == (
        alone.memory,
        alone.forward,
        alone.backward,
        alone.tensors,
    )
    assert [type(step.operator) for step in plan.steps] == [type(step.operator) for step in alone.steps]
