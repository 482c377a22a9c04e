"""One step of a program on a machine, by discrete events."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hpctrain.core.errors import ConfigError, DeadlockError
from hpctrain.planner.machine import Machine
from hpctrain.planner.prediction import SimulatedStep, SimulationOptions
from hpctrain.planner.simulation.group_tasks import GroupTasks, group_tasks
from hpctrain.planner.simulation.places import SimulatedPlace, places
from hpctrain.planner.simulation.processes import SimulatedProcess
from hpctrain.planner.simulation.simulate import StepTasks
from hpctrain.planner.simulation.world import SimulatedWorld
from hpctrain.planner.tasks import RankClass, StepProgram
from hpctrain.trace.time_table import TimeTable, merge, tabulate
from hpctrain.trace.tracer import Events


def simulate(program: StepProgram, machine: Machine, options: SimulationOptions | None = None) -> SimulatedStep:
    """Simulate steps of a program until they are alike, and tell the last one.

    Ranks in like surroundings are one process, so that the number of ranks costs nothing. Lazy averaging is simulated as it
    begins: all layers are averaged in every step.

    Args:
        options: None: the defaults.

    Raises:
        ConfigError: slow ranks that the job does not have, or slow ranks or jitter of too many ranks.
        DeadlockError: ranks that wait for each other without end.
    """
    options = options or SimulationOptions()
    _check(program, options)
    single = bool(options.slow) or options.jitter > 0
    simulation = _Simulation(program, machine, options, places(program, machine.ranks_per_node, single=single))
    return simulation.run()


def _check(program: StepProgram, options: SimulationOptions) -> None:
    size = program.all_ranks.ranks
    for rank, factor in options.slow.items():
        if not 0 <= rank < size:
            raise ConfigError(
                f"Rank {rank} is to be slow, but the job has the ranks 0 to {size - 1}; the nearest one is "
                f"{min(max(rank, 0), size - 1)}."
            )
        if factor <= 0:
            raise ConfigError(
                f"Rank {rank} is to take {factor} times as long, but the factor must be above 0; 1 changes nothing."
            )
    if options.steps < 1:
        raise ConfigError(f"The simulation is to have {options.steps} steps, but needs at least 1.")
    if options.jitter < 0:
        raise ConfigError(f"The jitter is {options.jitter}, but must not be negative; the nearest legal value is 0.")


class _Simulation:
    """All processes of a program on a machine."""

    def __init__(
        self, program: StepProgram, machine: Machine, options: SimulationOptions, where: Sequence[SimulatedPlace]
    ) -> None:
        self._program, self._machine, self._options, self._places = program, machine, options, where
        self._world = SimulatedWorld(program, machine, where)
        self._running = len(where)
        self._group_tasks: dict[Hashable, GroupTasks] = {}
        self._processes = [
            SimulatedProcess(place, self._world, options.progress, options.slow.get(place.first_rank, 1.0)) for place in where
        ]
        self._steps = [
            StepTasks(process, self._groups_of(process.place), options, self._count_down) for process in self._processes
        ]

    def run(self) -> SimulatedStep:
        """The last step, once all processes have ended it."""
        for process, steps in zip(self._processes, self._steps, strict=True):
            process.start(steps.program())
        if not self._world.loop.run():
            raise DeadlockError(self._stuck())
        for process in self._processes:
            process.finish()
        events = [process.recorder.events() for process in self._processes]
        return SimulatedStep(max(steps.step_seconds for steps in self._steps), self._table(events), self._by_name(events))

    def _groups_of(self, place: SimulatedPlace) -> dict[str, GroupTasks]:
        groups = self._program.groups.items()
        return {key: self._tasks_of(key, place.rank_class) for key, group in groups if place.rank_class.name in group.members}

    def _tasks_of(self, key: str, ranks: RankClass) -> GroupTasks:
        """Processes of one class share them."""
        if (key, ranks.name) not in self._group_tasks:
            group, element_seconds = self._program.groups[key], ranks.update_seconds.get(key, 0.0)
            self._group_tasks[key, ranks.name] = group_tasks(group, self._machine, element_seconds, ranks.product_seconds)
        return self._group_tasks[key, ranks.name]

    def _count_down(self) -> None:
        self._running -= 1
        if not self._running:
            self._world.loop.stop()

    def _table(self, events: Sequence[Events]) -> TimeTable:
        tables = [tabulate(recorded, skip=0) for recorded in events]
        return merge([table for table in tables if table is not None], {}, [place.ranks for place in self._places])

    def _by_name(self, events: Sequence[Events]) -> dict[str, Events]:
        """Events by class, of its first process; of single ranks by rank."""
        result: dict[str, Events] = {}
        for place, recorded in zip(self._places, events, strict=True):
            single = bool(self._options.slow) or self._options.jitter > 0
            result.setdefault(f"rank {place.first_rank}" if single else place.rank_class.name, recorded)
        return result

    def _stuck(self) -> str:
        waiting = [
            f"rank {process.place.first_rank} ({process.place.rank_class.name}) waits for {process.awaited}"
            for process in self._processes
            if process.awaited is not None
        ]
        return f"The simulated ranks wait for each other without end: {'; '.join(waiting)}."
