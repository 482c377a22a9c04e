"""Rules for the configuration values that may differ between a checkpoint and the run that resumes from it, and their check.

All functions are pure functions of values. `docs/checkpoint.md` shows the rules to users.
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
    """Time at which a value may change."""

    ALWAYS = "always"
    BETWEEN_EPOCHS = "between epochs"
    NEVER = "never"


@dataclass(frozen=True)
class Rule:
    """Pattern of dotted keys, with the time at which their values may change and the reason why not at other times."""

    pattern: str
    when: When
    reason: str = ""


#: rules of all keys of a configuration; the first rule with a matching pattern decides
RULES = (
    Rule("model", When.NEVER, "the parameters belong to the model"),
    Rule("model.*", When.NEVER, "the parameters belong to the model"),
    Rule("dtype", When.NEVER, "the checkpoint stores parameters of the old type"),
    Rule("optimizer", When.NEVER, "the checkpoint stores the state of the old optimiser"),
    Rule("batch_norm.epsilon", When.NEVER, "it is part of the model"),
    Rule("data.normalise", When.NEVER, "the model was trained with the old setting"),
    Rule("seed", When.BETWEEN_EPOCHS, "it determines the order of samples in an epoch"),
    Rule("data.mixing.*", When.BETWEEN_EPOCHS, "all images of an epoch are prepared in the same way"),
    Rule("data.augment", When.BETWEEN_EPOCHS, "all images of an epoch are prepared in the same way"),
    Rule("data.sizes", When.BETWEEN_EPOCHS, "all images of an epoch are prepared in the same way"),
    Rule("loss.*", When.BETWEEN_EPOCHS, "the loss of an epoch is summed over its steps"),
    Rule("held_out", When.NEVER, "samples that the model was trained on would become validation samples, or the reverse"),
    Rule("images", When.BETWEEN_EPOCHS, "an epoch uses each image of one file once"),
    Rule("labels", When.BETWEEN_EPOCHS, "an epoch uses each image of one file once"),
    Rule("exact.*", When.NEVER, "all bits depend on it"),
    Rule("init.freeze", When.NEVER, "the checkpoint stores optimiser state of the trained layers only"),
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
            ),
            "code",
        )
        for pattern in (name, f"{name}.*")
    ),
)


@dataclass(frozen=True)
class Change:
    """A key whose value differs between checkpoint and run; None is the value of a key that is not set."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = ("not set" if value is None else flow(value) for value in (self.old, self.new))
        return f"{_NAMES.get(self.key, self.key)}: {old} -> {new}"


# Values that are compared in addition to the keys of a configuration -> their names in messages.
_NAMES = {
    "code": "your own code",
    "held_out": "validation samples",
    "images": "images of data.train",
    "labels": "labels of data.train",
}
# Keys that the samples held out for validation depend on.
_HELD_OUT_BY = ("data.validation", "seed", "data.train", "labels")


def rule_for(key: str) -> Rule:
    """Return the rule of a dotted key. Every key must have one."""
    rule = next((rule for rule in RULES if fnmatchcase(key, rule.pattern)), None)
    assert rule is not None, f"there is no rule whether {key} may change at a resume"
    return rule


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys.

    The entry `name` of a mapping becomes the value of the mapping's own key.
    """
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
    """Return the keys whose values differ: first those in `new`, in order, then the removed ones. All three mappings are flat.

    If another name is chosen (such as another optimiser), its options are not compared.

    Args:
        defaults: values of keys that `old` or `new` does not have.
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
        between_epochs: whether no epoch is unfinished.
        begun_epochs: number of epochs that are done or begun.
        place: path of the checkpoint.

    Raises:
        CheckpointError: a change is not allowed; the message lists each such change with the reason.
    """
    refusals = list(_refusals(differences, between_epochs, begun_epochs))
    if refusals:
        raise CheckpointError(
            f"The run cannot resume from {place} with other values: {'; '.join(refusals)}. "
            f"Give the values of the checkpoint, or start a new training."
        )


def check_model(differences: Iterable[Change], place: str) -> None:
    """Raise unless a checkpoint may be evaluated with these changes. Changes of the optimiser and of `init` are ignored.

    Raises:
        CheckpointError: a change is not allowed; the message lists each such change with the reason.
    """
    of_model = [change for change in differences if change.key.partition(".")[0] not in ("optimizer", "init")]
    refusals = list(_refusals(of_model, between_epochs=True, begun_epochs=0))
    if refusals:
        raise CheckpointError(
            f"{place} cannot be evaluated with other values: {'; '.join(refusals)}. Give the values of the checkpoint."
        )


def _refusals(differences: Iterable[Change], between_epochs: bool, begun_epochs: int) -> Iterator[str]:
    differences = tuple(differences)
    for change in differences:
        rule = rule_for(change.key)
        if change.key == "epochs" and change.new < begun_epochs:
            yield f"{change} (the smallest value is {begun_epochs}, the number of epochs that are done or begun)"
        elif change.key == "optimizer.momentum" and 0 in (change.old, change.new):
            yield f"{change} (may not change from or to 0, because velocities exist only for other values)"
        elif change.key == "held_out":
            causes = [str(other) for other in differences if other.key in _HELD_OUT_BY]
            yield f"{', '.join(causes) or change} (may not change: {rule.reason})"
        elif rule.when is When.NEVER:
            yield f"{change} (may not change: {rule.reason})"
        elif rule.when is When.BETWEEN_EPOCHS and not between_epochs:
            yield f"{change} (may change only between two epochs: {rule.reason})"
