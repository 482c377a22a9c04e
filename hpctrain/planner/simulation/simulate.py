"""Simulate one step of a program on a machine, by discrete events.

`StepTasks` runs the tasks of a rank's steps on a simulated process. `simulate` runs several steps of all processes and returns
the last one, because the first steps differ from later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from hpctrain.averaging.collective_schedule import EventKind
from hpctrain.comm.progress import ProgressMode
from hpctrain.core.errors import ConfigError, DeadlockError
from hpctrain.planner.costs import collective_costs
from hpctrain.planner.costs.collective_costs import CollectiveStage, Kind
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.simulation.operations import GroupQueues, GroupTasks, Posted, SimulatedGroup, group_tasks
from hpctrain.planner.simulation.processes import SimulatedProcess, Stretch
from hpctrain.planner.simulation.tasks import (
    BeginExchange,
    Compute,
    EndBackward,
    EndExchange,
    Happens,
    Merge,
    NeedsParameters,
    RankClass,
    SimulatedStep,
    SimulationOptions,
    StepMessage,
    StepProgram,
    Task,
)
from hpctrain.planner.simulation.world import SimulatedPlace, SimulatedWorld, places
from hpctrain.trace.time_table import merge, tabulate
from hpctrain.trace.tracer import Category, Events


class StepTasks:
    """Program of one process: all tasks of its steps.

    Args:
        counted: callback at the end of the counted step. One more step follows, so that no other rank waits for this one forever.
    """

    def __init__(
        self,
        process: SimulatedProcess,
        groups: Mapping[str, GroupTasks],
        options: SimulationOptions,
        counted: Callable[[], None],
    ) -> None:
        self._process, self._options, self._counted = process, options, counted
        self._loop = process.world.loop
        self._queues = {name: GroupQueues(tasks) for name, tasks in groups.items()}
        self._groups = {name: process.world.averaged_group(process.place, name) for name in groups}
        for name, queues in self._queues.items():
            for queue in queues.queues.values():
                process.queues.append(queue)
                process.group_of[queue] = self._groups[name]
        self._numbers: dict[str, int] = {}
        self._exchanges: dict[int, Posted] = {}
        self._message: Posted | None = None
        self._stages: dict[tuple[str, int, int | None], tuple[CollectiveStage, ...]] = {}
        self._do: dict[type[Task], Callable[..., Stretch]] = {
            Happens: self._happens,
            NeedsParameters: self._needs_parameters,
            BeginExchange: self._begin_exchange,
            EndExchange: self._end_exchange,
            Merge: self._merge,
            EndBackward: self._end_backward,
            StepMessage: self._step_message,
        }
        self.step_seconds = 0.0

    def program(self) -> Stretch:
        """Run all steps, one after another."""
        process, recorder, last = self._process, self._process.recorder, self._options.steps - 1
        for number in range(self._options.steps + 1):
            begin = self._loop.now
            if number == last:
                recorder.begin()
            for queues in self._queues.values():
                queues.begin_step()
                yield from process.poll()
            yield from self._run(process.place.rank_class.tasks)
            recorder.add(Category.STEP, "step", begin, self._loop.now, "", number)
            if number == last:
                self.step_seconds = self._loop.now - begin
                recorder.end(self._loop.now)
                self._counted()

    def _run(self, tasks: Iterable[Task]) -> Stretch:
        process, do = self._process, self._do
        polls_between = self._options.progress is not ProgressMode.NONE
        for task in tasks:
            if not isinstance(task, Compute):
                yield from do[type(task)](task)
                continue
            begin = self._loop.now
            yield from process.work(task.seconds)
            process.recorder.add(task.category, task.row, begin, self._loop.now)
            if task.polls and polls_between and process.busy:
                yield from process.poll()

    # -- averaging ---------------------------------------------------------------------------------------------------------------

    def _happens(self, task: Happens) -> Stretch:
        self._queues[task.group].happens(task.event)
        # Averagers note a last read without a poll, because the end of an operator follows soon.
        if task.event.kind is not EventKind.LAST_READ and self._process.busy:
            yield from self._process.poll()

    def _needs_parameters(self, task: NeedsParameters) -> Stretch:
        queues = self._queues[task.group]
        for parameter in task.parameters:
            slices = queues.tasks.touching.get(parameter, ())
            for posted in [queues.previous.gathered[k] for k in slices if k in queues.previous.gathered]:
                yield from self._process.wait(posted)
            for k in slices:
                yield from self._update_late(queues, k)

    def _update_late(self, queues: GroupQueues, k: int) -> Stretch:
        """Wait for the sum of a slice in the previous step and update the slice, unless this was done before."""
        posted = queues.previous.pending.pop(k, None)
        if posted is not None:
            yield from self._process.wait(posted)
            yield from self._process.update(queues.tasks.late_updates[k], queues.tasks.names[k])

    def _end_backward(self, task: EndBackward) -> Stretch:
        for name, queues in self._queues.items():
            for k in list(queues.previous.pending):
                yield from self._update_late(queues, k)
            queues.all_happen()
            yield from self._process.poll()
            whole = queues.tasks.whole
            if whole is not None:
                posted = self._post(self._groups[name], whole.text, f"{name} {whole.stream}", whole.stages)
                yield from self._process.wait(posted)
                yield from self._process.update(whole.update_seconds, whole.parameter)

    # -- exchanges and small messages --------------------------------------------------------------------------------------------

    def _begin_exchange(self, task: BeginExchange) -> Stretch:
        exchange, group = task.exchange, self._group("split")
        stages = self._stages_of("exchange", group, max(exchange.sent_bytes, exchange.received_bytes), exchange.peers)
        self._exchanges[task.number] = self._post(group, exchange.purpose, "split", stages)
        yield from ()

    def _end_exchange(self, task: EndExchange) -> Stretch:
        yield from self._process.wait(self._exchanges[task.number])

    def _merge(self, task: Merge) -> Stretch:
        group = self._group(task.ranks)
        stages = self._stages_of("merge", group, task.bytes * group.placement.ranks)
        yield from self._process.wait(self._post(group, task.purpose, f"{task.ranks} statistics", stages))

    def _step_message(self, task: StepMessage) -> Stretch:
        if self._message is not None:
            yield from self._process.wait(self._message)
        group = self._group("all")
        self._message = self._post(group, "step message", "step message", self._stages_of("message", group, task.bytes))

    def _stages_of(
        self, kind: Kind, group: SimulatedGroup, n_bytes: int, peers: int | None = None
    ) -> tuple[CollectiveStage, ...]:
        key = (str(kind), n_bytes, peers)
        if key not in self._stages:
            machine = self._process.world.machine
            self._stages[key] = collective_costs.stages(machine, kind, n_bytes, group.placement, None, peers)
        return self._stages[key]

    def _group(self, ranks: str) -> SimulatedGroup:
        return self._process.world.group(self._process.place, ranks)

    def _post(self, group: SimulatedGroup, text: str, track: str, stages: tuple[CollectiveStage, ...]) -> Posted:
        number = self._numbers[track] = self._numbers.get(track, -1) + 1
        posted = Posted(text, track, number)
        self._process.post(group, posted, stages)
        return posted


def simulate(program: StepProgram, machine: Machine, options: SimulationOptions | None = None) -> SimulatedStep:
    """Simulate `options.steps` steps of a program, and return the last one.

    Ranks that do the same work and have the same kinds of neighbours (see `places`) share one simulated process, so the cost
    hardly depends on the number of ranks. If there are slow ranks, each rank is simulated.

    Raises:
        ConfigError: the job does not have one of the slow ranks, or has slow ranks and more than `MOST_SINGLE_RANKS` ranks.
        DeadlockError: ranks wait for each other forever.
    """
    options = options or SimulationOptions()
    size = program.placements.all_ranks.ranks
    for rank in options.slow:
        if not 0 <= rank < size:
            raise ConfigError(f"Slow rank {rank} does not exist: the job has ranks 0 to {size - 1}.")
    return _Simulation(program, machine, options, places(program, machine.ranks_per_node, single=bool(options.slow))).run()


class _Simulation:
    """All processes of a program on a machine."""

    def __init__(
        self, program: StepProgram, machine: Machine, options: SimulationOptions, simulated_places: Sequence[SimulatedPlace]
    ) -> None:
        self._program, self._machine, self._options, self._places = program, machine, options, simulated_places
        self._world = SimulatedWorld(program, machine, simulated_places)
        self._running = len(simulated_places)
        self._group_tasks: dict[Hashable, GroupTasks] = {}
        self._processes = [
            SimulatedProcess(place, self._world, options.progress, options.slow.get(place.first_rank, 1.0))
            for place in simulated_places
        ]
        self._steps = [
            StepTasks(process, self._groups_of(process.place), options, self._count_down) for process in self._processes
        ]

    def run(self) -> SimulatedStep:
        """Simulate until the counted step has ended on all processes, and return this step."""
        for process, steps in zip(self._processes, self._steps, strict=True):
            process.start(steps.program())
        if not self._world.loop.run():
            raise DeadlockError(self._stuck())
        for process in self._processes:
            process.finish()
        events = [process.recorder.events() for process in self._processes]
        tables = [table for recorded in events if (table := tabulate(recorded, skip=0)) is not None]
        table = merge(tables, {}, [place.ranks for place in self._places])
        return SimulatedStep(max(steps.step_seconds for steps in self._steps), table, self._by_name(events))

    def _groups_of(self, place: SimulatedPlace) -> dict[str, GroupTasks]:
        groups = self._program.groups.items()
        return {key: self._tasks_of(key, place.rank_class) for key, group in groups if place.rank_class.name in group.members}

    def _tasks_of(self, key: str, ranks: RankClass) -> GroupTasks:
        """Return a group's tasks, which the processes of one class share."""
        if (key, ranks.name) not in self._group_tasks:
            group, element_seconds = self._program.groups[key], ranks.update_seconds.get(key, 0.0)
            self._group_tasks[key, ranks.name] = group_tasks(group, self._machine, element_seconds, ranks.product_seconds)
        return self._group_tasks[key, ranks.name]

    def _count_down(self) -> None:
        self._running -= 1
        if not self._running:
            self._world.loop.stop()

    def _by_name(self, events: Sequence[Events]) -> dict[str, Events]:
        """Return the events of the first process of each class, by name of the class.

        If ranks are simulated one by one, return the events of each rank, by "rank" and its number.
        """
        result: dict[str, Events] = {}
        for place, recorded in zip(self._places, events, strict=True):
            result.setdefault(f"rank {place.first_rank}" if self._options.slow else place.rank_class.name, recorded)
        return result

    def _stuck(self) -> str:
        waiting = [
            f"rank {process.place.first_rank} ({process.place.rank_class.name}) waits for {process.awaited}"
            for process in self._processes
            if process.awaited is not None
        ]
        return f"The simulated ranks wait for each other forever: {'; '.join(waiting)}."
