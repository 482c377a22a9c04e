"""Ranks meet those that they share a group with."""

from hpctrain.planner.simulation.places import places
from hpctrain.planner.simulation.world import SimulatedWorld
from tests.support.simulated import GROUP, machine, program


def test_single_ranks_meet_in_their_groups() -> None:
    step = program([(4, ()), (4, ())], (8,), split=2, ranks_per_node=4)
    single = places(step, 4, single=True)
    world = SimulatedWorld(step, machine(ranks_per_node=4), single)
    for ranks, size in (("all", 8), ("data", 4), ("split", 2)):
        keys = {world.group(place, ranks).key for place in single}
        assert len(keys) == 8 // size
        assert {world.group(place, ranks).members for place in single} == {size}
    assert {world.averaged_group(place, GROUP).members for place in single} == {8}


def test_folded_ranks_meet_by_class() -> None:
    step = program([(4, ()), (4, ())], (8,), split=2, ranks_per_node=4)
    folded = places(step, 4)
    world = SimulatedWorld(step, machine(ranks_per_node=4), folded)
    assert [world.group(place, "split").members for place in folded] == [2, 2]
    assert [world.group(place, "data").members for place in folded] == [1, 1]
    assert sum(world.averaged_group(place, GROUP).node_share for place in folded) == 1.0


def test_processes_of_a_node_share_its_cores_and_card() -> None:
    step = program([(8, ())], (8,), ranks_per_node=4)
    single = places(step, 4, single=True)
    world = SimulatedWorld(step, machine(ranks_per_node=4), single)
    assert len({id(world.card(place)) for place in single}) == 2
    assert world.cores(single[0]) is world.cores(single[3]) is not world.cores(single[4])
