"""State that a process keeps across a loss of ranks: the ownership of the run, its directory, and the lost ranks.

Rank 0 holds the ownership of a run, and all ranks have its claim. After each loss, the remaining ranks form a smaller world. Each
rank keeps one `ShrinkState` for all worlds of the run. Ranks detect a loss at different points, so their states may differ.
`ShrinkState.agree` makes them equal before anything is created in the new world. This module does not import NumPy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.mpi import named
from hpctrain.config.schema import Config
from hpctrain.core.errors import CheckpointError, CommunicationTimeoutError, ConfigError, HpctrainError, RankLostError
from hpctrain.core.text import counted
from hpctrain.launch.launcher import Launcher
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.owner import MISSED_SECONDS, Claim, Contender, Owner, Ownership
from hpctrain.storage.checkpoint import remove_left

if TYPE_CHECKING:
    from hpctrain.comm.base import Communicator
    from hpctrain.job.session import Session
    from hpctrain.training.metrics import Reporter
    from hpctrain.training.snapshot import Position


_COMMAND = "hpctrain train"
# Interval between two attempts to take ownership, in seconds.
_LOOK_SECONDS = 0.5


class RunOwnership:
    """Ownership of a run by the job, as seen by one process. It survives a loss of ranks.

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
        contender = self._contender(session, run) if session.is_root else None
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

        After any other error, a rank may still be writing. The run then remains owned until the process ends. After a loss of
        ranks, the remaining ranks continue the run.
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
        """Return a contender for the run. After a loss of ranks, the new rank 0 takes over from the previous owner."""
        shrinks, known = session.config.on_lost_rank.shrinks, self.claim
        predecessor = known.owner.token if known is not None and known.run == run else ""
        missed = max(MISSED_SECONDS, 2 * session.config.deadline_seconds) if shrinks else MISSED_SECONDS
        return Contender(run, _COMMAND, predecessor=predecessor, missed_seconds=missed, outlives=shrinks)


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


class ShrinkState:
    """State of a run in one process, which survives a loss of ranks.

    Attributes:
        ownership: ownership of the run.
        directory: directory of the run; None before it has one.
        lost: lost ranks that are not reported yet, as numbered at the latest report.
        step: latest step that any rank had begun before the loss; 0: none.
        shrunk: whether ranks were lost.
    """

    def __init__(self) -> None:
        self.ownership = RunOwnership()
        self.directory: Path | None = None
        self.lost: tuple[int, ...] = ()
        self.step = 0
        self.shrunk = False
        self._first_step: int | None = None
        self._numbers: tuple[int, ...] = ()

    def begins(self, directory: RunDirectory, position: Position) -> None:
        """Record the directory of the run and, in the first call, the position at which training starts."""
        self.directory = directory.path
        if self._first_step is None:
            self._first_step = position.global_step

    def steps_left(self, steps: int, position: Position) -> int:
        """Return the number of requested steps that remain; 0 if there is no limit, -1 if none remain."""
        if not steps or self._first_step is None:
            return steps
        left = self._first_step + steps - position.global_step
        return left if left > 0 else -1

    def loses(self, size: int, ranks: Sequence[int], step: int) -> None:
        """Record the loss of `ranks` from a world of `size` ranks.

        Args:
            step: latest step that this rank had begun in this world; 0: none.
        """
        numbers = self._numbers or tuple(range(size))
        self.lost = tuple(sorted((*self.lost, *(numbers[rank] for rank in ranks))))
        self._numbers = tuple(number for rank, number in enumerate(numbers) if rank not in ranks)
        self.step, self.shrunk = max(self.step, step), True

    def agree(self, world: Communicator) -> None:
        """Make the state equal on all remaining ranks. Collective."""
        known = world.allgather_object((self.directory, self._first_step, self.step))
        directories, first_steps, steps = zip(*known, strict=True)
        self.directory = next((directory for directory in directories if directory is not None), None)
        self._first_step = next((step for step in first_steps if step is not None), None)
        self.step = max(steps)

    def resume(self, asked: str | None) -> str | None:
        """Return the source to resume from: the run itself if it has a checkpoint, else `asked`. Not collective."""
        if self.directory is None:
            return asked
        from hpctrain.storage import checkpoint  # imports NumPy, before which threads must be set

        return str(self.directory) if checkpoint.checkpoints(RunDirectory(self.directory).checkpoints) else asked

    def loss(self) -> str:
        """Return the beginning of a sentence that names the lost ranks and the step."""
        were = "was" if len(self.lost) == 1 else "were"
        return f"{named(self.lost)} {were} lost {f'in step {self.step}' if self.step else 'before the first step'}"

    def tell(self, reporter: Reporter, position: Position, ranks: int) -> None:
        """Report and record lost ranks that are not reported yet, and the position from which the run continues.

        Args:
            ranks: number of remaining ranks.
        """
        if not self.lost:
            return
        at = f"step {position.global_step}" if position.global_step else "the beginning"
        loss = self.loss()
        going = f"continuing with {counted(ranks, 'rank')} from {at}"
        reporter.warn(f"{loss[0].lower()}{loss[1:]}; {going}")
        place = {"epoch": position.epoch + 1, "step": position.global_step, "from_step": self.step}
        reporter.record("shrink", {**place, "lost": list(self.lost), "ranks": ranks})
        self.lost, self._numbers, self.step = (), (), 0


def check_offered(config: Config, launcher: Launcher) -> None:
    """Raise if the configuration requires continuing without lost ranks, but the environment does not support it.

    Raises:
        ConfigError: MPI or its launcher cannot continue after the death of a rank.
    """
    if not config.on_lost_rank.shrinks:
        return
    if not launcher.starts_mpi:
        here = "this is one process without MPI"
    else:
        from hpctrain.comm import mpi

        if mpi.goes_on_without_lost_ranks():
            return
        here = f"this is {mpi.describe()}, started by {launcher.name}"
    raise ConfigError(
        f"on_lost_rank.action is shrink, which needs Open MPI 5 started as `mpiexec --with-ft ulfm ...`, but {here}; "
        "the nearest legal value is stop."
    )
