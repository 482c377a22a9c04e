"""State dictionaries in torchvision's names, shapes and order, so that weights travel to and from other frameworks.

`declared_state` and the checks need no network, image size or memory for parameters: the declarations of the layers say it
all. `export` and `restore` copy the arrays of a network. Torch's `num_batches_tracked` is neither written nor required; if it
is given it is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, islice

import numpy as np
from numpy.typing import DTypeLike

from hpctrain.core.errors import CheckpointError
from hpctrain.core.sentences import nearest
from hpctrain.nn.layers import Layer, join
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import ParameterSpec

_IGNORED = "num_batches_tracked"


def export(network: Network) -> dict[str, np.ndarray]:
    """Copies of all parameters and running statistics: convolutions (K, C, R, S), linear (out, in), the parameters' dtype."""
    assert not any(network.shards.values()), "a rank of a split network has no whole parameters to export"
    to_host = network.kernels.arithmetic.to_host
    state: dict[str, np.ndarray] = {}
    for prefix, layer in network.model.walk():
        for name in (join(prefix, role) for role in layer.parameters()):
            parameter = network.parameters[name]
            state[name] = np.array(parameter.spec.interchange.export(to_host(parameter.data)), copy=True)
        for name in (join(prefix, role) for role in layer.statistics()):
            state[name] = network.statistics.views[name].copy()
    return state


def restore(network: Network, state: Mapping[str, np.ndarray]) -> None:
    """Write a state dictionary into the network, cast to its parameters' dtype; nothing is written unless all of it fits.

    Raises:
        CheckpointError: a name that is missing or unknown, or an array of another shape.
    """
    assert not any(network.shards.values()), "whole parameters do not fit into a rank of a split network"
    expected = {name: exported_shape(parameter.spec) for name, parameter in network.parameters.items()}
    expected |= {name: view.shape for name, view in network.statistics.views.items()}
    given = {name: array for name, array in state.items() if name.rpartition(".")[2] != _IGNORED}
    _check(expected, {name: array.shape for name, array in given.items()})
    for name, parameter in network.parameters.items():
        value = parameter.spec.interchange.restore(given[name], parameter.spec.shape)
        network.kernels.arithmetic.from_host(parameter.data, value)
    for name, view in network.statistics.views.items():
        view[...] = given[name]
    network.parameters_changed()


def exported_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """Shape of a parameter in torchvision's layout."""
    layout = spec.interchange
    if layout.final is not None:
        return layout.final
    shape = spec.shape if layout.shape is None else layout.shape
    return shape if layout.axes is None else tuple(shape[axis] for axis in layout.axes)


def _check(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"The state belongs to another model: it lacks {len(missing)} of {len(expected)} arrays ({_some(missing)}) and has "
            f"{len(unknown)} that the model does not know ({_some(unknown)})."
        )
    for name, shape in expected.items():
        if given[name] != shape:
            raise CheckpointError(f"Array {name} of the state has shape {given[name]}, the model's has {shape}.")


def _some(found: list[str], limit: int = 3) -> str:
    more = f", {len(found) - limit} more" if len(found) > limit else ""
    return (", ".join(found[:limit]) or "none") + more


#: torch's counter beside the running statistics of each batch norm: nothing depends on it here, and files may lack it
COUNTER = "num_batches_tracked"
_STATISTIC_WITH_COUNTER = "running_mean"
_MOST_TOLD = 8


@dataclass(frozen=True)
class StateEntry:
    """One array of a state dictionary. shape: in torchvision's layout. spec: of a parameter; None: it is a running statistic."""

    shape: tuple[int, ...]
    spec: ParameterSpec | None = None

    def export(self, array: np.ndarray) -> np.ndarray:
        """An array of ours in torchvision's layout, contiguous."""
        return np.ascontiguousarray(array) if self.spec is None else self.spec.interchange.export(array)

    def restore(self, array: np.ndarray) -> np.ndarray:
        """An array in torchvision's layout in ours, contiguous."""
        return np.ascontiguousarray(array) if self.spec is None else self.spec.interchange.restore(array, self.spec.shape)


