"""Programs of steps: groups with their members, schedules as runs settle on them, thousands of ranks in no time."""

import math
from dataclasses import replace

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import BatchNormSpec
from hpctrain.nn.network import declared
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.step_program import statistics_size, step_program
from hpctrain.planner.tasks import Compute, Merge, StepMessage, StepProgram
from tests.support import nets
from tests.support.planned import candidate_of, job_of, machine
from tests.support.training import Task


def program_of(
    rows: int,
    cols: int,
    use: Parallelism = Parallelism.BATCH,
    averager: str = "sharded",
    batch: int = 0,
    per_node: int = 4,
    **options: object,
) -> StepProgram:
    task = Task(
        nets.residual, NumpyKernelSet(), Sgd, (8, 8, 3), batch=batch or 2 * rows * cols, plan=ParallelPlan(rows, cols, use)
    )
    nodes = machine(per_node)
    return step_program(job_of(task), candidate_of(task, averager, options), nodes, RateCosts(nodes))


@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 6), (2, 4), (4, 2), (3, 1)])
def test_groups_have_all_ranks_that_hold_their_parameters(rows: int, cols: int, use: Parallelism) -> None:
    program = program_of(rows, cols, use)
    by_name = {ranks.name: ranks for ranks in program.classes}
    assert sum(ranks.ranks for ranks in program.classes) == rows * cols
    held = dict.fromkeys(by_name, 0)
    for key, group in program.groups.items():
        members = sum(by_name[name].ranks for name in group.members)
        assert members % group.placement.ranks == 0
        assert len(group.samples) == group.placement.ranks
        assert sum(group.samples) == 2 * rows * cols
        for name in group.members:
            held[name] += group.elements
            assert by_name[name].update_seconds[key] > 0
    assert min(held.values()) > 0
    if use is not Parallelism.MODEL:
        assert set(program.groups) == {"all"}


def test_orders_follow_from_the_programs_own_times_where_a_run_replans() -> None:
    planned, settled = (program_of(1, 4, replan=replan).groups["all"].schedule for replan in (False, True))
    assert planned is not None
    assert settled is not None
    assert (planned.timed, settled.timed) == (False, True)
    assert settled.slices == planned.slices
    assert sorted(map(str, settled.operations)) == sorted(map(str, planned.operations))


def test_blocking_has_no_schedule_and_nodes_of_several_ranks_have_levels() -> None:
    assert program_of(1, 4, averager="blocking").groups["all"].schedule is None
    levels = program_of(1, 8, per_node=4).groups["all"].levels
    assert levels is not None
    assert (levels.nodes, levels.per_node) == (2, 4)
    assert program_of(1, 8, per_node=8).groups["all"].levels is None


def test_the_message_and_merges_have_the_bytes_of_the_statistics() -> None:
    program = program_of(1, 2)
    task = Task(nets.residual, NumpyKernelSet(), Sgd, (8, 8, 3))
    job = job_of(task)
    _, statistics = declared(task.model(), job.graph_of(1))
    size = sum(math.prod(spec.shape) for spec in statistics.values())
    assert statistics_size(job.graph_of(1)) == size
    tasks = program.classes[0].tasks
    assert [message.bytes for message in tasks if isinstance(message, StepMessage)] == [8 * (6 + size)]
    channels = [node.spec.channels for node in job.graph_of(1).nodes if isinstance(node.spec, BatchNormSpec)]
    merges = [task.bytes for task in tasks if isinstance(task, Merge)]
    assert merges == [8 * (2 * count + 1) for count in channels] + [8 * 2 * count for count in reversed(channels)]


def test_the_time_of_a_pass_does_not_depend_on_the_ranks() -> None:
    def seconds(program: StepProgram) -> float:
        return sum(task.seconds for task in program.classes[0].tasks if isinstance(task, Compute))

    few, many = (program_of(1, cols, fc_exchange="never") for cols in (2, 4096))
    assert len(many.classes) == 1
    assert seconds(few) == pytest.approx(seconds(many))
    assert replace(few.classes[0], ranks=4096, name="").tasks == many.classes[0].tasks
