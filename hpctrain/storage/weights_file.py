"""Weight files of other frameworks: safetensors, and PyTorch's format if PyTorch is installed.

The files hold arrays by name, in the layout of the other framework; `models.state_dict` converts names and layouts.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hpctrain.core.errors import CheckpointError, errors_as
from hpctrain.core.files import open_regular, read_bytes
from hpctrain.core.text import shortened, size_text
from hpctrain.storage.atomic_write import replacing

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth")
SUFFIXES = (SAFETENSORS, *TORCH)

#: keys under which a PyTorch file may hold its state dictionary, next to other entries
_INNER_KEYS = ("state_dict", "model_state_dict", "model")
_WRAPPER = "module."  # put before each name by torch's DataParallel and DistributedDataParallel
#: parts of names that torch.compile, FSDP and activation checkpointing insert at a wrapped layer
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: linear layers of timm's VGG -> torchvision's. timm's first two are convolutions, whose weights (out, C, H, W) read the image
#: in the order in which torchvision flattens it.
_TIMM_VGG = {"pre_logits.fc1": "classifier.0", "pre_logits.fc2": "classifier.3", "head.fc": "classifier.6"}
#: types of the facts in the metadata of files that hpctrain writes, and of their parts
_FACTS: Mapping[str, tuple[Any, Any]] = {
    "model_options": (dict, str), "image_shape": (list, int), "classes": (list, str), "mean": (list, int | float),
    "std": (list, int | float),
}  # fmt: skip
#: maximum ratio of the size of a file's tensors to that of the file; more than 1 if tensors share memory
_MOST_GROWTH = 32


@dataclass(frozen=True)
class WeightsFile:
    """Content of a weight file.

    Attributes:
        tensors: arrays by name, in the order of the file.
        metadata: texts by key.
    """

    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)


def read(path: Path, *, header: bool = False) -> WeightsFile:
    """Read all tensors of a weight file. Floats of 16 bits are returned in float32, which represents them exactly.

    Remove the name parts that PyTorch's wrappers of models and layers insert, at any depth, and return the linear layers of
    timm's VGGs under torchvision's names. Names in files written by `ModelWeights` are not changed.

    Args:
        header: whether to read only the header of a safetensors file; the tensors then have their shapes and dtypes, but are zero
            and take no memory.

    Raises:
        CheckpointError: the file is missing, unreadable, damaged, or of another kind; the library for its format is not
            installed; or two names are equal without the wrappers' parts.
    """
    suffix = check_suffix(path, SUFFIXES)
    try:
        os.close(open_regular(path))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise CheckpointError(f"There is no weight file {path}; give the path of an existing file.") from error
    except OSError as error:
        raise CheckpointError(
            f"The weight file {path} cannot be read ({error.strerror}); make it readable, or give another file."
        ) from error
    content = _read_safetensors(path, header) if suffix == SAFETENSORS else _read_torch(path)
    tensors = content.tensors if "model" in content.metadata else _with_linear_layers(_unwrapped(content.tensors, path))
    wide = {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in tensors.items()}
    return WeightsFile(wide, content.metadata)


def write(path: Path, content: WeightsFile) -> None:
    """Write a weight file atomically. The ending of its name selects safetensors or PyTorch's format, which has no metadata.

    Raises:
        CheckpointError: the ending is not supported, or the library for its format is not installed.
        OSError: the file cannot be written.
    """
    suffix = check_suffix(path, SUFFIXES)
    tensors = {name: np.array(array, order="C") for name, array in content.tensors.items()}
    torch = None if suffix == SAFETENSORS else _torch(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        mode = partial.stat().st_mode
        if torch is not None:
            with partial.open("wb") as file:  # a path's name would be stored in the archive
                torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, file)
        else:
            _safetensors(path, "safetensors.numpy").save_file(tensors, partial, metadata=dict(content.metadata))
            partial.chmod(mode)  # the library restricts it to the owner
        with open(partial, "rb+") as file:
            if torch is None:  # equal contents have equal bytes: the library writes the metadata in random order
                size = int.from_bytes(file.read(8), "little")
                header = {**json.loads(file.read(size)), "__metadata__": dict(content.metadata)}
                file.seek(8)
                file.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size))
            os.fsync(file.fileno())


def checksum(path: Path) -> str:
    """Return the sha256 of a file's bytes.

    Raises:
        OSError: the file cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_suffix(path: Path, known: tuple[str, ...]) -> str:
    """Return the ending of a file's name in lower case, which determines its format.

    Raises:
        CheckpointError: the ending is not one of `known`.
    """
    suffix = path.suffix.lower()
    if suffix not in known:
        raise CheckpointError(f"Cannot determine the format of {path} from its name; it must end in {_listed(known)}.")
    return suffix


def _read_safetensors(path: Path, header: bool) -> WeightsFile:
    library = _safetensors(path)
    with errors_as(CheckpointError, lambda why: f"Cannot read {path} as a safetensors file ({why}); write or download it again."):
        with library.safe_open(path, framework="np") as file:
            metadata = _checked_metadata(file.metadata() or {})
            if header:
                return WeightsFile({name: _zeros(file.get_slice(name)) for name in file.keys()}, metadata)  # noqa: SIM118
            brain_floats = [name for name in file.keys() if file.get_slice(name).get_dtype() == "BF16"]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in file.keys() if name not in brain_floats}  # noqa: SIM118
        if brain_floats:  # NumPy lacks this dtype
            raw = dict(library.deserialize(read_bytes(path, path.stat().st_size)))
            for name in brain_floats:
                halves = np.frombuffer(raw[name]["data"], "<u2").astype(np.uint32)
                tensors[name] = (halves << 16).view(np.float32).reshape(raw[name]["shape"])
    return WeightsFile(tensors, metadata)


