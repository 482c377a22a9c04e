"""Search the grid, plan, averager and micro-batches with the shortest step that fit in a machine's memory.

The search computes lower bounds of all candidates (see `estimates`). It simulates the default and the best few candidates, the
fastest plan with other averagers, and the fastest averager with plans that are nearly as fast. Combinations whose bounds leave
nothing to gain are left out. All simulated candidates are ranked by their step times.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.parallel.parallel_plan import Parallelism
from hpctrain.planner.costs.compute_costs import ComputeCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.program.step_program import predict
from hpctrain.planner.search.estimates import Estimate, GridEstimates, memory_factor, unsplit_plan
from hpctrain.planner.search.search_space import SearchSpace, grid_shapes
from hpctrain.planner.simulation.tasks import Prediction, SimulationOptions

#: predictions that differ by a smaller share count as equal
EQUAL_SHARE = 0.005
#: possible error of predictions of different choices relative to each other, as a share of a step
UNCERTAIN_SHARE = 0.05


def short_seconds(value: float) -> str:
    """Return a time with three significant digits, in seconds or milliseconds."""
    return f"{value:.3g} s" if abs(value) >= 0.1 else f"{1e3 * value:.3g} ms"


def gibibytes(n_bytes: float) -> str:
    """Return a size with three significant digits, in GiB."""
    return f"{n_bytes / (1 << 30):.3g} GiB"


Predict = Callable[[Job, Candidate, Machine, ComputeCosts, SimulationOptions], Prediction]

# Number of additional candidates to simulate if nothing fits, smallest memory first.
_LEANEST = 4
# Candidates whose bounds exceed the best one by a larger factor are not simulated first: the best ones of a grid, and others.
_POSSIBLE, _PROMISING = 2.0, 1.1
# Bounds are inaccurate where messages and computation overlap. A combination is not simulated if its bound exceeds the fastest
# step by the first factor. If a plan's bound reaches the second share of its step, those with other averagers are accurate, too.
_HOPELESS, _EXACT = 1.15, 0.985
# Another averager can turn the order of two plans if one takes at most this factor longer than the other; of pure data
# parallelism, the default is always simulated, and other averagers speed it up by more.
_NEAR_PLAN, _NEAR_DEFAULT = 1.05, 1.15
# A bound says little about a step if it is below this share of it.
_LOOSE = 0.8


@dataclass(frozen=True)
class SearchChoice:
    """Simulated candidate.

    Attributes:
        prediction: result of the simulation.
        fits: whether the candidate fits in a rank's memory.
    """

    candidate: Candidate
    prediction: Prediction
    fits: bool

    @property
    def seconds(self) -> float:
        """Predicted step time."""
        return self.prediction.step.seconds


@dataclass(frozen=True)
class SearchResult:
    """Simulated candidates by step time, followed by those that do not fit in memory.

    The first one is the one to take, which is not the fastest if a simpler one is at most `UNCERTAIN_SHARE` slower.

    Attributes:
        estimated: number of candidates whose step time has a lower bound.
        default: the candidate with defaults for all open choices; None if it is impossible.
    """

    choices: tuple[SearchChoice, ...]
    estimated: int
    default: SearchChoice | None = None

    @property
    def best(self) -> SearchChoice:
        return self.choices[0]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend the collection of reference cycles, which takes a fifth of a search and finds a few megabytes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def search(
    job: Job,
    machine: Machine,
    costs: ComputeCosts,
    ranks: int,
    space: SearchSpace | None = None,
    *,
    predicted_by: Predict = predict,
) -> SearchResult:
    """Return the simulated candidates, best first.

    Args:
        ranks: number of ranks of the job, on nodes of the machine's size.
        space: candidates to search; None: all.
        predicted_by: function that simulates a candidate.

    Raises:
        ConfigError: no grid has work for each rank, an averager does not fit, or no candidate fits in a rank's memory. In the
            last case, the message contains the smallest memory that would suffice.
    """
    space = SearchSpace() if space is None else space
    bounds = _Bounds(job, machine, costs, ranks, space)
    estimates = bounds.estimates()

    results: list[SearchChoice] = []
    refusals: list[HpctrainError] = []

    def simulate(candidates: Iterable[Candidate]) -> None:
        for one in candidates:
            if any(one == known.candidate for known in results):
                continue
            try:
                prediction = predicted_by(job, one, machine, costs, space.options)
                results.append(SearchChoice(one, prediction, prediction.memory_bytes <= machine.memory_bytes))
            except HpctrainError as error:  # of this candidate: its averager does not fit split layers, or a block has no kernel
                refusals.append(error)

    default = bounds.default()
    picks = _picks(estimates, default, space.simulated)
    simulate(picks)
    if picks and not results:
        simulate(bounds.with_averagers(picks[0], math.inf, math.inf))
    if results:
        first = _fastest(results)
        simulate(bounds.with_averagers(first.candidate, first.seconds, first.seconds))
        simulate(_near(results, first.candidate, default, bounds))
    if not any(one.fits for one in results):
        simulate(bounds.leanest())
    if not results:
        raise refusals[0]
    choices = _ranked(results, default)
    if not choices[0].fits:
        raise _fits_nowhere(job, machine, ranks, choices)
    return SearchResult(choices, bounds.count, next((choice for choice in choices if choice.candidate == default), None))


class _Bounds:
    """Lower bounds over all grids; `count` is the number of estimates so far."""

    def __init__(self, job: Job, machine: Machine, costs: ComputeCosts, ranks: int, space: SearchSpace) -> None:
        self._job, self._machine, self._costs, self._space = job, machine, costs, space
        self._shapes = grid_shapes(space, job.graph_of(1), ranks, job.batch)
        self._factor = memory_factor(job, ranks)
        self._grids: dict[tuple[tuple[int, int], int], GridEstimates] = {}
        self.count = 0

    def default(self) -> Candidate | None:
        """Return the candidate with defaults for all open choices; None if each grid splits layers."""
        shape, space = self._shapes[0], self._space
        if shape[0] > 1 and space.fixed_grid is None:
            return None
        return Candidate(unsplit_plan(space, shape), space.averager_choices[0], space.micro_batch_choices[0])

    def estimates(self) -> list[Estimate]:
        """Return the best estimates of each grid and averager, lowest bounds first.

        Micro-batches are tried on the best grid, or on all grids if nothing fits without them. Larger split groups exchange more
        and save less. If grids without split layers are possible, the search therefore stops at a grid on which pure data
        parallelism is best, and after two consecutive grids that are each slower than the previous one.
        """
        first, *more = self._space.micro_batch_choices
        estimates: list[Estimate] = []
        best: list[Estimate] = []  # best estimate of each grid
        for shape in self._shapes:
            found = self._shape_estimates(shape, first, estimates)
            estimates += found
            best += sorted(found, key=lambda one: one.seconds)[:1]
            last = [one.seconds for one in best[-3:]]
            slower = len(last) == 3 and last[0] < last[1] < last[2]
            if self._shapes[0][0] == 1 and (slower or (len(best) > 1 and _is_pure_batch(best[-1].candidate))):
                break
        for micro_batches in more:
            best_plan = min(estimates, key=lambda one: one.seconds).candidate.plan if estimates else None
            for shape in self._shapes if best_plan is None else ((best_plan.rows, best_plan.cols),):
                estimates += self._shape_estimates(shape, micro_batches, estimates)
        if any(one.candidate.plan.rows == 1 for one in estimates):  # pure data parallelism on other grids is the same
            estimates = [one for one in estimates if one.candidate.plan.rows == 1 or not _is_pure_batch(one.candidate)]
        return sorted(estimates, key=lambda one: one.seconds)

    def _shape_estimates(self, shape: tuple[int, int], micro_batches: int, known: Iterable[Estimate]) -> list[Estimate]:
        best: dict[str, float] = {}
        for one in known:
            name = one.candidate.averager.name
            best[name] = min(best.get(name, math.inf), one.seconds)
        grid = self._grid(shape, micro_batches)
        choices = self._space.averager_choices
        estimates = [one for choice in choices for one in grid.best(choice, best.get(choice.name, math.inf))]
        self.count += len(estimates)
        return estimates

    def averaged(self, candidate: Candidate, choices: Iterable[AveragerChoice]) -> list[Estimate]:
        """Return the lower bounds of a candidate with these averagers."""
        grid = self._grid((candidate.plan.rows, candidate.plan.cols), candidate.micro_batches)
        return [grid.of_uses(choice, grid.uses_of(candidate.plan)) for choice in choices]

    def with_averagers(self, candidate: Candidate, own_seconds: float, seconds: float) -> list[Candidate]:
        """Return a candidate, whose step takes `own_seconds`, with other averagers whose steps may take less than `seconds`."""
        choices = sorted(self._space.averager_choices, key=lambda one: one != candidate.averager)
        own, *others = self.averaged(candidate, choices)
        exact = _EXACT * own_seconds <= own.seconds <= own_seconds
        limit = (_EXACT if exact else _HOPELESS) * seconds
        distinct: dict[tuple[str, float], Estimate] = {}  # an averager whose other options do not change the bound counts once
        for one in (own, *others):
            distinct.setdefault((one.candidate.averager.name, one.seconds), one)
        better = [one for one in distinct.values() if one is not own and one.seconds < limit]
        return [replace(candidate, averager=one.candidate.averager) for one in better]

    def leanest(self) -> list[Candidate]:
        """Return a few candidates that need the least memory, in ascending order of memory."""
        choice: AveragerChoice = self._space.averager_choices[0]
        lean = [
            self._grid(shape, micro_batches).leanest(choice)
            for micro_batches in self._space.micro_batch_choices
            for shape in self._shapes
        ]
        lean.sort(key=lambda one: one.memory_bytes)
        return [one.candidate for one in lean[:_LEANEST]]

    def _grid(self, shape: tuple[int, int], micro_batches: int) -> GridEstimates:
        if (shape, micro_batches) not in self._grids:
            self._grids[shape, micro_batches] = GridEstimates(
                self._job, self._machine, self._costs, self._space, shape, micro_batches, memory_factor=self._factor
            )
        return self._grids[shape, micro_batches]


def _picks(estimates: list[Estimate], default: Candidate | None, most: int) -> list[Candidate]:
    """Return the candidates to simulate first: the default, and at most `most` others.

    The others are different plans with the best bounds, with one plan of each grid before a second one.
    """
    of_grid: Counter[tuple[int, int]] = Counter()
    turns: list[tuple[int, float, Candidate]] = []
    wanted = [] if default is None else [default]
    seen = [replace(one, averager=AveragerChoice()) for one in wanted]
    for one in estimates:
        plan, grid = replace(one.candidate, averager=AveragerChoice()), (one.candidate.plan.rows, one.candidate.micro_batches)
        if plan in seen:
            continue
        seen.append(plan)
        of_grid[grid] += 1
        if one.seconds <= (_PROMISING if of_grid[grid] > 1 else _POSSIBLE) * estimates[0].seconds:
            turns.append((of_grid[grid], one.seconds, one.candidate))
    return [*wanted, *(candidate for _, _, candidate in sorted(turns, key=lambda turn: turn[:2])[:most])]


def _fastest(results: Iterable[SearchChoice]) -> SearchChoice:
    return min(results, key=lambda one: (not one.fits, one.seconds))


def _near(results: list[SearchChoice], first: Candidate, default: Candidate | None, bounds: _Bounds) -> list[Candidate]:
    """Return candidates that combine other plans than that of `first` with averagers.

    Nearly as fast plans are combined with the fastest averager, and with the second one if bounds say little. Pure data
    parallelism is combined with each averager.
    """
    fastest = _fastest(results)
    best = fastest.candidate
    of_plan = [one for one in results if replace(one.candidate, averager=best.averager) == best]
    of_plan.sort(key=lambda one: one.seconds)
    tried = 2 if bounds.averaged(best, [best.averager])[0].seconds < _LOOSE * fastest.seconds else 1
    averagers = [one.candidate.averager for one in of_plan[:tried]]
    wanted: list[Candidate] = []
    for other in results:
        candidate, longer = other.candidate, other.seconds / fastest.seconds
        if replace(candidate, averager=first.averager) == first:
            continue
        if candidate == default and longer <= _NEAR_DEFAULT:
            wanted += bounds.with_averagers(candidate, other.seconds, fastest.seconds)
        elif longer <= _NEAR_PLAN:
            wanted += [replace(candidate, averager=averager) for averager in averagers]
    return wanted


def _is_pure_batch(candidate: Candidate) -> bool:
    plan = candidate.plan
    return plan.rows == 1 or {plan.default, *plan.use.values()} == {Parallelism.BATCH}


def _ranked(results: Iterable[SearchChoice], default: Candidate | None) -> tuple[SearchChoice, ...]:
    in_order = sorted(results, key=lambda one: (not one.fits, one.seconds if one.fits else one.prediction.memory_bytes))
    fitting = [one for one in in_order if one.fits]
    if fitting:
        first = _taken(fitting, default)
        in_order.sort(key=lambda one: one is not first)
    return tuple(in_order)


def _taken(fitting: Sequence[SearchChoice], default: Candidate | None) -> SearchChoice:
    """Return the result to take, from results that fit in memory, fastest first.

    Prediction errors can exceed a small gain, so the default is taken unless another candidate is faster by more than
    `UNCERTAIN_SHARE`. Among the candidates that are, one with pure data parallelism is taken unless split layers are faster by
    more than `UNCERTAIN_SHARE`: errors common to all candidates cancel, but errors in the cost of split layers do not. Of equal
    ones, the one that differs least from the default is taken, whichever a measurement makes the faster one.
    """

    def near_best(results: Sequence[SearchChoice], share: float) -> list[SearchChoice]:
        limit = min(one.seconds for one in results) * (1 + share)
        return [one for one in results if one.seconds <= limit]

    usual = next((one for one in fitting if one.candidate == default), None)
    faster = [one for one in fitting if usual is None or one.seconds * (1 + UNCERTAIN_SHARE) <= usual.seconds]
    if usual is not None and not faster:
        return usual
    near = [one for one in near_best(faster, UNCERTAIN_SHARE) if one.candidate.micro_batches == 1]
    pure = [one for one in near if _is_pure_batch(one.candidate)]
    return min(near_best(pure or faster, EQUAL_SHARE), key=lambda one: _changes(one.candidate))


def _changes(candidate: Candidate) -> tuple[object, ...]:
    """Return a key by which equally fast candidates are sorted, independent of their times: the number of changes first."""
    plan, averager, micro_batches = candidate.plan, candidate.averager, candidate.micro_batches
    changed = (plan.rows > 1) + (averager != AveragerChoice()) + (micro_batches > 1)
    return changed, micro_batches, plan.rows, len(plan.use), averager.name, repr(candidate)


def _fits_nowhere(job: Job, machine: Machine, ranks: int, choices: tuple[SearchChoice, ...]) -> ConfigError:
    least = choices[0]
    plan, micro_batches = least.candidate.plan, least.candidate.micro_batches
    uses = "".join(f", {pattern} {use}" for pattern, use in plan.use.items())
    return ConfigError(
        f"{job.model} with a batch of {job.batch} does not fit in memory on {ranks} ranks of {gibibytes(machine.memory_bytes)} "
        f"each; the plan with the least memory needs {gibibytes(least.prediction.memory_bytes)}, on a grid of {plan.rows} x "
        f"{plan.cols} ({plan.default}{uses}) with micro_batches {micro_batches}; start more ranks, or reduce batch."
    )
