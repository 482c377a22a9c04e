"""Named tensors and JSON metadata in one HDF5 file, every byte of them under a checksum.

Layout: one contiguous little-endian dataset per tensor at its name ("parameters/fc.weight" is in the group "parameters"), with
the attribute `sha256` over dtype, shape and elements; the dataset `meta`, JSON as UTF-8 text, likewise; and on the root the
attributes `format`, `format_version`, `hpctrain`, `numpy` (versions of the writer) and `sha256`, over the list of all names
and checksums. The root's checksum is written last: a file without it was never finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from hpctrain import __version__
from hpctrain.errors import CheckpointError

Result = TypeVar("Result")

FORMAT = "hpctrain-checkpoint"
FORMAT_VERSION = 1
_META = "meta"
#: from this version on HDF5 keeps checksums of its own structures, so that damage to them is found instead of followed
_LIBVER = ("v110", "v110")
#: what h5py raises on a damaged file, depending on the byte that is damaged
_DAMAGE = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, MemoryError)


def _little_endian(array: np.ndarray) -> np.ndarray:
    """The array itself, or one copy of it where it is not C-contiguous or of another byte order."""
    assert array.dtype.kind in "biuf", f"dtype {array.dtype} has no place in a checkpoint"
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def _digest(array: np.ndarray) -> str:
    """sha256 over dtype, shape and elements of a C-contiguous array."""
    head = f"{array.dtype.str} {array.shape}\n".encode()
    state = hashlib.sha256(head)
    state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def _list_digest(digests: Mapping[str, str]) -> str:
    lines = "".join(f"{digests[name]} {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Numbers of NumPy as JSON's; json calls it for what it does not know."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in a checkpoint's metadata")


def write_store(path: Path, tensors: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> None:
    """Write `path` anew. `tensors` is read once, one at a time, in its own order: a lazy mapping never needs them together.

    Names have a group ("group/name"). Takes no memory beyond the tensor at hand and at most one copy of it.

    Raises:
        OSError, RuntimeError: the file cannot be written.
    """
    digests: dict[str, str] = {}
    # Many parallel file systems have no locks; the writer's temporary name is nobody else's.
    with h5py.File(path, "w", libver=_LIBVER, locking=False) as file:
        for name in tensors:
            assert "/" in name, f"{name} has no group"
            digests[name] = _write_tensor(file, name, _little_endian(tensors[name]))
        digests[_META] = _write_meta(file, meta)
        file.attrs["format"] = FORMAT
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["hpctrain"] = __version__
        file.attrs["numpy"] = np.__version__
        file.flush()
        file.attrs["sha256"] = _list_digest(digests)


def _write_tensor(file: h5py.File, name: str, array: np.ndarray) -> str:
    dataset = file.create_dataset(name, data=array)
    dataset.attrs["sha256"] = digest = _digest(array)
    return digest


def _write_meta(file: h5py.File, meta: Mapping[str, object]) -> str:
    text = json.dumps(dict(meta), default=_plain, sort_keys=True, indent=1).encode()
    # A dataset, because an attribute holds 64 KiB at most and a plan may be longer.
    dataset = file.create_dataset(_META, data=np.bytes_(text), dtype=h5py.string_dtype("utf-8", len(text)))
    dataset.attrs["sha256"] = digest = hashlib.sha256(text).hexdigest()
    return digest


def read_store(path: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """All tensors and the metadata of `path`, every checksum verified.

    Raises:
        CheckpointError: missing, truncated, not a checkpoint, of another format version, or damaged (the message names what).
    """
    return _with_file(path, _read)


def verify_store(path: Path) -> None:
    """Verify every checksum, one tensor in memory at a time. Raises as `read_store`."""
    _with_file(path, _verify)


def _with_file(path: Path, work: Callable[[Path, h5py.File], Result]) -> Result:
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    try:
        with h5py.File(path, "r", locking=False) as file:
            _check_header(path, file)
            return work(path, file)
    except _DAMAGE as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"The checkpoint {path} is truncated or damaged, HDF5 cannot read it ({reason}); use an older one."
        ) from error


def _check_header(path: Path, file: h5py.File) -> None:
    if file.attrs.get("format") != FORMAT:
        raise CheckpointError(f"The file {path} is HDF5 but no checkpoint of hpctrain.")
    version = file.attrs.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {version}, written by hpctrain {file.attrs.get('hpctrain')}; "
            f"hpctrain {__version__} reads version {FORMAT_VERSION}."
        )


def _read(path: Path, file: h5py.File) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    tensors = dict(_tensors(path, file))
    return tensors, json.loads(file[_META][()])


def _verify(path: Path, file: h5py.File) -> None:
    for _ in _tensors(path, file):
        pass


def _tensors(path: Path, file: h5py.File) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of all datasets, verified; then the metadata and the list itself, verified."""
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    digests = {name: str(file[name].attrs["sha256"]) for name in names}
    if _META not in digests or file.attrs.get("sha256") != _list_digest(digests):
        raise CheckpointError(f"The list of tensors in checkpoint {path} does not match its checksum; use an older one.")
    for name in names:
        if name == _META:
            actual, what = hashlib.sha256(file[name][()]).hexdigest(), "The metadata"
        else:
            array = np.asarray(file[name][()])
            actual, what = _digest(array), f"Tensor {name}"
        if actual != digests[name]:
            raise CheckpointError(f"{what} in checkpoint {path} does not match its checksum; use an older one.")
        if name != _META:
            yield name, array
