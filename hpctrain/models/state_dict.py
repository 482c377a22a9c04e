"""State dictionaries with torchvision's names, shapes and order, and the check that a file's state fits a model.

State dictionaries exchange weights with other frameworks. Only `export` needs a network; all other functions use the declarations
of the layers, without an image size or memory for parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpctrain.core.errors import CheckpointError
from hpctrain.core.text import nearest
from hpctrain.nn.layers import Layer, join
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.storage.weights_file import WeightsFile

#: torch's batch counter next to the running statistics of each batch norm; hpctrain does not use it, and files may lack it
COUNTER = "num_batches_tracked"
_STATISTIC_WITH_COUNTER = "running_mean"
_STATISTICS = (_STATISTIC_WITH_COUNTER, "running_var")
_MOST_REPORTED = 8


@dataclass(frozen=True)
class StateEntry:
    """One array of a state dictionary.

    Attributes:
        shape: shape in torchvision's layout.
        spec: declaration of a parameter; None: the array is a running statistic.
    """

    shape: tuple[int, ...]
    spec: ParameterSpec | None = None

    def export(self, array: np.ndarray) -> np.ndarray:
        """Return a contiguous array in torchvision's layout."""
        return np.ascontiguousarray(array) if self.spec is None else self.spec.interchange.export(array)

    def restore(self, array: np.ndarray) -> np.ndarray:
        """Return a contiguous array in hpctrain's layout."""
        return np.ascontiguousarray(array) if self.spec is None else self.spec.interchange.restore(array, self.spec.shape)


def declared_state(model: Layer) -> dict[str, StateEntry]:
    """Return every parameter and running statistic by name, in the order of a state dictionary."""
    entries: dict[str, StateEntry] = {}
    for prefix, layer in model.walk():
        for role, spec in layer.parameters().items():
            entries[join(prefix, role)] = StateEntry(spec.interchange.exported_shape(spec.shape), spec)
        entries |= {join(prefix, role): StateEntry(spec.shape) for role, spec in layer.statistics().items()}
    return entries


def export(network: Network) -> dict[str, np.ndarray]:
    """Return copies of all parameters and running statistics, in torchvision's layouts and the parameters' dtype."""
    assert not any(network.shards.values()), "a rank of a split network has no whole parameters to export"
    state: dict[str, np.ndarray] = {}
    for name, entry in declared_state(network.model).items():
        if entry.spec is None:
            array = network.statistics.views[name]
        else:
            array = network.kernels.arithmetic.to_host(network.parameters[name].data)
        state[name] = np.array(entry.export(array), copy=True)
    return state


def with_counters(state: Mapping[str, np.ndarray], batches: int) -> dict[str, np.ndarray]:
    """Return the state with torch's counter of training batches, set to `batches`, after the statistics of each batch norm."""
    counted: dict[str, np.ndarray] = {}
    for name, array in state.items():
        counted[name] = array
        layer, _, role = name.rpartition(".")
        if role == "running_var" and join(layer, _STATISTIC_WITH_COUNTER) in state:
            counted[join(layer, COUNTER)] = np.array(batches, np.int64)
    return counted