def declared_state(model: Layer) -> dict[str, StateEntry]:
    """Every parameter and running statistic by name, in the order of a state dictionary."""
    entries: dict[str, StateEntry] = {}
    for prefix, layer in model.walk():
        entries |= {join(prefix, role): StateEntry(exported_shape(spec), spec) for role, spec in layer.parameters().items()}
        entries |= {join(prefix, role): StateEntry(spec.shape) for role, spec in layer.statistics().items()}
    return entries


def with_counters(state: Mapping[str, np.ndarray], batches: int) -> dict[str, np.ndarray]:
    """The same state with the counter of each batch norm behind its statistics. batches: that each has seen in training."""
    counted: dict[str, np.ndarray] = {}
    for name, array in state.items():
        counted[name] = array
        layer, _, role = name.rpartition(".")
        if role == "running_var" and join(layer, _STATISTIC_WITH_COUNTER) in state:
            counted[join(layer, COUNTER)] = np.array(batches, np.int64)
    return counted


def is_counter(name: str) -> bool:
    """Whether an array is one that this module neither asks for nor needs."""
    return name.rpartition(".")[2] == COUNTER


def classes_in(model: Layer, given: Mapping[str, np.ndarray]) -> int | None:
    """Number of classes of a state of a model with any number of them: rows of the last layer; None where it has none."""
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
    hint: str = "",
) -> frozenset[str]:
    """The names that are ignored, where a state fits a model in all others.

    Args:
        expected: see `declared_state`. given: of a file. source, model: the names of both in messages.
        ignore: patterns of names that need not be there, nor fit. hint: a sentence behind all others where something differs.

    Raises:
        CheckpointError: a sentence for each name that is missing or unknown, or whose array has another shape, no numbers or
            numbers that are not finite; and for each pattern that matches nothing.
    """
    ignored = frozenset(name for name in (*expected, *given) if any(fnmatchcase(name, pattern) for pattern in ignore))
    faults = chain(_idle_patterns(ignore, ignored, expected, source), _differences(expected, given, ignored, source, model))
    told = list(islice(faults, _MOST_TOLD))  # the nearest name is not looked for where nobody reads it
    if told and next(faults, None) is not None:
        told.append(f"There are more such differences between {source} and the model {model}.")
    if told:
        raise CheckpointError("\n".join([*told, *([hint] if hint else [])]))
    check_finite({name: given[name] for name in expected if name not in ignored}, source)
    return ignored


def check_finite(state: Mapping[str, np.ndarray], source: str, dtype: DTypeLike | None = None) -> None:
    """Raise if an array of floating-point numbers holds NaN or an infinity.

    Args:
        source: the name of the file or checkpoint in messages. dtype: that the numbers will be converted to; None: their own.

    Raises:
        CheckpointError: a sentence for each such array.
    """
    told = list(islice((sentence for name in state if (sentence := _not_finite(name, state[name], source, dtype))), _MOST_TOLD))
    if told:
        raise CheckpointError("\n".join(told))


def _not_finite(name: str, array: np.ndarray, source: str, dtype: DTypeLike | None) -> str | None:
    """Return a sentence about an array that holds NaN or an infinity; None if it holds none."""
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
        f"{list(place)} ({array[place]:g}); take weights from before the training diverged."
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
) -> Iterator[str]:
    wanted = [name for name in expected if name not in ignored]
    theirs = [name for name in given if name not in ignored and not is_counter(name)]
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in theirs if name not in expected]
    for name in missing:
        yield f"{source} lacks {name}, which the model {model} has{_nearest(name, unknown or theirs)}."
    for name in unknown:
        yield f"{source} has {name}, which the model {model} does not have{_nearest(name, missing or wanted)}."
    for name in wanted:
        if name not in given:
            continue
        if given[name].shape != expected[name].shape:
            yield f"{name} of {source} has shape {given[name].shape}, that of the model {model} has {expected[name].shape}."
        elif given[name].dtype.kind != "f":
            yield f"{name} of {source} holds {given[name].dtype} numbers, but weights must be floating-point numbers."


def _nearest(name: str, names: Sequence[str]) -> str:
    """The end of a sentence about a name."""
    near = nearest(name, names)
    return "" if near is None else f"; the nearest name is {near}"
