"""The steps of a loop that is the program's own: noted for the flight record, counted where they are skipped, asked to end."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.core.errors import DivergedError
from hpctrain.flight.notes import FlightNotes
from hpctrain.log import get_logger
from hpctrain.train.finiteness import Cause
from hpctrain.train.saving import Saver
from hpctrain.train.snapshot import Position
from hpctrain.train.metrics import StepTotals

_log = get_logger(__name__)
#: the phase of a program that is in no call of hpctrain
BETWEEN = "the program, between steps"


class OwnLoop:
    """Does for `Replica.step` what the trainer does around its steps. Only `end` may communicate.

    Args:
        notes: for the flight record. stop_asked: this rank was asked to stop.
        most_skips: steps, one after another, that may change nothing as they are not finite; one more ends the training.
        saver: of checkpoints that are written while steps go on; None: there are none.

    Attributes:
        skipped: steps that changed nothing. skipped_in_a_row: of the latest ones. cause: of the latest of them.
        stop_requested: some rank was asked to stop, as all ranks know after the same step.
    """

    def __init__(
        self,
        notes: FlightNotes,
        *,
        stop_asked: Callable[[], bool] = lambda: False,
        most_skips: int = 10,
        saver: Saver | None = None,
    ) -> None:
        self._notes, self._saver, self._most_skips = notes, saver, most_skips
        self.stop_asked = stop_asked
        self.skipped = self.skipped_in_a_row = 0
        self.cause: Cause | None = None
        self.stop_requested = False
        self._news = 0

    def begin(self, epoch: int, global_step: int) -> None:
        """A step begins. epoch, global_step: those done before."""
        self._notes.step(epoch + 1, global_step + 1)

    def news(self) -> int:
        """This rank's news of a checkpoint that is being written (see `Saver.news`)."""
        return 0 if self._saver is None else self._saver.news()

    def heard(self, totals: StepTotals) -> None:
        """The sums of a step have come."""
        self.stop_requested = self.stop_requested or totals.stop > 0
        self._news = max(self._news, totals.news)

    def end(self, cause: Cause | None, lr: float, drain: Callable[[], None]) -> None:
        """A step is over. Collective where there are news.

        Args:
            cause: why it has changed nothing; None where it has. drain: completes what is under way, before ranks exchange news.

        Raises:
            DivergedError: one step more than may be skipped, one after another.
        """
        self._count(cause, lr)
        if self._saver is not None and self._news >= self._saver.size:
            drain()
            self._saver.hear()
        self._news = 0
        self._notes.phase(BETWEEN)

    def restore(self, position: Position) -> None:
        """Training goes on from a position."""
        self.skipped, self.skipped_in_a_row, self.cause = position.skipped, position.skipped_in_a_row, None

    def position(self, global_step: int) -> Position:
        """Where training stands, as a checkpoint keeps it. global_step: steps done."""
        return Position(global_step=global_step, skipped=self.skipped, skipped_in_a_row=self.skipped_in_a_row)

    def _count(self, cause: Cause | None, lr: float) -> None:
        if cause is None:
            self.skipped_in_a_row = 0
            return
        self.cause = cause
        self.skipped += 1
        self.skipped_in_a_row += 1
        _log.info("step %d skipped: %s", cause.step, cause)
        if self.skipped_in_a_row > self._most_skips:
            raise too_many_skips(self.skipped_in_a_row, cause, lr)


def too_many_skips(skipped_in_a_row: int, cause: Cause, lr: float) -> DivergedError:
    """The error of a training that skips one step more than it may, one after another. lr: of the last of them."""
    return DivergedError(
        f"{skipped_in_a_row} steps, one after another, are not finite and were skipped, the last one step {cause.step}, as "
        f"{cause}; lower optimizer.lr ({lr:g} there), look for broken samples, or raise on_nonfinite.most.",
        ranks=cause.blamed,
    )