def counts_of(state: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Return how many elements the parameters and the running statistics of a state have, by torchvision's names."""
    parameters = statistics = 0
    for name, array in state.items():
        if name.rpartition(".")[2] in _STATISTICS:
            statistics += array.size
        elif not is_counter(name):
            parameters += array.size
    return parameters, statistics


def is_counter(name: str) -> bool:
    """Return whether an array is torch's batch counter, which hpctrain ignores."""
    return name.rpartition(".")[2] == COUNTER


def classes_in(model: Layer, given: Mapping[str, np.ndarray]) -> int | None:
    """Return the number of classes of a state; None if the state lacks the model's last parameter, whose rows are the classes."""
    last = next((name for name, entry in reversed(declared_state(model).items()) if entry.spec is not None), None)
    array = None if last is None else given.get(last)
    return None if array is None or not array.ndim else int(array.shape[0])


def check_fits(
    expected: Mapping[str, StateEntry],
    given: Mapping[str, np.ndarray],
    *,
    source: str,
    model: str,
    ignore: Sequence[str] = (),
    named: str | None = None,
    hint: str = "",
) -> frozenset[str]:
    """Raise unless a state fits a model, and return the ignored names.

    Args:
        expected: result of `declared_state`.
        source, model: names of the file and of the model in messages.
        ignore: patterns of names that may be missing or differ.
        named: name of the model in the file; None if the file has none.
        hint: last sentence of the message if it reports all differences; the list of patterns to ignore replaces {patterns}.

    Raises:
        CheckpointError: a name is missing or unknown, an array has another shape, another kind of dtype or non-finite numbers, or
            a pattern matches nothing. The message has a sentence for each of the first 8 faults.
    """
    ignored = frozenset(name for name in (*expected, *given) if any(fnmatchcase(name, pattern) for pattern in ignore))
    # Lazy, because finding the nearest name takes time: only for sentences that are printed.
    differences = _differences(expected, given, ignored, source, model)
    faults = chain(((None, sentence) for sentence in _idle_patterns(ignore, ignored, expected, source)), differences)
    reported = list(islice(faults, _MOST_REPORTED))
    sentences = [sentence for _, sentence in reported]
    different = [f"{name.rpartition('.')[0]}.*" if "." in name else name for name, _ in reported if name is not None]
    if reported and named not in (None, model):
        sentences.insert(0, f"{source} holds weights of the model {named}, which do not fit the model {model}.")
    if reported and next(faults, None) is not None:
        sentences.append(f"There are further differences between {source} and the model {model}.")
    elif different and hint:
        kept = [pattern for pattern in ignore if any(fnmatchcase(name, pattern) for name in ignored)]
        patterns = ", ".join(f'"{pattern}"' for pattern in dict.fromkeys([*kept, *different]))
        sentences.append(hint.replace("{patterns}", f"[{patterns}]"))
    if sentences:
        raise CheckpointError("\n".join(sentences))
    check_finite({name: given[name] for name in expected if name not in ignored}, source)
    return ignored


#: keys of a file's metadata that describe its training data, see `image_file.described`
_DESCRIBED = ("classes", "image_shape", "fit", "value_range", "mean", "std")


#: advice on names to ignore, for configurations
INIT_HINT = "set init.ignore to {patterns}"


def check_file_fits(
    entries: Mapping[str, StateEntry], content: WeightsFile, path: Path, ignore: Sequence[str], model: str, hint: str = INIT_HINT
) -> tuple[frozenset[str], dict[str, Any]]:
    """Raise unless the tensors of a file of initial weights fit a model; see `check_fits`.

    Args:
        hint: advice on how to ignore names, for messages; the list of patterns replaces {patterns}.

    Returns:
        The ignored names, and the description of the weights' data (see `image_file.described`). It lacks the classes if the last
        layer is ignored.
    """
    advice = f"To draw a layer from the seed instead, as for another number of classes, {hint}."
    named = content.metadata.get("model")
    ignored = check_fits(entries, content.tensors, source=str(path), model=model, ignore=ignore, named=named, hint=advice)
    last = next((name for name in reversed([*entries]) if entries[name].spec is not None), None)
    keys = _DESCRIBED[1:] if last in ignored else _DESCRIBED
    known = content.metadata if "model_options" in content.metadata else {}  # another program may use these keys
    return ignored, {key: json.loads(known[key]) for key in keys if key in known}


def check_finite(state: Mapping[str, np.ndarray], source: str, dtype: DTypeLike | None = None) -> None:
    """Raise if an array of floating-point numbers holds NaN or an infinity.

    Args:
        source: name of the file or checkpoint in messages.
        dtype: dtype that the numbers will be converted to; None: no conversion.

    Raises:
        CheckpointError: an array is not finite. The message has a sentence for each of the first 8 such arrays.
    """
    sentences = list(
        islice((sentence for name in state if (sentence := _not_finite(name, state[name], source, dtype))), _MOST_REPORTED)
    )
    if sentences:
        raise CheckpointError("\n".join(sentences))


def _not_finite(name: str, array: np.ndarray, source: str, dtype: DTypeLike | None) -> str | None:
    """Return a sentence about an array that holds NaN or an infinity; None if it holds neither."""
    if array.dtype.kind != "f":
        return None
    with np.errstate(over="ignore"):
        finite = np.isfinite(array if dtype is None else array.astype(dtype, copy=False))
    if finite.all():
        return None
    place = tuple(int(index) for index in np.argwhere(~finite)[0])
    kind = "" if dtype is None or not np.isfinite(array[place]) else f" in {dtype}"
    return (
        f"{name} of {source} holds {int((~finite).sum()):,} of {array.size:,} numbers that are not finite{kind}, the first at "
        f"{list(place)} ({array[place]:g}); use weights from before the training diverged."
    )


def _idle_patterns(
    ignore: Sequence[str], ignored: frozenset[str], expected: Mapping[str, StateEntry], source: str
) -> Iterator[str]:
    for pattern in ignore:
        if not any(fnmatchcase(name, pattern) for name in ignored):
            near = nearest(pattern, expected) or next(iter(expected), "none")
            yield f'The pattern "{pattern}" matches no name of {source} or of the model; the nearest name is {near}.'


def _differences(
    expected: Mapping[str, StateEntry], given: Mapping[str, np.ndarray], ignored: frozenset[str], source: str, model: str
) -> Iterator[tuple[str, str]]:
    """Yield (name, sentence) for each array of the file that does not fit the model, or that one of them lacks."""
    wanted = [name for name in expected if name not in ignored]
    theirs = [name for name in given if name not in ignored and not is_counter(name)]
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in theirs if name not in expected]
    for name in missing:
        yield name, f"{source} lacks {name}, which the model {model} has{_nearest(name, unknown or theirs)}."
    for name in unknown:
        yield name, f"{source} has {name}, which the model {model} does not have{_nearest(name, missing or wanted)}."
    for name in wanted:
        if name not in given:
            continue
        if given[name].shape != expected[name].shape:
            shapes = f"{given[name].shape} in {source}, but {expected[name].shape} in the model {model}"
            yield name, f"{name} has shape {shapes}."
        elif given[name].dtype.kind != "f":
            yield name, f"{name} of {source} holds {given[name].dtype} numbers, but weights must be floating-point numbers."


def _nearest(name: str, names: Sequence[str]) -> str:
    """Return a clause that ends a sentence with the name in `names` nearest to `name`; empty if no name is near."""
    near = nearest(name, names)
    return "" if near is None else f"; the nearest name is {near}"
