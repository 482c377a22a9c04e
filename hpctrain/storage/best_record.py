"""The record beside the checkpoints of a run that says which of them has the best evaluation, for people and commands.

A run that goes on takes this from the metadata of its checkpoint; the record is made from there again, and may be deleted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.core.errors import CheckpointError, DataError
from hpctrain.core.files import json_object, read_bytes
from hpctrain.storage.atomic_write import remove_unfinished, write_json
from hpctrain.runs.directory import runs

#: in the directory of checkpoints
NAME = "best.json"
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class BestRecord:
    """The checkpoint with the best evaluation.

    Args:
        checkpoint: name of the file or directory. step: steps done. epoch: epochs trained. measure: "top1", "top5" or "loss", by
            which it is the best. value: of the measure; accuracies are fractions.
    """

    checkpoint: str
    step: int
    epoch: int
    measure: str
    value: float

    def __post_init__(self) -> None:
        texts, numbers = (self.checkpoint, self.measure), (self.step, self.epoch, self.value)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(number, int | float) for number in numbers):
            raise TypeError("a field is of another type")

    def __str__(self) -> str:
        value = f"{self.value:.4f}" if self.measure.endswith("loss") else f"{self.value:.2%}"
        return f"{self.measure} {value} after epoch {self.epoch}"


def write(directory: Path, best: BestRecord | None) -> None:
    """Make this the record in a directory of checkpoints; None: there is none. Whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    if best is not None and _written(directory) != asdict(best):
        write_json(directory / NAME, asdict(best))
        return
    remove_unfinished(directory / NAME)
    if best is None:
        (directory / NAME).unlink(missing_ok=True)


def read(directory: Path) -> BestRecord | None:
    """The record in a directory of checkpoints; None where there is none.

    Raises:
        CheckpointError: it is not readable.
    """
    path = directory / NAME
    if not path.exists():
        return None
    try:
        return BestRecord(**(json_object(read_bytes(path, _LARGEST_BYTES)) or {}))
    except (DataError, OSError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no record of a best checkpoint ({error}); delete it, and the run writes it again when it goes on."
        ) from error


def find(output: Path, name: str) -> Path:
    """The best checkpoint of the newest run of that name that has one.

    Raises:
        CheckpointError: no run has one, or the file is gone.
    """
    for run in runs(output, name):
        best = read(run.checkpoints)
        if best is None:
            continue
        path = run.checkpoints / best.checkpoint
        if not path.exists():
            raise CheckpointError(
                f"The best checkpoint of the run {run.path}, {best.checkpoint} ({best}), is not there any more; "
                f"give one of those that `hpctrain checkpoint list {run.path}` shows."
            )
        return path
    raise CheckpointError(
        f"No run of {name!r} in {output} has a best checkpoint: with checkpoint.best one is kept where an evaluation and a "
        f"checkpoint come after the same step; give a checkpoint file, or auto for the newest."
    )


def _written(directory: Path) -> object:
    try:
        return json_object(read_bytes(directory / NAME, _LARGEST_BYTES))
    except (DataError, OSError):
        return None
