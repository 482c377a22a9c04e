"""Ownership of a run by a job: rank 0 holds it, and all ranks have its claim. This module does not import NumPy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.errors import CheckpointError, CommunicationTimeoutError, HpctrainError
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.owner import Claim, Contender, Owner, Ownership
from hpctrain.storage.checkpoint import remove_left

if TYPE_CHECKING:
    from hpctrain.job.session import Session


_COMMAND = "hpctrain train"
# Interval between two attempts to take ownership, in seconds.
_LOOK_SECONDS = 0.5


class RunOwnership:
    """Ownership of a run by the job, as seen by one process.

    Attributes:
        ownership: ownership of the job's run, on rank 0; None on other ranks, and before the job owns a run.
        claim: claim of the job to its run, on every rank; None before the job owns a run.
    """

    def __init__(self) -> None:
        self.ownership: Ownership | None = None
        self.claim: Claim | None = None

    def take(self, session: Session, run: Path) -> bool:
        """Take ownership of a run, and release another run that the job owns. Collective.

        The call waits for a sign of life if nothing else shows whether another owner is alive.

        Returns:
            True if the job has become the owner; False if it owned the run already.

        Raises:
            RunOwnedError: another owner is alive.
            CheckpointError: the run directory cannot be written.
        """
        from hpctrain.comm.base import raise_on_all_ranks  # imports NumPy, before which threads must be set

        world, notes = session.world, session.progress.notes
        run = world.broadcast_object(run.resolve())
        if world.broadcast_object(self.ownership is not None and self.ownership.run == run):
            return False
        self.release()
        contender = Contender(run, _COMMAND) if session.is_root else None
        self.claim = None
        while self.claim is None:

            def attempt() -> Owner | None:
                if contender is not None:
                    self.ownership = _attempt(contender, run)
                return None if self.ownership is None else self.ownership.owner

            owner = world.broadcast_object(raise_on_all_ranks(world, attempt))
            notes.alive()
            if owner is None:
                time.sleep(_LOOK_SECONDS)
            else:
                self.claim = self.ownership or Claim(run, owner)
        return True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Release the run at the end of the block, and after an error that all ranks raise.

        After any other error, a rank may still be writing. The run then remains owned until the process ends.
        """
        try:
            yield
        except CommunicationTimeoutError:
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


def _attempt(contender: Contender, run: Path) -> Ownership | None:
    try:
        ownership = contender.attempt()
    except OSError as error:
        raise CheckpointError(
            f"Cannot write to the run {run} ({error.strerror}); free disk space, grant write permission, or use another output."
        ) from error
    if ownership is not None:
        for directory in (run, RunDirectory(run).checkpoints):
            remove_left(directory, owned=True)  # the processes that wrote these files are dead
    return ownership
