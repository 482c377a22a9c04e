"""The hashes of a run: of its state after every so many steps, appended to a file of the run directory by rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.job.session import Session
from hpctrain.storage.bookkeeping import PatientRecords
from hpctrain.runs.directory import RunDirectory
from hpctrain.trace.tracer import Category
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import Position

if TYPE_CHECKING:
    from hpctrain.train.state_hashes import StateHashes


class RunHashes:
    """Keeps records of hashes. Making it and `keep` are collective where the configuration asks for hashes.

    Args:
        replica: agreed. directory: of the run; where its disk refuses records, they wait (see `Bookkeeping`).
    """

    def __init__(self, session: Session, replica: Replica, directory: RunDirectory) -> None:
        self._is_root, self._replica, self._trace = session.is_root, replica, session.progress.trace
        self._hashes: StateHashes | None = None
        if not session.config.hashes.every_steps:
            return
        from hpctrain.runs.records import HashFile  # here: only runs that keep hashes need it
        from hpctrain.train.state_hashes import StateHashes

        self._hashes = StateHashes(replica)
        self._records = PatientRecords(directory.bookkeeping, "hashes", HashFile(directory.hashes_path).append)

    def keep(self, position: Position) -> None:
        """Record the hashes of the state at a position. Between steps, after `settle` of the replica; drains it."""
        if self._hashes is None:
            return
        from hpctrain.train.element_hash import hash_of_all  # loaded earlier, by StateHashes

        begin_ns = self._trace.clock_ns() if self._trace is not None else 0
        self._replica.drain()
        hashes = self._hashes.take()
        if self._is_root:
            whole = hash_of_all(hashes)
            self._records.add({"step": position.global_step, "epoch": position.epoch + 1, "all": whole, "hashes": hashes})
        if self._trace is not None:
            self._trace.add(Category.WORK, "hashes", begin_ns, self._trace.clock_ns())

    def finish(self, position: Position) -> None:
        """Write what waits, and say what is lost. The position is that of the end. Not collective."""
        if self._hashes is not None:
            self._records.close()