def _checked_metadata(given: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file. Facts in JSON are checked, and left out if another program wrote the file.

    Raises:
        ValueError: a fact is not JSON, or of another type.
    """
    metadata = {key: text for key, text in given.items() if "model" in given or key not in _FACTS}
    for key, (kind, part) in _FACTS.items():
        value = json.loads(metadata.get(key, "null"))
        fits = isinstance(value, kind) and all(isinstance(item, part) for item in value)
        if key in metadata and not (fits and (key != "image_shape" or len(value) == 3)):
            raise ValueError(f"{key} is {shortened(value)}")
    return metadata


def _zeros(tensor: Any) -> np.ndarray:
    """Return a tensor of zeros that takes no memory, with the shape of a tensor in a file and the dtype in which it is read."""
    kind = tensor.get_dtype()  # such as F32, BF16, I64, BOOL
    names = {"BF16": "float32", "F16": "float32", "BOOL": "bool"}
    name = names.get(kind) or {"F": "float", "I": "int", "U": "uint"}.get(kind[0], kind[0]) + kind[1:]
    return np.broadcast_to(np.zeros((), np.dtype(name)), tensor.get_shape())


def _read_torch(path: Path) -> WeightsFile:
    torch = _torch(path)
    advice = "save model.state_dict() with torch.save, without other objects"
    with errors_as(
        CheckpointError,
        lambda why: f"Cannot read {path} as tensors only ({why}); {advice}.",
        lambda error: " ".join(str(error).split()).partition(". ")[0].rstrip("."),
    ):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _check_growth(path, sum(entry.file_size for entry in archive.infolist()))
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
        inner = next((key for key in _INNER_KEYS if isinstance(state, Mapping) and isinstance(state.get(key), Mapping)), None)
        state = state if inner is None else state[inner]
        if isinstance(state, Mapping) and state and all(isinstance(value, torch.Tensor) for value in state.values()):
            _check_growth(path, sum(tensor.numel() * tensor.element_size() for tensor in state.values()))
            return WeightsFile({str(name): _to_numpy(torch, tensor) for name, tensor in state.items()})
    raise CheckpointError(f"{path} contains no state dictionary; save model.state_dict() with torch.save.")


def _check_growth(path: Path, n_bytes: int) -> None:
    """Raise a ValueError if a file's content is much larger than the file.

    A tensor of stride 0 and a compressed archive can have such a content.
    """
    size_bytes = path.stat().st_size
    if n_bytes > _MOST_GROWTH * size_bytes:
        tensors = f"its tensors have {size_text(n_bytes)}, more than {_MOST_GROWTH} times as much"
        raise ValueError(f"it has {size_text(size_bytes)}, but {tensors}")


def _unwrapped(tensors: Mapping[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Return the tensors under their names without the parts that wrappers insert.

    Raises:
        CheckpointError: two names are equal without these parts.
    """
    names = {name: ".".join(part for part in name.split(".") if part not in _WRAPPED) for name in tensors}
    while names and all(name.startswith(_WRAPPER) for name in names.values()):
        names = {name: shorter.removeprefix(_WRAPPER) for name, shorter in names.items()}
    first: dict[str, str] = {}
    for name, shorter in names.items():
        other = first.setdefault(shorter, name)
        if other != name:
            raise CheckpointError(
                f"{path} has both {other} and {name}, which are equal without the names of PyTorch's wrappers; save the state "
                "dictionary of the wrapped model."
            )
    return {names[name]: array for name, array in tensors.items()}


def _with_linear_layers(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Return the tensors of timm's VGG with torchvision's linear layers; other tensors unchanged."""
    if "pre_logits.fc1.weight" not in tensors:
        return tensors
    converted: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        layer, _, role = name.rpartition(".")
        linear = _TIMM_VGG.get(layer)
        if linear is None:
            converted[name] = array
        else:
            converted[f"{linear}.{role}"] = array.reshape(*array.shape[:1], -1) if role == "weight" else array
    return converted


def _to_numpy(torch: ModuleType, tensor: Any) -> np.ndarray:
    plain = tensor.detach().float() if tensor.dtype is torch.bfloat16 else tensor.detach()
    return np.ascontiguousarray(plain.numpy()).reshape(tuple(tensor.shape))


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"PyTorch is needed for {path}, but not installed; run `pip install torch`, or use a file that ends in {SAFETENSORS}."
        ) from error
    return torch


def _safetensors(path: Path, module: str = "safetensors") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckpointError(
            f"The package safetensors is needed for {path}, but not installed; run `pip install safetensors`."
        ) from error


def _listed(suffixes: tuple[str, ...]) -> str:
    return " or ".join((", ".join(suffixes[:-1]), suffixes[-1])) if len(suffixes) > 1 else suffixes[0]
