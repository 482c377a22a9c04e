"""From a use for each layer to a plan's few patterns, which a configuration can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.parallel.parallel_plan import Parallelism


def patterns(uses: Mapping[str, Parallelism]) -> tuple[Parallelism, dict[str, Parallelism]]:
    """(default, pattern -> use) such that a `ParallelPlan` gives each dotted name its use; few of them, general ones first."""
    default = _most_frequent(list(uses.values()))
    rules: dict[str, Parallelism] = {}
    _add(rules, uses, list(uses), (), default)
    return default, rules


def _add(
    rules: dict[str, Parallelism],
    uses: Mapping[str, Parallelism],
    names: Sequence[str],
    prefix: tuple[str, ...],
    inherited: Parallelism,
) -> None:
    """Add rules for names that begin with a prefix, all of which follow `inherited` so far."""
    children: dict[str, list[str]] = {}
    for name in names:
        children.setdefault(name.split(".")[len(prefix)], []).append(name)
    for child, members in children.items():
        path = (*prefix, child)
        leaf, below = ".".join(path), [name for name in members if name.count(".") >= len(path)]
        if leaf in members and uses[leaf] is not inherited:
            rules[leaf] = uses[leaf]
        if not below:
            continue
        use = _most_frequent([uses[name] for name in below])
        # Worth a rule of its own where it saves others.
        differing = sum(uses[name] is not inherited for name in below)
        remaining = 1 + sum(uses[name] is not use for name in below)
        if use is not inherited and remaining <= differing:
            rules[f"{leaf}.*"] = use
            _add(rules, uses, below, path, use)
        else:
            _add(rules, uses, below, path, inherited)


def _most_frequent(uses: Sequence[Parallelism]) -> Parallelism:
    if not uses:
        return Parallelism.BATCH
    counted = Counter(uses)
    return max(Parallelism, key=lambda use: counted[use])
