"""Going back, within a run, to its newest checkpoint after values that are not finite, and on from there in another order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.data.sampler import Reordering
from hpctrain.core.errors import DivergedError
from hpctrain.run.build import Parts
from hpctrain.run.checkpoints import RunCheckpoints
from hpctrain.run.resume import Start, find_start
from hpctrain.job.session import Session
from hpctrain.storage import checkpoint
from hpctrain.runs.directory import RunDirectory, require_owned
from hpctrain.train.metrics_rest import Reporter
from hpctrain.train.snapshot import Position


class Rollback:
    """Takes a run back; `Trainer` calls it with the error. Every call is collective.

    Args:
        directory: of the run, which has a checkpoint from its first step on. reporter: is told of each time.
        checkpoints: of the run; the one that is being written is waited for.
        most: times that the run may go back to one checkpoint.
    """

    def __init__(
        self,
        session: Session,
        parts: Parts,
        directory: RunDirectory,
        reporter: Reporter,
        checkpoints: RunCheckpoints,
        most: int,
    ) -> None:
        self._session, self._parts, self._directory, self._reporter = session, parts, directory, reporter
        self._checkpoints = checkpoints
        self._most = most
        self._step, self._times = -1, 0

    def __call__(self, error: DivergedError, position: Position) -> Position:
        """The position to go on from, with all tensors of it in place.

        Args:
            position: where the error came.

        Raises:
            DivergedError: the run has come here too often. CheckpointError: no checkpoint can be read.
        """
        self._session.progress.notes.phase("a checkpoint")
        self._checkpoints.saver.settle()
        start = find_start(self._session, str(self._directory.path))
        assert start is not None, "a directory was named"
        there = start.position
        self._times = self._times + 1 if there.global_step == self._step else 1
        self._step = there.global_step
        if self._times > self._most:
            raise DivergedError(
                f"{error} The run has gone back to step {self._step} {self._most} times, each time in another order, without "
                f"coming to its next checkpoint; change what the first sentence says, or raise on_nonfinite.most.",
                ranks=error.ranks,
            )
        raise_on_all_ranks(self._session.world, partial(self._parts.replica.load, start.content))
        number = 1 + max((change.number for change in (*position.reorderings, *there.reorderings)), default=0)
        there = replace(there, reorderings=(*there.reorderings, Reordering(there.epoch, there.samples, number)))
        self._cut_records(there)
        self._checkpoints.go_on(start.without_tensors())
        self._report(error, position.global_step, there, number)
        return there

    def _cut_records(self, there: Position) -> None:
        """Rank 0 takes out of the run what lies behind the position."""

        def cut() -> None:
            if self._session.is_root:
                require_owned(self._directory)
                checkpoint.set_aside(self._directory.checkpoints, there.global_step)
                self._directory.cut_metrics(there.epoch, there.global_step, goes_back=True)

        raise_on_all_ranks(self._session.world, cut)

    def _report(self, error: DivergedError, from_step: int, there: Position, number: int) -> None:
        epoch, step = there.epoch + 1, there.global_step
        record = {"epoch": epoch, "step": step, "from_step": from_step, "samples": there.samples, "order": number}
        self._reporter.record("rollback", {**record, "error": str(error)})
        self._reporter.say(f"went back from step {from_step} to step {step}, and on in order {number}: {error}")


def rollback(
    session: Session,
    parts: Parts,
    directory: RunDirectory,
    reporter: Reporter,
    checkpoints: RunCheckpoints,
    start: Start | None,
) -> Rollback | None:
    """The way back of a run, where its configuration asks for one. Collective.

    Args:
        checkpoints: of the run; if it has none yet, its first state is saved. start: of a resumed run; None: the run is new.
    """
    answer = session.config.on_nonfinite
    if answer.action != "rollback":
        return None
    if start is None or start.directory is None:
        checkpoints.save(Position() if start is None else start.position)
    return Rollback(session, parts, directory, reporter, checkpoints, answer.most)
