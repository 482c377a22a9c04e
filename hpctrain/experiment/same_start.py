"""The start of a job is the same on all ranks: what it was asked for, the packages that compute, and the files of hpctrain."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.comm.base import Communicator
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.experiment.resume_rules import flat
from hpctrain.storage.run_directory import software_versions

_PACKAGE = Path(__file__).parents[1]
#: parts of the package that no training loads, and the commands, whose words are compared as the configuration that they give
_ASIDE = (
    *("backend/cuda/emulator/", "bench/", "cli/", "data/convert/", "doctor/", "report/", "site/", "testing/", "virtual/"),
    *(f"data/{name}.py" for name in ("check", "fetch", "pictures")),
    *(f"experiment/{name}.py" for name in ("judgement", "options_schema", "prediction", "run_events", "run_state")),
    *(f"experiment/{name}.py" for name in ("model_weights", "simulated_scaling", "smoke", "stored_run")),
    *(f"launch/{name}.py" for name in ("supervised_command", "supervisor", "train_command")),
    *("models/onnx_model.py", "planner/formulas.py", "storage/convert.py", "trace/step_lanes.py", "train/predictor.py"),
)
#: modules that only a rank with a GPU loads
_OF_GPUS = ("backend/cuda/", "backend/kernels/cuda/")
#: what the driver of NVIDIA's GPUs has on a node, and on Windows' Linux
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
#: keys that may have another value on each node
_BY_NODE = ("threads", "flight")
#: a kind of facts -> its name in a sentence, and what mends a difference
_KINDS: Mapping[str, tuple[str, str]] = {
    "configuration": ("another configuration", "give all ranks the same file and overrides"),
    "arguments": ("other arguments of hpctrain.start", "give all ranks the same"),
    "replica": ("other arguments of job.replica", "give all ranks the same"),
    "program": ("another program", "give all nodes the same file"),
    "packages": ("other packages", "give all nodes the same environment"),
    "files": ("other files of hpctrain", "install the same version of it on all nodes"),
    "GPU files": ("other files of hpctrain", "install the same version of it on all nodes"),
}
#: those of which files are compared by checksums, which say nothing to a reader
_OF_FILES = ("program", "files", "GPU files")


def check_same_start(world: Communicator, config: Config | None, *, leads_node: bool = True) -> None:
    """Compare what the ranks of a configured job have started with. Collective; every rank raises the same error.

    Args:
        config: None: there is none to compare.
        leads_node: this rank reads the files of hpctrain, which are the same for all ranks of its node.

    Raises:
        ConfigError: names the first rank that differs from rank 0, and the first thing that does.
    """
    values = {} if config is None else flat(config.model_dump(mode="json"))
    configuration = {key: value for key, value in values.items() if key not in _BY_NODE}
    _check(world, {"configuration": configuration}, leads_node=leads_node)


def check_same_program(
    world: Communicator, arguments: Mapping[str, Any], program: Path | None, *, leads_node: bool = True
) -> None:
    """The same for a program with a loop of its own.

    Args:
        arguments: of `hpctrain.start`, that must be alike. program: the file of the program; None: it has none.
        leads_node: this rank reads the files of hpctrain, which are the same for all ranks of its node.

    Raises:
        ConfigError: as `check_same_start`.
    """
    checksum = {} if program is None else {program.name: zlib.crc32(program.read_bytes())}
    _check(world, {"arguments": arguments, "program": checksum}, leads_node=leads_node)


def _check(world: Communicator, asked: Mapping[str, Mapping[str, Any]], *, leads_node: bool) -> None:
    """Compare what was asked for, by kind, and the software."""
    files = package_files(_PACKAGE) if leads_node else None
    of_gpus = package_files(_PACKAGE, of_gpus=True) if leads_node and any(path.exists() for path in _DRIVERS) else None
    _compare(world, {**asked, "packages": software_versions(), "files": files, "GPU files": of_gpus})


def check_same_replica(world: Communicator, arguments: Mapping[str, Any]) -> None:
    """Compare the arguments of `Job.replica`, which decide what ranks post. Collective; every rank raises the same error.

    Raises:
        ConfigError: as `check_same_start`.
    """
    _compare(world, {"replica": arguments})


def _compare(world: Communicator, facts: Mapping[str, Mapping[str, Any] | None]) -> None:
    """A few dozen bytes of each rank where all is well; the facts themselves travel only where they differ."""
    digests = world.allgather_object({kind: None if values is None else _digest(values) for kind, values in facts.items()})
    for kind in facts:
        of_ranks = [digest[kind] for digest in digests]
        reference = next((digest for digest in of_ranks if digest is not None), None)
        if any(digest not in (None, reference) for digest in of_ranks):
            _raise_difference(kind, world.allgather_object(facts[kind]))


def package_files(folder: Path, *, of_gpus: bool = False) -> dict[str, int]:
    """A checksum (CRC-32) of each module of a package that trainings may load, by its path in it.

    Args:
        of_gpus: those that only ranks with a GPU load, or all others: each is a file that the first rank of a node opens.
    """
    modules = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    compared = {name: path for name, path in modules.items() if not name.startswith(_ASIDE)}
    return {name: zlib.crc32(path.read_bytes()) for name, path in compared.items() if name.startswith(_OF_GPUS) == of_gpus}


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _raise_difference(kind: str, by_rank: list[Mapping[str, Any] | None]) -> None:
    """Raise the first difference to the first rank that has such facts."""
    name, mending = _KINDS[kind]
    first, reference = next((rank, values) for rank, values in enumerate(by_rank) if values is not None)
    for rank, values in enumerate(by_rank):
        if values is None or values == reference:
            continue
        key = next(key for key in sorted({**reference, **values}) if reference.get(key) != values.get(key))
        here, there = ("none" if one is None else one for one in (values.get(key), reference.get(key)))
        what = f"{key} differs" if kind in _OF_FILES else f"{key} is {here}, not {there}"
        raise ConfigError(f"Rank {rank} has {name} than rank {first}: {what}; {mending}.")
