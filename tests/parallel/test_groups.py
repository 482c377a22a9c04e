"""All communicators of a grid: who is in them, and whose samples they count."""

import pytest

from hpctrain.comm.grid import ProcessGrid
from hpctrain.comm.single import SingleCommunicator
from hpctrain.parallel.groups import GridGroups
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine


@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (2, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_every_position_is_in_a_split_group_and_a_data_group(rows: int, cols: int, ranks_per_node: int | None) -> None:
    ranks = rows * cols

    def program(comm: ThreadCommunicator) -> tuple[int, dict[str, list[int]]]:
        groups = GridGroups(ProcessGrid(comm, rows, cols))
        found = {name: group.allgather_object(groups.position) for name, group in groups.gradients.items()}
        found["messages"] = groups.messages.allgather_object(groups.position)
        group = groups.split_group(virtual_engine(comm))
        assert (group is None) == (rows == 1)
        assert group is None or (group.rank, group.size) == (groups.split_rank, rows)
        assert set(groups.mergers(virtual_engine(comm))) == ({"all"} if rows == 1 else {"all", "split", "data"})
        return groups.position, found

    results = run_virtual(ranks, program, ranks_per_node=ranks_per_node)
    assert sorted(position for position, _ in results) == list(range(ranks))
    for position, found in results:
        split_rank, data_rank = position % rows, position // rows
        assert found["all"] == found["messages"] == list(range(ranks))
        if rows > 1:
            assert found["model"] == [split_rank + rows * rank for rank in range(cols)]
            assert found["model"].index(position) == data_rank
        else:
            assert "model" not in found


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_groups_of_one_rank_take_arrays_that_transports_do_not(rows: int, cols: int) -> None:
    def program(comm: ThreadCommunicator) -> None:
        groups = GridGroups(ProcessGrid(comm, rows, cols))
        local = groups.local_where_alone()
        for ours, before in ((local.norms, groups.norms), (local.messages, groups.messages)):
            assert (ours is before) == (rows * cols > 1)
        for name, ours in local.gradients.items():
            assert (ours.size, ours.name) == (groups.gradients[name].size, groups.gradients[name].name)
            assert isinstance(ours, SingleCommunicator) == (ours.size == 1)
        assert local.counts_of("model", (1,) * comm.size) == groups.counts_of("model", (1,) * comm.size)

    run_virtual(rows * cols, program)


def test_counts_of_split_groups() -> None:
    counts = (3, 2, 2, 2, 1, 0)

    def program(comm: ThreadCommunicator) -> tuple[tuple[int, ...], list[int], list[int]]:
        groups = GridGroups(ProcessGrid(comm, 3, 2))
        return groups.split_counts(counts), list(groups.counts_of("all", counts)), list(groups.counts_of("model", counts))

    for rank, (shared, every, model) in enumerate(run_virtual(6, program)):
        assert shared == ((3, 2, 2) if rank < 3 else (2, 1, 0))
        assert every == list(counts)
        assert model == [7, 3]


@pytest.mark.parametrize(("rows", "cols", "per_node"), [(1, 4, 2), (2, 2, 2), (2, 4, 4), (2, 3, 3)])
def test_nodes_are_those_of_the_ranks_that_average(rows: int, cols: int, per_node: int) -> None:
    """Also where the launcher has dealt out ranks to nodes in turn, so that positions are not ranks."""

    def program(comm: ThreadCommunicator) -> None:
        world = comm.split(0, comm.rank % per_node, "world")
        assert world is not None
        groups = GridGroups(ProcessGrid(world, rows, cols))
        for name, group in groups.gradients.items():
            assert list(groups.nodes[name]) == group.allgather_object(comm.rank // per_node)

    run_virtual(rows * cols, program, ranks_per_node=per_node)
