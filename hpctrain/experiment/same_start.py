"""The start of a job is the same on all ranks: the configuration, the packages that compute, and the files of hpctrain."""

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
#: keys that may have another value on each node
_BY_NODE = ("threads", "flight")
#: a kind of facts -> its name in a sentence, and what mends a difference
_KINDS: Mapping[str, tuple[str, str]] = {
    "configuration": ("another configuration", "give all ranks the same file and overrides"),
    "packages": ("other packages", "give all nodes the same environment"),
    "files": ("other files of hpctrain", "install the same version of it on all nodes"),
}


def check_same_start(world: Communicator, config: Config | None, *, leads_node: bool = True) -> None:
    """Compare what the ranks have started with. Collective; every rank raises the same error.

    A few dozen bytes of each rank where all is well; the facts themselves travel only where they differ.

    Args:
        config: None: there is none to compare.
        leads_node: this rank reads the files of hpctrain, which are the same for all ranks of its node.

    Raises:
        ConfigError: names the first rank that differs from rank 0, and the first thing that does.
    """
    configuration = {} if config is None else flat(config.model_dump(mode="json"))
    facts: dict[str, Mapping[str, Any] | None] = {
        "configuration": {key: value for key, value in configuration.items() if key not in _BY_NODE},
        "packages": software_versions(),
        "files": package_files(_PACKAGE) if leads_node else None,
    }
    digests = world.allgather_object({kind: None if values is None else _digest(values) for kind, values in facts.items()})
    for kind in _KINDS:
        of_ranks = [digest[kind] for digest in digests]
        reference = next((digest for digest in of_ranks if digest is not None), None)
        if any(digest not in (None, reference) for digest in of_ranks):
            _raise_difference(kind, world.allgather_object(facts[kind]))


def package_files(folder: Path) -> dict[str, int]:
    """A checksum (CRC-32) of each module of a package, by its path in it."""
    return {str(path.relative_to(folder)): zlib.crc32(path.read_bytes()) for path in sorted(folder.rglob("*.py"))}


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
        what = f"{key} differs" if kind == "files" else f"{key} is {here}, not {there}"
        raise ConfigError(f"Rank {rank} has {name} than rank {first}: {what}; {mending}.")
