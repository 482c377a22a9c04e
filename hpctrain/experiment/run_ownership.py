"""The ownership of a run by a job: one rank's process holds it, and all ranks know the owner. Loads no NumPy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.errors import CheckpointError, CommunicationTimeoutError, HpctrainError, RankLostError
from hpctrain.storage.leftovers import remove_left
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.owner import MISSED_SECONDS, Contender, Ownership

if TYPE_CHECKING:
    from hpctrain.job.session import Session

_COMMAND = "hpctrain train"
# Time between two looks at the record of an owner.
_LOOK_SECONDS = 0.5


class RunOwnership:
    """A process's knowledge of its job's ownership of a run. It survives the loss of ranks.

    Attributes:
        ownership: on rank 0, of the run that the job owns; None on other ranks, and before the job owns one.
    """

    def __init__(self) -> None:
        self.ownership: Ownership | None = None
        self._run: Path | None = None
        self._token = ""

    def take(self, session: Session, run: Path) -> bool:
        """Take ownership of a run, and release another run that the job owns. Collective.

        Waits for a sign of life if nothing else can tell whether another owner is alive.

        Returns:
            False if the job owned the run already.

        Raises:
            RunOwnedError: another owner is alive. CheckpointError: the run cannot be written.
        """
        from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks  # loads NumPy, before which threads must be set

        world, notes = session.world, session.progress.notes
        run = world.broadcast_object(run.resolve())
        if world.broadcast_object(self.ownership is not None and self.ownership.run == run):
            return False
        self.release()
        contender = self._contender(session, run) if session.is_root else None
        self._run, self._token = run, ""
        while not self._token:

            def attempt() -> str:
                if contender is not None:
                    self.ownership = _attempt(contender, run)
                return "" if self.ownership is None else self.ownership.owner.token

            self._token = world.broadcast_object(raise_on_all_ranks(world, attempt))
            notes.alive()
            if not self._token:
                time.sleep(_LOOK_SECONDS)
        return True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Release the run at the end of the block, and after an error that all ranks raise.

        After any other error a rank may still be writing, so that the run stays owned until the process has ended. After a loss
        of ranks the remaining ranks go on with the run.
        """
        try:
            yield
        except (RankLostError, CommunicationTimeoutError):
            raise
        except HpctrainError:
            self.release()
            raise
        self.release()

    def release(self) -> None:
        """Release the run. Not collective."""
        if self.ownership is not None:
            self.ownership.release()
            self.ownership = None

    def _contender(self, session: Session, run: Path) -> Contender:
        """Return a contender for the run. After a loss of ranks, the new rank 0 takes over from the process that owned it."""
        shrinks, predecessor = session.config.on_lost_rank.shrinks, self._token if self._run == run else ""
        missed = max(MISSED_SECONDS, 2 * session.config.deadline_seconds) if shrinks else MISSED_SECONDS
        return Contender(run, _COMMAND, predecessor=predecessor, missed_seconds=missed, outlives=shrinks)


def _attempt(contender: Contender, run: Path) -> Ownership | None:
    try:
        ownership = contender.attempt()
    except OSError as error:
        raise CheckpointError(
            f"The run {run} cannot be written to ({error.strerror}); make room or allow it, or train in another output."
        ) from error
    if ownership is not None:
        for directory in (run, RunDirectory(run).checkpoints):
            remove_left(directory, owned=True)  # the processes that began these files are dead
    return ownership
