"""Result of a training for a calling program: metrics of each epoch, the best checkpoint, and why the training ended.

`EpochCallback` calls a function of the program after each epoch on rank 0, and broadcasts its decision to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.core.errors import HpctrainError
from hpctrain.flight.recorder import RunPhase
from hpctrain.job.session import Session, on_root
from hpctrain.runs.directory import BestRecord, RunDirectory, read_best
from hpctrain.training.metrics import epoch_values
from hpctrain.training.trainer import Outcome

#: values of an epoch by name, see `epoch_values`
EpochValues = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training, the same on every rank.

    Attributes:
        directory: run directory.
        epochs: number of completed epochs, including those before a resume.
        steps: number of steps, including those before a resume.
        metrics: means of the last evaluation, such as `{"loss": 0.3, "top1": 0.9, "top5": 1.0}`, on the validation set if there
            is one, else on the test set; empty without an evaluation.
        best: record of the best checkpoint, with its epoch and value; None if there is none.
        history: values of each completed epoch, as the callback receives them; a value that is not finite is None.
        stopped: reason for an end before the last epoch, such as "SIGTERM", "on_epoch" or "steps"; None if the training is
            complete.
        test: means of the test at the end of a training with a validation set; empty without one.
    """

    directory: Path
    epochs: int
    steps: int
    metrics: Mapping[str, float]
    best: BestRecord | None
    history: tuple[EpochValues, ...]
    stopped: str | None
    test: Mapping[str, float] = field(default_factory=dict)

    @property
    def best_checkpoint(self) -> Path | None:
        """Path of the best checkpoint; None if there is none."""
        return None if self.best is None else RunDirectory(self.directory).checkpoints / self.best.checkpoint


def stored_result(session: Session, directory: RunDirectory, outcome: Outcome, stopped: str | None) -> TrainingResult:
    """Return the result of a run that has ended. Rank 0 reads the records of the run. Collective."""
    position = outcome.position
    metrics, test = ({} if sums is None else sums.means() for sums in (outcome.evaluation, outcome.test))

    def read() -> tuple[BestRecord | None, tuple[EpochValues, ...]]:
        return read_best(directory.checkpoints), tuple(history(directory.metrics()))

    best, epochs = on_root(session.world, read)
    return TrainingResult(directory.path, position.epoch, position.global_step, metrics, best, epochs, stopped, test)


def history(records: Iterable[Mapping[str, Any]]) -> list[EpochValues]:
    """Return the values of each epoch in the records of a run. An epoch that was recorded twice counts once."""
    trained: dict[int, Mapping[str, Any]] = {}
    evaluated: dict[int, Mapping[str, Any]] = {}
    for record in records:
        kind = {"epoch": trained, "evaluation": evaluated}.get(str(record.get("kind")))
        if kind is not None and isinstance(record.get("epoch"), int):
            kind[record["epoch"]] = record
    return [epoch_values(trained[epoch], evaluated.get(epoch)) for epoch in sorted(trained)]


class EpochCallback:
    """Callback that calls a function of the program on rank 0. A true result or an exception ends the training on all ranks.

    Attributes:
        ended: whether the function has requested the end of the training.
    """

    def __init__(self, session: Session, function: Callable[[EpochValues], object]) -> None:
        self._session, self._function = session, function
        self._error: BaseException | None = None
        self._sentence = ""
        self.ended = False

    def __call__(self, values: EpochValues) -> bool:
        """Return whether to end the training after this epoch. Collective."""
        if self._session.is_root:
            with self._session.progress.notes.meanwhile("on_epoch of the program"):
                try:
                    self.ended = bool(self._function(values))
                except Exception as error:
                    self._error, self._sentence = error, f"on_epoch raised {type(error).__name__}: {error}".rstrip(".")
                    self.ended = True
        self.ended, self._sentence = self._session.world.broadcast_object((self.ended, self._sentence))
        self._session.progress.notes.phase(RunPhase.ACCOUNT)
        return self.ended

    def raise_error(self) -> None:
        """Raise the exception of the function on rank 0, if there was one, and an HpctrainError on the other ranks.

        Raises:
            HpctrainError: the function raised an exception on rank 0.
        """
        if self._error is not None:
            raise self._error
        if self._sentence:
            raise HpctrainError(f"{self._sentence} (on rank 0).").of_all_ranks()
