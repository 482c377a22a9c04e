"""The differences that a checkpoint and the run that resumes from it may have: one table of rules, and the comparison by it.

Pure functions of values; nothing is read or written, and nothing communicates. `docs/checkpoint.md` shows the table to users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from hpctrain.config.load import flow
from hpctrain.core.errors import CheckpointError


class When(Enum):
    """When a value may change."""

    ALWAYS = "always"
    BETWEEN_EPOCHS = "between epochs"
    NEVER = "never"


@dataclass(frozen=True)
class Rule:
    """A pattern of dotted keys, when their values may change, and why not at other times."""

    pattern: str
    when: When
    reason: str = ""


#: the first rule whose pattern matches counts; every key of a configuration has one
RULES = (
    Rule("model", When.NEVER, "the parameters belong to the model"),
    Rule("model.*", When.NEVER, "the parameters belong to the model"),
    Rule("dtype", When.NEVER, "the parameters have that type"),
    Rule("optimizer", When.NEVER, "its state belongs to that optimiser"),
    Rule("batch_norm.epsilon", When.NEVER, "it is part of the model"),
    Rule("data.normalise", When.NEVER, "the model was trained on such images"),
    Rule("classes", When.NEVER, "the model's outputs stand for them"),
    Rule("seed", When.BETWEEN_EPOCHS, "the order of an epoch follows from it"),
    Rule("data.mixing.*", When.BETWEEN_EPOCHS, "an epoch sees one kind of images"),
    Rule("data.augment", When.BETWEEN_EPOCHS, "an epoch sees one kind of images"),
    Rule("data.sizes", When.BETWEEN_EPOCHS, "an epoch sees one kind of images"),
    Rule("loss.*", When.BETWEEN_EPOCHS, "the loss of an epoch is one sum"),
    Rule("images", When.BETWEEN_EPOCHS, "an epoch sees each image of one file once"),
    Rule("labels", When.BETWEEN_EPOCHS, "an epoch sees each image of one file once"),
    Rule("exact.*", When.NEVER, "each bit follows from them"),
    Rule("init.freeze", When.NEVER, "the optimiser's state belongs to the layers that are trained"),
    Rule("init.*", When.ALWAYS),
    Rule("data.*", When.ALWAYS),
    Rule("optimizer.*", When.ALWAYS),
    *(
        Rule(pattern, When.ALWAYS)
        for name in (
            *("name", "output", "batch", "micro_batches", "epochs", "ranks", "threads", "backend", "progress", "trace"),
            *("precision", "transport"),
            *(
                "schedule",
                "ema",
                "early_stop",
                "averager",
                "grid",
                "plan",
                "machine",
                "batch_norm",
                "checkpoint",
                "evaluate",
                "metrics",
                "deadline_seconds",
                "max_time",
                "checks",
                "hashes",
                "flight",
                "on_nonfinite",
                "on_lost_rank",
            ),
            "code",
        )
        for pattern in (name, f"{name}.*")
    ),
)


@dataclass(frozen=True)
class Change:
    """A key whose value is another now; None stands for one that is not set."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = ("not set" if value is None else flow(value) for value in (self.old, self.new))
        return f"{self.key}: {old} -> {new}"


def rule_for(key: str) -> Rule:
    """Return the rule of a dotted key. A key without one is a fault of this module."""
    rule = next((rule for rule in RULES if fnmatchcase(key, rule.pattern)), None)
    assert rule is not None, f"no rule says whether {key} may change at a resume"
    return rule


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by dotted keys. If a mapping has a key `name`, its own key has that name."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Mapping):
            leaves[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
            continue
        options = dict(value)
        if "name" in options:
            leaves[f"{prefix}{key}"] = options.pop("name")
        leaves |= flat(options, f"{prefix}{key}.")
    return leaves


def changes(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> tuple[Change, ...]:
    """Return the keys whose values differ, in the order of `new`, then those that are gone. All three mappings are flat.

    Where something else of a kind is named (another optimiser), its options are not compared one by one.

    Args:
        defaults: what stands for a key that one of the two does not have.
    """
    absent = defaults or {}
    keys = dict.fromkeys((*new, *old))
    pairs = {key: (old.get(key, absent.get(key)), new.get(key, absent.get(key))) for key in keys}
    differing = [key for key, (before, after) in pairs.items() if before != after]
    named_anew = tuple(f"{key}." for key in differing if any(other.startswith(f"{key}.") for other in keys))
    return tuple(Change(key, *pairs[key]) for key in differing if not key.startswith(named_anew))


def check(differences: Iterable[Change], *, between_epochs: bool, begun_epochs: int, place: str) -> None:
    """Raise unless the run may resume with these changes.

    Args:
        between_epochs: no epoch is begun and unfinished. begun_epochs: all that are done or begun. place: of the checkpoint.

    Raises:
        CheckpointError: it may not; the message lists each change that is in the way, and why.
    """
    refusals = list(_refusals(differences, between_epochs, begun_epochs))
    if refusals:
        raise CheckpointError(
            f"The run cannot resume from {place} with other values: {'; '.join(refusals)}. "
            f"Give the values of the checkpoint, or start a new training without --resume."
        )


def check_model(differences: Iterable[Change], place: str) -> None:
    """Raise unless a checkpoint may be evaluated with these changes; those of optimiser and frozen layers do not matter.

    Raises:
        CheckpointError: it may not; the message lists each change that is in the way, and why.
    """
    of_model = [change for change in differences if change.key.partition(".")[0] not in ("optimizer", "init")]
    refusals = list(_refusals(of_model, between_epochs=True, begun_epochs=0))
    if refusals:
        raise CheckpointError(
            f"{place} cannot be evaluated with other values: {'; '.join(refusals)}. Give the values of the checkpoint."
        )


def _refusals(differences: Iterable[Change], between_epochs: bool, begun_epochs: int) -> Iterator[str]:
    for change in differences:
        rule = rule_for(change.key)
        if change.key == "epochs" and change.new < begun_epochs:
            yield f"{change} (the smallest value is {begun_epochs}: that many epochs are done or begun)"
        elif change.key == "optimizer.momentum" and 0 in (change.old, change.new):
            yield f"{change} (may not change from or to 0: there are no velocities to continue with then)"
        elif rule.when is When.NEVER:
            yield f"{change} (may not change: {rule.reason})"
        elif rule.when is When.BETWEEN_EPOCHS and not between_epochs:
            yield f"{change} (may change between two epochs only: {rule.reason})"
