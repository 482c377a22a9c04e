"""HDF5 and its file locks, in the run directory and on the configuration's data files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor.check import Check, JobView, JoinedPlace, OwnPlace, present
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.doctor.subjects.directories import existing, probe_path
from hpctrain.core.errors import DataError, HpctrainError

LOCKED = FindingKind(
    "hdf5-lock",
    Severity.FAULT,
    "HDF5 cannot lock a data file: the file system has no locks, or another process holds one, and locks are asked for.",
    "export HDF5_USE_FILE_LOCKING=FALSE",
)
NO_LOCKS = FindingKind(
    "no-hdf5-locks",
    Severity.WARNING,
    "HDF5 cannot lock a new file in the run directory. hpctrain asks for no locks; other programs that read its files do.",
    "export HDF5_USE_FILE_LOCKING=FALSE",
)
DATA = FindingKind(
    "data-file",
    Severity.FAULT,
    "A data file of the configuration cannot be opened on some node.",
    "Make it, or give its path: `data.train`, `data.test`.",
)

OTHER_DATA = FindingKind(
    "other-data",
    Severity.FAULT,
    "Ranks have other data files, or another file of weights, under the same path: a training is refused.",
    "Give all nodes the same files.",
)

_SWITCH = "HDF5_USE_FILE_LOCKING"


@dataclass(frozen=True)
class Hdf5Facts:
    """HDF5 on a node.

    Attributes:
        directory: in which a file was made. failure: of that; empty where it went well.
        data: (path, sentence, whether a lock is the cause) of each data file that cannot be opened. files: that can.
        switch: the environment's word on locks.
    """

    directory: str = ""
    failure: str = ""
    data: tuple[tuple[str, str, bool], ...] = ()
    files: int = 0
    switch: str = ""


def gather(place: OwnPlace) -> Hdf5Facts | None:
    """The facts of this node."""
    if not place.leads_node:
        return None
    directory = existing(place.directory)
    wanted = _data_files(place)
    closed = tuple(fault for fault in map(_fault_of, wanted) if fault is not None)
    return Hdf5Facts(str(directory), _probe(directory), closed, len(wanted) - len(closed), os.environ.get(_SWITCH, ""))


def _data_files(place: OwnPlace) -> list[Path]:
    from hpctrain.config.data_section import SYNTHETIC

    if place.config is None:
        return []
    named = (place.config.data.train, place.config.data.test)
    return [Path(path) for path in named if path and path != SYNTHETIC]


def _fault_of(path: Path) -> tuple[str, str, bool] | None:
    """(path, a training's sentence, whether a lock is the cause) of a file that it could not open; None where it could."""
    from hpctrain.data.image_file import ImageFile

    try:
        ImageFile.open(path)
    except DataError as error:
        return str(path), str(error), "lock" in str(error.__cause__).lower()
    return None


def _probe(directory: Path) -> str:
    """Make an HDF5 file as programs do by default, and read it; the reason where that fails because of a lock, else nothing."""
    import h5py

    path = probe_path(directory, "hdf5")
    try:
        with h5py.File(path, "w") as file:
            file["probe"] = 1
        with h5py.File(path, "r") as file:
            file["probe"][()]
    except OSError as error:
        return str(error) if "lock" in str(error) else ""  # what else is wrong with the directory has its own check
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return ""


def judge(job: JobView, facts: Sequence[Hdf5Facts | None]) -> list[DoctorFinding]:
    """A finding for each data file that cannot be opened on a node, and one for locks."""
    found: dict[str, DoctorFinding] = {}
    for rank, fact in present(facts):
        where = f" on {job.hosts[rank]}" if len(job.nodes) > 1 else ""
        for path, sentence, locked in fact.data:
            switch = f" ({_SWITCH} is {fact.switch})" if fact.switch else ""
            text = f"HDF5 cannot lock the data file {path}{where}{switch}."
            found.setdefault(path, LOCKED.found(text) if locked else DATA.from_error(sentence))
        if fact.failure:
            text = f"HDF5 cannot lock a file in {fact.directory}{where}: {fact.failure}."
            found.setdefault(fact.directory, NO_LOCKS.found(text))
    if found:
        return list(found.values())
    count = facts[0].files if facts[0] is not None else 0
    files = "" if not count else "; the data file can be opened" if count == 1 else f"; {count} data files can be opened"
    return [fine(f"Locks work in the run directory{files}.")]


def gather_same(place: JoinedPlace) -> tuple[str, int]:
    """Return (a training's error for inputs that differ between ranks, or "", the number of files compared). Collective."""
    config, world = place.own.config, place.world
    if config is None:
        return "", 0
    from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
    from hpctrain.run.images import configured_splits, open_alike
    from hpctrain.experiment.initial_weights import read_weights
    from hpctrain.job.same_start import compare

    try:
        files = len(open_alike(world, config, configured_splits(config)))
        if config.init.weights is not None:
            weights = Path(config.init.weights)
            compare(world, raise_on_all_ranks(world, lambda: read_weights(world, weights)))
            files += 1
    except HpctrainError as error:
        return str(error), 0
    return "", files


def judge_same(job: JobView, facts: Sequence[tuple[str, int]]) -> list[DoctorFinding]:
    """Return one finding. `gather_same` has already compared the ranks."""
    difference, files = facts[0]
    if difference:
        return [OTHER_DATA.from_error(difference)]
    if job.size == 1 or not files:
        return [fine("Nothing to compare.")]
    return [fine(f"All ranks have the same {'data file' if files == 1 else f'{files} data files'}.")]


SAME = Check(
    "data files", "that all ranks have the same data files and weights", (OTHER_DATA,), gather_same, judge_same, joined=True
)
CHECK = Check("HDF5", "locks of HDF5 in the directory for runs, and the data files", (LOCKED, NO_LOCKS, DATA), gather, judge)
