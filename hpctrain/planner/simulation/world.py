"""Environment of simulated processes: their places on nodes, time, cores, cards, and groups of ranks.

One process represents all ranks with equal surroundings (`places`), so the cost hardly depends on the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hpctrain.core.errors import ConfigError
from hpctrain.planner.costs.collective_costs import GroupPlacement
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.simulation.operations import Meetings, SimulatedGroup
from hpctrain.planner.simulation.resources import Cores, EventLoop, SharedResource
from hpctrain.planner.simulation.tasks import RankClass, StepProgram

#: maximum number of ranks that are simulated one by one
MOST_SINGLE_RANKS = 512
#: maximum number of processes with different kinds of nodes; with more, all nodes count as one kind
MOST_PLACES = 64


@dataclass(frozen=True)
class SimulatedPlace:
    """Ranks of a class that one process represents.

    Attributes:
        first_rank: lowest world rank.
        node: number of the node, or of the kind of nodes if nodes are simulated by kind.
        node_ranks: number of these ranks per node of this kind, mean over the nodes.
        split_group: number of the split group; processes with equal numbers exchange with each other.
        data_group: number of the data group; processes with equal numbers average with each other.
    """

    rank_class: RankClass
    ranks: int
    first_rank: int
    node: int
    node_ranks: float
    split_group: int
    data_group: int


def places(program: StepProgram, ranks_per_node: int, *, single: bool = False) -> tuple[SimulatedPlace, ...]:
    """Return the processes of a program.

    World rank c * Pr + r is (r, c) of the grid, and nodes contain consecutive ranks. Ranks share a process if they agree in their
    class and in the classes on their node, in their split group and in their data group. If split groups cross nodes and have
    unequal samples, there may be many kinds of nodes. With more than `MOST_PLACES` processes, all nodes count as one kind.

    Args:
        single: whether each rank is a process.

    Raises:
        ConfigError: there are too many ranks to simulate them one by one.
    """
    size, height = program.placements.all_ranks.ranks, program.placements.split.ranks
    if single and size > MOST_SINGLE_RANKS:
        raise ConfigError(
            f"With slow ranks, each rank is simulated, which is limited to {MOST_SINGLE_RANKS} ranks, but the job has {size:,}; "
            f"omit them, or simulate {MOST_SINGLE_RANKS} ranks."
        )
    classes = class_of_ranks(program)
    if single:
        return tuple(
            SimulatedPlace(program.classes[number], 1, rank, rank // ranks_per_node, 1, rank // height, rank % height)
            for rank, number in enumerate(classes)
        )
    begins = range(0, len(classes), ranks_per_node)
    folded = _folded(program, classes, ranks_per_node, [_kind(classes[begin : begin + ranks_per_node]) for begin in begins])
    if len(folded) <= MOST_PLACES:
        return folded
    return _folded(program, classes, ranks_per_node, ["any node"] * len(begins))


def _folded(
    program: StepProgram, classes: Sequence[int], ranks_per_node: int, nodes: Sequence[Hashable]
) -> tuple[SimulatedPlace, ...]:
    """Return the processes, one for each kind of rank, from the class of each rank and the kind of each node."""
    size, height = program.placements.all_ranks.ranks, program.placements.split.ranks
    splits = [_kind(classes[begin : begin + height]) for begin in range(0, size, height)]
    datas = [_kind(classes[r::height]) for r in range(height)]
    surroundings = [
        (classes[rank], nodes[rank // ranks_per_node], splits[rank // height], datas[rank % height]) for rank in range(size)
    ]
    counts = Counter(surroundings)
    numbers: dict[Hashable, int] = {}
    for kind in (*nodes, *splits, *datas):
        numbers.setdefault(kind, len(numbers))
    alike = Counter(nodes)
    first = {key: rank for rank, key in reversed(list(enumerate(surroundings)))}
    return tuple(
        SimulatedPlace(
            program.classes[key[0]], count, first[key], numbers[key[1]], count / alike[key[1]], numbers[key[2]], numbers[key[3]]
        )
        for key, count in counts.items()
    )


def _kind(classes: Sequence[int]) -> Hashable:
    """Return a key that is equal for nodes, or groups, with equal numbers of ranks of each class."""
    return tuple(sorted(Counter(classes).items()))


def class_of_ranks(program: StepProgram) -> list[int]:
    """Return the class of each world rank, as its position in `program.classes`.

    A class begins at its `split_rank`. Classes that begin at the same split rank differ in their samples: the ranks at the first
    data positions belong to the first class, the next ones to the second class. A split rank at which no class begins continues
    the classes of the split rank before it.
    """
    size, height = program.placements.all_ranks.ranks, program.placements.split.ranks
    width = size // height
    left = [one.ranks for one in program.classes]
    result = [-1] * size
    shares = _shares(program, width)
    begun: list[list[int]] = []
    for split_rank in range(height):
        beginning = [number for number, one in enumerate(program.classes) if one.split_rank == split_rank]
        if beginning:
            begun.append(beginning)
        position = 0
        for together in reversed(begun):
            for number in together:
                count = min(left[number], shares[number], width - position)
                for place in range(position, position + count):
                    result[place * height + split_rank] = number
                left[number] -= count
                position += count
    remaining = [number for number, count in enumerate(left) for _ in range(count)]
    for rank in (rank for rank, number in enumerate(result) if number < 0):
        result[rank] = remaining.pop(0)
    return result


def _shares(program: StepProgram, width: int) -> list[int]:
    """Return the number of ranks of each class at one split rank.

    Classes with the same first split rank share the data ranks.
    """
    totals = Counter({one.split_rank: 0 for one in program.classes})
    for one in program.classes:
        totals[one.split_rank] += one.ranks
    return [max(1, one.ranks * width // max(width, totals[one.split_rank])) for one in program.classes]


class SimulatedWorld:
    """Shared environment of the processes of a simulation.

    Attributes:
        loop: simulated time.
        meetings: collectives that some ranks have joined.
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
        """Return the cores of a process's node."""
        return self._cores[place.node]

    def card(self, place: SimulatedPlace) -> SharedResource:
        """Return a network card of a process's node. All cards of a node have equal load."""
        return self._cards[place.node]

    def group(self, place: SimulatedPlace, ranks: str) -> SimulatedGroup:
        """Return the group "all", "data" or "split" in which a process exchanges."""
        return self._group(place, _key(place, ranks), self.program.placements.of(ranks))

    def averaged_group(self, place: SimulatedPlace, name: str) -> SimulatedGroup:
        """Return the group in which a process averages a parameter group."""
        return self._group(place, self._averaged_key(place, name), self.program.groups[name].placement)

    def _group(self, place: SimulatedPlace, key: Hashable, placement: GroupPlacement) -> SimulatedGroup:
        share = place.node_ranks / max(1, placement.per_node * placement.alike)
        everybody = placement.ranks == self.program.placements.all_ranks.ranks
        lane = "all" if everybody else "split" if placement is self.program.placements.split else "data"
        return SimulatedGroup(key, self._members[key], placement, share, lane)

    def _keys(self, place: SimulatedPlace) -> list[Hashable]:
        averaged = [name for name, group in self.program.groups.items() if place.rank_class.name in group.members]
        return [
            *(_key(place, ranks) for ranks in ("all", "data", "split")),
            *(self._averaged_key(place, name) for name in averaged),
        ]

    def _averaged_key(self, place: SimulatedPlace, name: str) -> Hashable:
        """Return the key of the communicator that averages a parameter group: all ranks, or the data group of the process."""
        everybody = self.program.groups[name].placement.ranks == self.program.placements.all_ranks.ranks
        return (name, "all") if everybody else (name, "data", place.data_group)


def _key(place: SimulatedPlace, ranks: str) -> Hashable:
    number = {"all": 0, "data": place.data_group, "split": place.split_group}[ranks]
    return ranks, number
