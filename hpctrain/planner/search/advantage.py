"""Say in words how much faster the choice of a search is than the default, and why."""

from __future__ import annotations

from collections import Counter

from hpctrain.assembly.recipe import describe
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.backend.specs import item_bytes, parameter_dtype
from hpctrain.core.text import size_text
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.program.group_schedules import group_strategies
from hpctrain.planner.search.search import EQUAL_SHARE, UNCERTAIN_SHARE, SearchResult, gibibytes, short_seconds

_TIMES_RATIO = 1.25  # smallest ratio that is stated as "... times as fast"
_MOST_OF_IT = 0.8  # share of the saved bytes that the named parts of the network have together


def advantage(job: Job, result: SearchResult, machine: Machine) -> str:
    """Return a clause that compares the taken candidate with the default.

    An example is "2.1 times as fast as averaging alone, because 80 MB of layer4's gradients need not travel". The clause is empty
    if there is no default or no other candidate.
    """
    taken, default = result.best, result.default
    if default is None or len(result.choices) == 1:
        return ""
    if taken is default:
        fastest = min((choice for choice in result.choices if choice.fits), key=lambda choice: choice.seconds)
        gain = default.seconds / fastest.seconds - 1
        words = f"no choice is predicted to be {UNCERTAIN_SHARE:.0%} faster than the default"
        if gain < EQUAL_SHARE:
            return words
        one = fastest.candidate
        return f"{words}; the fastest is {describe(one.plan)}, averager {one.averager}, {gain:.1%} faster"
    usual = "averaging alone" if taken.candidate.plan.rows > 1 else f"averager {default.candidate.averager.name}"
    if not default.fits:
        return f"{usual} does not fit in memory: it needs {gibibytes(default.prediction.memory_bytes)} per rank"
    before, after = default.prediction.step, taken.prediction.step
    ratio = before.seconds / after.seconds
    words = f"{ratio:.2g} times as fast as" if ratio >= _TIMES_RATIO else f"{ratio - 1:.0%} faster than"
    gain, less_exposed = before.seconds - after.seconds, before.exposed_seconds - after.exposed_seconds
    if 2 * less_exposed < gain:
        cause = f"each rank is busy {short_seconds(gain - less_exposed)} less per step"
    else:
        averaged, exchanged = _averaged_bytes(job, default.candidate, machine.ranks_per_node)
        averaged_then, _ = _averaged_bytes(job, taken.candidate, machine.ranks_per_node)
        cause = _staying(averaged - averaged_then, exchanged) or f"a step waits {short_seconds(less_exposed)} less for messages"
    return f"{words} {usual}, because {cause}"


def _averaged_bytes(job: Job, candidate: Candidate, ranks_per_node: int) -> tuple[Counter[str], Counter[str]]:
    """Return the bytes of parameters that a rank averages with other ranks, by the first part of the parameters' names.

    The second number counts only parameters whose gradients follow from exchanged inputs and errors, so that only weights travel.
    """
    averaged, exchanged = Counter[str](), Counter[str]()
    for group in group_strategies(job, candidate, ranks_per_node):
        if 0 not in group.split_ranks or group.planned.ranks == 1:
            continue
        exchanging = group.strategy.exchanging if isinstance(group.strategy, ReduceScatterStrategy) else {}
        for segment in group.planned.layout.segments:
            part, n_bytes = segment.parameter.partition(".")[0], segment.size * item_bytes(parameter_dtype(job.dtype))
            averaged[part] += n_bytes
            exchanged[part] += n_bytes * (segment.parameter in exchanging)
    return averaged, exchanged


def _staying(saved: Counter[str], exchanged: Counter[str]) -> str:
    """Return a clause with the bytes that need not travel, and the parts of the network with most of them; empty if none."""
    named = list[str]()
    for part, _ in saved.most_common():
        if sum(saved[one] for one in named) >= _MOST_OF_IT * saved.total():
            break
        named.append(part)
    n_bytes = sum(saved[part] for part in named)
    what = "weights" if 2 * sum(exchanged[part] for part in named) > n_bytes else "gradients"
    names = " and ".join(part for part in saved if part in named)  # in the order of the network
    return f"{size_text(n_bytes)} of {names}'s {what} need not travel" if named else ""
