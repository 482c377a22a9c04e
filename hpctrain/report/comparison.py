"""Runs side by side: results, differences of configuration and versions, and whether their checkpoints have the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import CheckpointError
from hpctrain.report.differences import ComparedSetting, differences
from hpctrain.report.record import RunRecord, read_runs
from hpctrain.report.summary import Summary, summary
from hpctrain.storage.checkpoint import CheckpointContent, checkpoints, read
from hpctrain.storage.run_directory import RunDirectory

_PARAMETERS = "parameters/"


@dataclass(frozen=True)
class SameBits:
    """The tensors of a run's checkpoint beside those of the first run's.

    Args:
        run: its place among the runs. step: of both checkpoints, the first at which they differ, or the latest where they do at
            none; None: they have none in common. different: keys of tensors that differ there, or that only one has, parameters
            first. same_step: the latest that has the same bits before; None: none has. reason: why nothing was compared; ""
            where it was.
    """

    run: int
    step: int | None
    different: tuple[str, ...] = ()
    same_step: int | None = None
    reason: str = ""

    def sentence(self, names: Sequence[str]) -> str:
        """The result for people."""
        if self.reason:
            return f"{names[self.run]}: {self.reason}"
        if not self.different:
            return f"{names[self.run]}: the same bits as {names[0]} at step {self.step}"
        count = len(self.different)
        tensors = f"{count:,} tensor{'' if count == 1 else 's'}"
        before = "" if self.same_step is None else f", and the same at step {self.same_step}"
        first = f"{self.different[0]} first{before}"
        return f"{names[self.run]}: other bits than {names[0]} at step {self.step} in {tensors}, {first}"


@dataclass(frozen=True)
class Comparison:
    """The comparison of runs, in the order in which they were given; bits are compared with the first one's."""

    names: tuple[str, ...]
    summaries: tuple[Summary, ...]
    configuration: tuple[ComparedSetting, ...]
    versions: tuple[ComparedSetting, ...]
    bits: tuple[SameBits, ...]

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return {
            "runs": [{"name": name, **asdict(figures)} for name, figures in zip(self.names, self.summaries, strict=True)],
            "configuration": {setting.key: list(setting.values) for setting in self.configuration},
            "versions": {setting.key: list(setting.values) for setting in self.versions},
            "bits": [{**asdict(bits), "name": self.names[bits.run]} for bits in self.bits],
        }


def compared(paths: Sequence[Path]) -> Comparison:
    """Compare runs.

    Raises:
        CheckpointError, DataError: as `read_runs`.
    """
    records = read_runs(paths)
    return Comparison(
        tuple(record.name for record in records),
        tuple(summary(record) for record in records),
        differences([record.settings for record in records]),
        differences([record.versions for record in records]),
        tuple(_bits(records)),
    )


def _bits(records: Sequence[RunRecord]) -> Iterator[SameBits]:
    first = _stored(records[0])
    for run, record in enumerate(records[1:], 1):
        other = _stored(record)
        common = sorted(first.keys() & other.keys(), reverse=True)
        if not common:
            yield SameBits(
                run, None, reason=f"no checkpoint of a step that {records[0].name} has one of, so no bits are compared"
            )
            continue
        try:
            yield _parting(run, [(step, first[step], other[step]) for step in common])
        except CheckpointError as error:
            yield SameBits(run, common[0], reason=str(error))


def _parting(run: int, common: Sequence[tuple[int, Path, Path]]) -> SameBits:
    """The comparison of checkpoints, the latest step first, as far back as they differ.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    step, different = common[0][0], tuple[str, ...]()
    for earlier, here, there in common:
        keys = tuple(_different(read(here), read(there)))
        if not keys:
            return SameBits(run, step, different, earlier if different else None)
        step, different = earlier, keys
    return SameBits(run, step, different)


def _stored(record: RunRecord) -> dict[int, Path]:
    try:
        return dict(checkpoints(RunDirectory(record.state.path).checkpoints))
    except OSError:
        return {}


def _different(one: CheckpointContent, other: CheckpointContent) -> list[str]:
    """Keys of tensors that are not the same in both, parameters first."""
    keys = dict.fromkeys([*one.tensors, *other.tensors])
    return sorted((key for key in keys if not _is_same(one, other, key)), key=lambda key: not key.startswith(_PARAMETERS))


def _is_same(one: CheckpointContent, other: CheckpointContent, key: str) -> bool:
    if key not in one.tensors or key not in other.tensors:
        return False
    here, there = one.tensors[key], other.tensors[key]
    return here.shape == there.shape and here.dtype == there.dtype and here.tobytes() == there.tobytes()
