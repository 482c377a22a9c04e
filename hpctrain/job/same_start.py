"""Checks that all ranks of a job start alike, with the same request, packages, code and input files.

Each rank reads data files, weights, checkpoints and code by itself, by a path that may refer to a different file on another node.
Ranks with different inputs would train without an error, but the result would be wrong. Therefore everything that ranks read
separately is a `Subject` and is compared before use (`comm.base.compare`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.assembly.options import named, names
from hpctrain.comm.base import Communicator, Subject, compare
from hpctrain.config.resume_rules import flat
from hpctrain.config.schema import Config
from hpctrain.core import user_code
from hpctrain.core.errors import DataError
from hpctrain.core.files import read_bytes
from hpctrain.data.image_file import ImageFile, digest_of, normal_name
from hpctrain.data.readers import BlockReader
from hpctrain.runs.directory import software_versions

_PACKAGE = Path(__file__).parents[1]
#: parts of the package that no training imports, and the commands, whose arguments are compared as a configuration
_ASIDE = (
    *("bench/", "cli/", "data/convert/", "doctor/", "report/", "site/", "testing/"),
    *(f"data/{name}.py" for name in ("check", "fetch", "pictures")),
    *(f"run/{name}.py" for name in ("model_weights", "smoke", "stored_run")),
    *(f"runs/{name}.py" for name in ("comparison", "results", "state")),
    *("launch/supervisor.py", "models/onnx_model.py"),
)
#: modules that only a rank with a GPU imports
_OF_GPUS = ("backend/cuda/",)
#: device files of NVIDIA's GPU driver, on Linux and on Windows Subsystem for Linux
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
#: keys whose values may differ between nodes
_BY_NODE = ("threads", "flight")
#: arguments in which ranks of a program may differ
_PER_RANK_ARGUMENTS = ("self", "model", "replica", "images", "labels", "path", "like", "prefetch", "threads")
#: limits of the samples whose stored bytes are compared: number and bytes; at least two samples are compared
_MOST_SAMPLES, _MOST_BYTES = 16, 1 << 20
#: number of digits of a compared SHA-256
_DIGITS = 16


def _differs(key: str, here: object, there: object) -> str:
    """Return the text for a difference of a file that is compared by checksum.

    The checksums are omitted, because they would not help the user.
    """
    return f"{key} differs"


def check_same_start(
    world: Communicator, config: Config | None, *, leads_node: bool = True, options: Mapping[str, Any] | None = None
) -> None:
    """Compare the configuration, options and software of the ranks of a job. Collective; every rank raises the same error.

    Args:
        config: configuration to compare; None: there is none.
        options: options of the command that affect the joint work of the ranks, JSON-compatible; None: there are none.
        leads_node: whether this rank reads the files of hpctrain, on behalf of all ranks of its node.

    Raises:
        ConfigError: ranks differ; the message names the first differing rank and fact.
    """
    if world.size == 1:
        return
    values = {} if config is None else flat(config.model_dump(mode="json"))
    configuration = {key: value for key, value in values.items() if key not in _BY_NODE}
    asked = Subject("another configuration", "give all ranks the same file and overrides", configuration)
    given = Subject("other options", "give all ranks the same command", options or {})
    compare(world, asked, given, *_software(leads_node=leads_node))


def check_same_program(
    world: Communicator, arguments: Mapping[str, Any], program: Path | None, *, leads_node: bool = True
) -> None:
    """Compare the program, arguments and software of the ranks of a user program.

    Collective; every rank raises the same error.

    Args:
        arguments: arguments of `hpctrain.start` that must be the same.
        program: file of the program; None: it has none.
        leads_node: whether this rank reads the files of hpctrain, on behalf of all ranks of its node.

    Raises:
        ConfigError: ranks differ; the message names the first differing rank and fact.
    """
    if world.size == 1:
        return
    checksum = {} if program is None else {program.name: zlib.crc32(read_bytes(program))}
    compare(
        world,
        Subject("other arguments of hpctrain.start", "give all ranks the same arguments", arguments),
        Subject("another program", "give all nodes the same file", checksum, _differs),
        *_software(leads_node=leads_node),
    )


def _software(*, leads_node: bool) -> tuple[Subject, ...]:
    """Return the subjects for the software: the packages that compute, and the files of hpctrain."""
    files = package_files(_PACKAGE) if leads_node else None
    of_gpus = package_files(_PACKAGE, of_gpus=True) if leads_node and any(path.exists() for path in _DRIVERS) else None
    remedy = "install the same version of hpctrain on all nodes"
    return (
        Subject("other packages", "give all nodes the same environment", software_versions()),
        Subject("other files of hpctrain", remedy, files, _differs),
        Subject("other files of hpctrain", remedy, of_gpus, _differs),
    )


def called_with(method: str, arguments: Mapping[str, Any]) -> Subject:
    """Return a subject with the arguments of a method of `Job`.

    Callables and arguments in which ranks may differ are omitted.
    """
    texts = {
        name: str(sorted(value.items()) if isinstance(value, Mapping) else value)
        for name, value in arguments.items()
        if name not in _PER_RANK_ARGUMENTS and not callable(value)
    }
    return Subject(f"other arguments of {method}", "give all ranks the same arguments", texts)


def opened_file(key: str, file: ImageFile) -> Subject:
    """Return a subject with the facts of an open data file, for which a bounded number of samples is read.

    Args:
        key: key of the configuration, or a description of the file.
    """
    facts, remedy = compared_facts(file), f"give all nodes the same {file.path}"
    return Subject(f"another {key}", remedy, facts, partial=True, error=DataError)


def compared_facts(file: ImageFile) -> dict[str, Any]:
    """Return the facts by which ranks check that they have opened the same data, in the order of comparison.

    The facts describe the samples, not the file format: pixels and picture files of the same samples have equal values for all
    facts that both provide. The stored bytes of at most 16 evenly spaced samples are read, for the CRC-32 of their pixels.
    """
    reader, manifest = file.pixels, file.manifest
    labels = manifest.get("labels") or digest_of(file.labels.astype("<i8", copy=False))
    facts: dict[str, Any] = {
        "number of samples": len(file),
        "shape of images": " x ".join(map(str, file.shape)),
        "number of classes": len(file.class_names),
        **{f"class {number}": normal_name(name) for number, name in enumerate(file.class_names)},
        "checksum of labels": labels[:_DIGITS],
        **{f"mean of channel {channel}": value for channel, value in enumerate(file.mean.tolist())},
        **{f"deviation of channel {channel}": value for channel, value in enumerate(file.std.tolist())},
    }
    if isinstance(reader, BlockReader):
        mean_bytes = max(1, reader.extents.size_bytes // len(file))
        count = min(len(file), _MOST_SAMPLES, max(2, _MOST_BYTES // mean_bytes))
        samples = np.unique(np.linspace(0, len(file) - 1, count).astype(np.int64))
        facts |= {f"checksum of image {sample}": value for sample, value in reader.read_sums(samples).items()}
        sums = reader.pixel_sums(file.sums)
        if sums is not None:
            facts["checksum of all images"] = digest_of(sums.astype("<u4", copy=False))[:_DIGITS]
    if "images" in manifest and "blob" not in manifest:
        facts["checksum of stored images"] = manifest["images"][:_DIGITS]
    return facts


def package_files(folder: Path, *, of_gpus: bool = False) -> dict[str, int]:
    """Return the CRC-32 checksum of each module of a package that a training may import, by its path in the package.

    Every one of these modules is read, so only one rank per node should call this function.

    Args:
        of_gpus: True: the modules that only ranks with a GPU import; False: all other modules.
    """
    modules = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    compared = {name: path for name, path in modules.items() if not name.startswith(_ASIDE)}
    return {name: zlib.crc32(path.read_bytes()) for name, path in compared.items() if name.startswith(_OF_GPUS) == of_gpus}


def check_same_code(world: Communicator) -> None:
    """Compare the code that the ranks have loaded, and the user's modules that it imports. Collective.

    Raises:
        ConfigError: a rank has loaded different code than most ranks under the same name; the same error on every rank.
    """
    if world.size > 1:
        remedy = "give all nodes the same files"
        of_references = Subject("other code", remedy, user_code.digests())
        compare(world, of_references, Subject("other code", remedy, user_code.modules(), partial=True))


def is_trusted(stored: Config, config: Config) -> bool:
    """Return whether loading `stored`, the configuration in a checkpoint, imports no user code that `config` does not name."""
    return all(name in names(kind) for kind, name in set(named(stored)) - set(named(config)))
