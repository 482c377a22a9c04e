"""The surroundings of simulated processes: time, cores and cards of nodes, and the groups in which ranks meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from hpctrain.planner.machine import Machine
from hpctrain.planner.simulation.cores import Cores
from hpctrain.planner.simulation.event_loop import EventLoop
from hpctrain.planner.simulation.operations import Meetings, SimulatedGroup
from hpctrain.planner.simulation.places import SimulatedPlace
from hpctrain.planner.simulation.resources import SharedResource
from hpctrain.planner.tasks import GroupPlacement, StepProgram


class SimulatedWorld:
    """All that the processes of a simulation share.

    Attributes:
        loop: time. meetings: collectives that ranks have come to. machine, program: that are simulated.
    """

    def __init__(self, program: StepProgram, machine: Machine, places: Sequence[SimulatedPlace]) -> None:
        self.program, self.machine = program, machine
        self.loop = EventLoop()
        self.meetings = Meetings(self.loop)
        count = machine.cores_per_rank * machine.ranks_per_node
        nodes = {place.node for place in places}
        self._cores = {node: Cores(self.loop, count, machine.ranks_per_node) for node in nodes}
        self._cards = {node: SharedResource(self.loop, 1.0, machine.between.burst_seconds) for node in nodes}
        self._members = Counter(key for place in places for key in self._keys(place))

    def cores(self, place: SimulatedPlace) -> Cores:
        """Those of a process's node."""
        return self._cores[place.node]

    def card(self, place: SimulatedPlace) -> SharedResource:
        """A network card of a process's node; all of the node's cards are used alike."""
        return self._cards[place.node]

    def group(self, place: SimulatedPlace, ranks: str) -> SimulatedGroup:
        """The ranks that a process exchanges with: "all", "data" or "split"."""
        placements = {"all": self.program.all_ranks, "data": self.program.data, "split": self.program.split}
        return self._group(place, _key(place, ranks), placements[ranks])

    def averaged_group(self, place: SimulatedPlace, name: str) -> SimulatedGroup:
        """The ranks that a process averages a parameter group with."""
        return self._group(place, self._averaged_key(place, name), self.program.groups[name].placement)

    def _group(self, place: SimulatedPlace, key: Hashable, placement: GroupPlacement) -> SimulatedGroup:
        share = place.node_ranks / max(1, placement.per_node * placement.alike)
        everybody = placement.ranks == self.program.all_ranks.ranks
        lane = "all" if everybody else "split" if placement is self.program.split else "data"
        return SimulatedGroup(key, self._members[key], placement, share, lane)

    def _keys(self, place: SimulatedPlace) -> list[Hashable]:
        averaged = [name for name, group in self.program.groups.items() if place.rank_class.name in group.members]
        return [
            *(_key(place, ranks) for ranks in ("all", "data", "split")),
            *(self._averaged_key(place, name) for name in averaged),
        ]

    def _averaged_key(self, place: SimulatedPlace, name: str) -> Hashable:
        """Groups of fewer than all ranks are data groups."""
        everybody = self.program.groups[name].placement.ranks == self.program.all_ranks.ranks
        return (name, "all") if everybody else (name, "data", place.data_group)


def _key(place: SimulatedPlace, ranks: str) -> Hashable:
    number = {"all": 0, "data": place.data_group, "split": place.split_group}[ranks]
    return ranks, number
