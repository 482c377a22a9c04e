"""The ranks of `auto.py`: one job that chooses its layout as `train` does, and then steps the choice and its rivals in turn.

Started by `auto.py` as `python -m mpi4py -m benchmarks.auto_ranks SETTINGS`. Variants on the same grid and plan share a network.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.auto import DDP, TrialJob
from benchmarks.overlap_ranks import Peer, Turns, Variant, mean_over_ranks
from benchmarks.shapes import made_up_batch
from hpctrain.assembly.recipe import describe
from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.progress import ProgressMode
from hpctrain.config.load import from_mapping
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.session import StartedJob, on_root
from hpctrain.launch.scheduler import age_seconds
from hpctrain.nn.network import Network
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.planner.job import Candidate
from hpctrain.planner.planned_run import PlannedRun, prepare
from hpctrain.planner.program.step_program import predict
from hpctrain.planner.search.configured_search import with_candidate
from hpctrain.planner.search.search import SearchResult
from hpctrain.run import automatic_search
from hpctrain.training.replica import Replica
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator

_DEADLINE_SECONDS = 120.0
_TURN_SECONDS = 0.3  # timed steps of a turn take at least this time
_LONG_SECONDS = 1.0  # caches that other programs have filled do not matter
_MEASURING_STEPS = 6
# Phases of the choice, by the functions that the choice calls.
_PHASES = ("measured", "measured_times", "search")


@dataclass
class Recorded:
    """The calls of functions of the choice on this rank: seconds by name, and arguments and result of the search."""

    seconds: dict[str, float] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    result: SearchResult | None = None

    def __post_init__(self) -> None:
        for name in _PHASES:
            setattr(automatic_search, name, partial(self._call, name, getattr(automatic_search, name)))

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        result = function(*arguments, **keywords)
        self.seconds[name] = time.perf_counter() - begin
        if name == "search":
            self.arguments, self.result = arguments, result
        return result

    def second(self) -> Candidate | None:
        """The next of the search's choices that is not the first one by another name, with the same simulated step."""
        assert self.result is not None, "the choice was stored; an empty cache makes it search"
        first, *others = self.result.choices
        different = (one for one in others if one.prediction.step.seconds != first.prediction.step.seconds)
        return next((one.candidate for one in different), None)

    def predicted(self, tasks: Mapping[str, PlannedRun]) -> dict[str, dict[str, float]]:
        """The predicted step of each task, with the machine and the times of the search."""
        job, machine, costs, _, space = self.arguments
        found = {}
        for words, task in tasks.items():
            step = predict(job, task.candidate, machine, costs, space.options).step
            found[words] = {"seconds": step.seconds, "exposed_seconds": step.exposed_seconds}
        return found


class AutoRank(Turns):
    """All that one rank measures."""

    def __init__(self, job: TrialJob) -> None:
        super().__init__(_DEADLINE_SECONDS)
        self.job = job
        recorded, started = Recorded(), StartedJob(self.world, 1, _DEADLINE_SECONDS)
        begin = time.perf_counter()
        resolved = automatic_search.choose(from_mapping(job.config)[0], started, None)
        seconds = {"choice_seconds": time.perf_counter() - begin, "start_seconds": age_seconds(), "phases": recorded.seconds}
        self.choice: dict[str, Any] = {**seconds, "lines": list(resolved.lines)}
        self.say(f"chosen: {self.choice}")
        tasks = self._tasks(resolved, on_root(started.world, recorded.second))
        self.names = {name: _words(task) for name, task in tasks.items()}
        self.tasks = {_words(task): task for task in tasks.values()}  # a variant that equals another is measured once
        self.predicted = on_root(started.world, lambda: recorded.predicted(self.tasks))
        self._networks: dict[str, Network] = {}
        self.variants = {words: self._variant(task) for words, task in self.tasks.items()}

    def _tasks(self, resolved: Resolved, second: Candidate | None) -> dict[str, PlannedRun]:
        """The variants by name."""
        alone, config = ParallelPlan(1, self.world.size), resolved.recipe.config
        candidates = {"default": Candidate(alone)}
        candidates |= {name: Candidate(alone, AveragerChoice(name)) for name in ("bucketed", "priority")}
        candidates |= {} if second is None else {"second": second}
        configs = {name: with_candidate(config, candidate) for name, candidate in candidates.items()}
        configs["auto"] = config
        return {name: prepare(one, self.world.size, backend=resolved.backend) for name, one in configs.items()}

    def _variant(self, task: PlannedRun) -> Variant:
        recipe, config, counters = task.recipe, task.config, Counters()
        groups = GridGroups(ProcessGrid(CountingCommunicator(self.world, counters), task.plan.rows, task.plan.cols))
        shared, key = {"groups": groups, "progress": self.progress}, describe(task.plan)
        if key not in self._networks:
            self._networks[key] = make_network(recipe.model, recipe.image_shape, task.job.kernels, plan=recipe.plan, **shared)
        replica = Replica(
            self._networks[key],
            **shared,
            strategy=recipe.averager.strategy,
            optimizer=recipe.make_optimizer,
            nominal_batch=config.batch,
            micro_batches=config.micro_batches,
        )
        replica.agree()
        # Orders that follow from measurements need their steps; for all others two make connections and buffers.
        measures = any(hasattr(strategy.options, "replan") for strategy in replica.strategies.values())
        batch = made_up_batch(self.job, replica.place)
        return Variant(replica, batch, counters, ProgressMode(config.progress), _MEASURING_STEPS if measures else 2, 1, 1)

    def measure(self, rounds: int, peer: str | None) -> dict[str, list[dict[str, float]]]:
        """All rounds of this rank. peer: socket of PyTorch's rank; None: no peer."""
        turns: dict[str, Callable[[], dict[str, float]]] = {}
        for words, variant in self.variants.items():
            self.say(f"warm-up of {words}")
            variant.steps = self._steps(self.warm_up(variant))
            turns[words] = partial(self.turn, variant)
        if peer is not None:
            self.peer = Peer(peer)
            self.choice["peer"] = self.peer.facts
            # DDP waits for its messages within a step; ours travel until the next one, so a turn begins with an untimed step.
            seconds = self.peer.facts["step_seconds"]
            turns[DDP] = partial(self.peer_turn, DDP, int(self._largest(seconds) < _LONG_SECONDS), self._steps(seconds))
        return self.all_rounds(turns, rounds)

    def _steps(self, seconds: float) -> int:
        """The timed steps of a turn, given the seconds of a step on this rank; the same on all ranks."""
        return math.ceil(_TURN_SECONDS / self._largest(seconds))

    def _largest(self, seconds: float) -> float:
        return max(self.world.allgather_object(seconds))


def _words(task: PlannedRun) -> str:
    return f"{describe(task.plan)}, averager {task.recipe.averager}"


def main(arguments: list[str] | None = None) -> int:
    (path,) = sys.argv[1:] if arguments is None else arguments
    settings = json.loads(Path(path).read_text())
    rank = AutoRank(TrialJob(**settings["job"]))
    peers = settings["peers"]
    rounds = rank.measure(settings["rounds"], peers[rank.world.rank] if peers else None)
    everyone = rank.world.allgather_object(rounds)
    if rank.world.rank == 0:
        result = {**rank.choice, "names": rank.names, "predicted": rank.predicted, "rounds": mean_over_ranks(everyone)}
        Path(settings["out"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
