"""Compare runs: results, differences of settings and versions, and the first step at which they differ bitwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.core.errors import CheckpointError, DataError
from hpctrain.core.text import counted
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import read_hashes
from hpctrain.runs.results import RunRecord, Summary, read_runs, summary
from hpctrain.storage.checkpoint import CheckpointContent, checkpoints, read

#: value of a key that a run lacks
ABSENT = "-"


@dataclass(frozen=True)
class ComparedSetting:
    """Values of one key of the configuration or of the versions in several runs.

    Attributes:
        values: value of the key in each run; `ABSENT` if the run lacks the key.
    """

    key: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs have different values."""
        return len(set(self.values)) > 1


def side_by_side(of_runs: Sequence[Mapping[str, str]]) -> tuple[ComparedSetting, ...]:
    """Return all keys that occur in any run, in the order of their first appearance."""
    keys = dict.fromkeys(key for settings in of_runs for key in settings)
    return tuple(ComparedSetting(key, tuple(settings.get(key, ABSENT) for settings in of_runs)) for key in keys)


def differences(of_runs: Sequence[Mapping[str, str]]) -> tuple[ComparedSetting, ...]:
    """Return the keys whose values differ between the runs."""
    return tuple(setting for setting in side_by_side(of_runs) if setting.differs)


_PARAMETERS = "parameters/"


@dataclass(frozen=True)
class SameBits:
    """Bitwise comparison of a run with the first run, by hashes if both have them at a common step, else by checkpoints.

    Args:
        run: index of the run among all compared runs.
        step: first step at which both are known to differ, or the latest common step if they never differ; None: there is no
            common step.
        different: keys of tensors that differ at `step` or that only one run has, parameters first.
        same_step: latest earlier step with equal bits; None: there is none.
        reason: reason why nothing was compared; "" if something was.
        by: source of the comparison at `step`: "hashes" or "checkpoints".
    """

    run: int
    step: int | None
    different: tuple[str, ...] = ()
    same_step: int | None = None
    reason: str = ""
    by: str = "checkpoints"

    def sentence(self, names: Sequence[str]) -> str:
        """Return the result as a sentence; `names` are those of all compared runs."""
        name, first = names[self.run], names[0]
        if self.reason:
            return f"{name}: {self.reason}"
        at = "up to" if self.by == "hashes" else "at"
        if not self.different:
            return f"{name}: the same bits as {first} {at} step {self.step}"
        before = "" if self.same_step is None else f", and the same {at} step {self.same_step}"
        tensors = f"{counted(len(self.different), 'tensor')}, {key_text(self.different[0])} first"
        return f"{name}: other bits than {first} at step {self.step} in {tensors}{before}"


@dataclass(frozen=True)
class Comparison:
    """Comparison of runs, in the given order. Bits are compared with the first run."""

    names: tuple[str, ...]
    summaries: tuple[Summary, ...]
    configuration: tuple[ComparedSetting, ...]
    versions: tuple[ComparedSetting, ...]
    bits: tuple[SameBits, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values for JSON."""
        return {
            "runs": [{"name": name, **asdict(figures)} for name, figures in zip(self.names, self.summaries, strict=True)],
            "configuration": {setting.key: list(setting.values) for setting in self.configuration},
            "versions": {setting.key: list(setting.values) for setting in self.versions},
            "bits": [{**asdict(bits), "name": self.names[bits.run]} for bits in self.bits],
        }


def compared(paths: Sequence[Path]) -> Comparison:
    """Return the comparison of the runs in these directories.

    Raises:
        CheckpointError, ConfigError, DataError: see `read_runs`.
    """
    records = read_runs(paths)
    return Comparison(
        tuple(record.name for record in records),
        tuple(summary(record) for record in records),
        differences([record.settings for record in records]),
        differences([record.versions for record in records]),
        tuple(_bits(records)),
    )


def key_text(key: str) -> str:
    """Return readable text for a tensor's key; a parameter is shown by its name alone."""
    kind, _, name = key.partition("/")
    if kind != "optimizer":
        return {"parameters": "", "statistics": "running statistic "}.get(kind, f"{kind.replace('_', ' ')} ") + name
    state, _, parameter = name.partition("/")
    return f"{state} of {parameter}"


def _bits(records: Sequence[RunRecord]) -> Iterator[SameBits]:
    first = _stored(records[0])
    for run, record in enumerate(records[1:], 1):
        try:
            found = _by_hashes(run, records[0], record)
            if found is None:
                other = _stored(record)
                common = sorted(first.keys() & other.keys(), reverse=True)
                found = _by_checkpoints(run, [(step, first[step], other[step]) for step in common])
        except (CheckpointError, DataError) as error:
            yield SameBits(run, None, reason=str(error))
            continue
        nothing = f"no bits were compared, because no step has hashes or checkpoints both here and in {records[0].name}"
        yield found or SameBits(run, None, reason=nothing)


def _by_hashes(run: int, first: RunRecord, other: RunRecord) -> SameBits | None:
    """Return the comparison by hashes; None if there are no steps for which both runs have hashes.

    Raises:
        DataError: a file of hashes cannot be read.
    """
    here, there = (read_hashes(RunDirectory(record.state.path).hashes_path) for record in (first, other))
    common = sorted(here.keys() & there.keys())
    same: int | None = None
    for step in common:
        different = here[step].different(there[step])
        if different:
            return SameBits(run, step, different, same, by="hashes")
        same = step
    return SameBits(run, same, by="hashes") if common else None


def _by_checkpoints(run: int, common: Sequence[tuple[int, Path, Path]]) -> SameBits | None:
    """Compare checkpoints, starting at the latest step, back to the first equal pair; None if there are no common steps.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    found = None
    for step, here, there in common:
        keys = tuple(_different(read(here), read(there)))
        if not keys:
            return SameBits(run, step) if found is None else replace(found, same_step=step)
        found = SameBits(run, step, keys)
    return found


def _stored(record: RunRecord) -> dict[int, Path]:
    try:
        return dict(checkpoints(RunDirectory(record.state.path).checkpoints))
    except OSError:
        return {}


def _different(one: CheckpointContent, other: CheckpointContent) -> list[str]:
    """Return the keys of tensors that differ, parameters first."""

    def bits(content: CheckpointContent, key: str) -> object:
        array = content.tensors.get(key)
        return None if array is None else (array.shape, array.dtype, array.tobytes())

    different = [key for key in dict.fromkeys([*one.tensors, *other.tensors]) if bits(one, key) != bits(other, key)]
    return sorted(different, key=lambda key: not key.startswith(_PARAMETERS))
