"""Flight record of a rank: created with the process, written to a file once the run has a directory, watched by a heartbeat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.comm.base import Communicator, on_ranks, raise_on_all_ranks
from hpctrain.core.errors import DataError
from hpctrain.core.files import link_target, path_of
from hpctrain.flight.autopsy import records_in
from hpctrain.flight.recorder import FlightRecorder, Heartbeat
from hpctrain.job.session import Session
from hpctrain.launch import keeper
from hpctrain.launch.process_end import End
from hpctrain.runs.directory import RunDirectory
from hpctrain.training.metrics import Reporter

#: values of the configuration key `flight`: records in the run directory, and records in memory only
IN_RUN, NOWHERE = "run", "none"


@contextlib.contextmanager
def watched(flight: FlightRecorder, world: Communicator, deadline_seconds: float) -> Iterator[None]:
    """Terminate the process if it makes no progress within the deadline during the block. Collective.

    The stacks of all threads are printed first. If the block ends without an error, the record is marked as finished.
    """
    world.allgather_object(None)  # a barrier, so that the time that rank 0 sends is current on all ranks
    now_ns = world.broadcast_object(time.time_ns())
    flight.join(world.rank, world.size, now_ns, deadline_seconds, now_ns)
    heartbeat = Heartbeat(
        flight,
        deadline_seconds=deadline_seconds,
        abort=world.abort,
        rank=world.rank,
        pulse=keeper.current_keeper().pulse,
        end_keeper=keeper.current_keeper().end,
    ).start()
    try:
        yield
        heartbeat.close()
        if keeper.current_keeper().stays_stopped():
            heartbeat.end_keeper()
        flight.ended(End.FINISHED)
    finally:
        heartbeat.close()


def keep(session: Session, directory: RunDirectory, reporter: Reporter) -> None:
    """Write this rank's record to a file if the configuration enables it. A disk error does not end the run. Collective."""
    flight, where = session.progress.flight, session.config.flight
    wanted = flight is not None and where != NOWHERE
    # The path of a node-local directory may differ between nodes, so each rank expands the variables.
    own = where in (IN_RUN, NOWHERE) or raise_on_all_ranks(session.world, lambda: path_of(where))
    target = own / directory.path.name if isinstance(own, Path) else directory.flight
    if flight is not None and not wanted:
        keep_nowhere(flight)
    sentence = _kept(session, flight, directory, target) if flight is not None and wanted else None
    message = missing_on(session.world, sentence)
    if message is not None:
        reporter.warn(message)


def _kept(session: Session, flight: FlightRecorder, directory: RunDirectory, target: Path) -> str | None:
    """Write this rank's record to a directory. Return an error message, or None on success. Collective."""
    where = session.config.flight
    flight.comes_after(max(session.world.allgather_object(_latest_job(target) if session.grid.node.rank == 0 else 0)))
    try:
        link_target(target.parent)  # raises an error for a link of another user
        keep_in(flight, target)
        if session.is_root:
            directory.point_to_flight(None if where == IN_RUN else target)
    except OSError as error:
        return missing(target, error)
    return None


def _latest_job(directory: Path) -> int:
    """Return the number of the latest job with records in a directory; 0 if no record can be read."""
    try:
        return max(record.job for record in records_in(directory, operations=False))
    except (DataError, OSError, ValueError):
        return 0


def keep_in(flight: FlightRecorder, target: Path) -> None:
    """Write this rank's record to a file in `target` from now on, and send the path of the file to the rank's keeper process.

    Raises:
        OSError: the file cannot be created or the disk is full.
    """
    keeper.current_keeper().record(flight.keep_in(target))


def keep_nowhere(flight: FlightRecorder) -> None:
    """Keep this rank's record in memory only. The rank's keeper process then has no file in which to mark the end of the rank."""
    keeper.current_keeper().record(None)
    flight.keep_nowhere()


def missing(target: Path, error: OSError) -> str:
    """Return the message for flight records that cannot be written to `target`."""
    return f"no flight records: cannot write to {target} ({error.strerror})"


def missing_on(world: Communicator, sentence: str | None) -> str | None:
    """Return one message that lists the ranks whose records cannot be written; None if there are no such ranks. Collective.

    Args:
        sentence: message of this rank; None: its records are written or disabled.
    """
    sentences = world.allgather_object(sentence)
    ranks = [rank for rank, text in enumerate(sentences) if text is not None]
    return None if not ranks else f"{sentences[ranks[0]]}{on_ranks(ranks, world.size)}"
