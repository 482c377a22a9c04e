"""Store measured times of operators between runs.

The key of a time contains everything that affects it: operation, channels, layouts, use of memory and extents, but not names,
purposes or random seeds. Times at neighbouring sizes of the same operator are interpolated. A size far outside the measured ones
has no time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.backend.onednn.binding import processor_flags
from hpctrain.backend.operators import KernelSet
from hpctrain.core.files import read_bytes, user_directory
from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.parallel.moves import RedistributeOperator, RedistributeSpec
from hpctrain.planner.costs.operator_work import is_move, transfer_of
from hpctrain.storage import atomic_write
from hpctrain.version import __version__

# Fields of specs that do not affect the time.
_IRRELEVANT = frozenset({"layer", "seed", "first_sample", "origin", "unsplit_shape", "merge", "epsilon", "elements", "padding"})


@dataclass(frozen=True)
class OperatorKey:
    """Work of an operator in one phase.

    Attributes:
        family: operation, channels, layouts and use of memory; operators of a family differ only in their extents.
        extents: (N, H, W) of the first input; H and W are 1 without images.
        details: differences with little effect on the time: padding, and the pieces of a move.
    """

    family: str
    extents: tuple[int, int, int]
    details: str = ""


def operator_key(step: PlannedStep, action: Action, memory: StepMemory | None = None) -> OperatorKey:
    """Return the key of an operator's phase.

    Args:
        memory: use of memory, see `ComputeCosts.seconds`.
    """
    operator = step.operator
    spec = getattr(operator, "spec", None) if step.node is not None else None
    inputs = operator.inputs
    first = inputs[0].shape
    extents = (first[0], first[1], first[2]) if len(first) == 4 else (first[0], 1, 1)
    details = ",".join(_paddings(spec))
    name = type(operator).__name__
    if is_move(operator):
        pieces = transfer_of(operator)
        name += f" {len(pieces.sends)} {len(pieces.receives)}"
        details = f"{[piece.shape for piece in pieces.sends]} {[piece.shape for piece in pieces.receives]}"
        if isinstance(operator, RedistributeOperator):
            assert isinstance(operator.spec, RedistributeSpec)
            name += f" {operator.spec.source.kind} {operator.spec.target.kind} {operator.recomputes_output}"
    else:
        name += f" {_text(spec)}"
    tensors = " ".join(f"{x.layout}:{x.dtype}:{len(x.shape)}:{x.shape[-1]}" for x in (*inputs, operator.output))
    return OperatorKey(f"{action.name} {name} {tensors} {_use_of_memory(step, memory)}", extents, details)


def _use_of_memory(step: PlannedStep, memory: StepMemory | None) -> str:
    """Return the operator's use of memory as letters.

    There is one letter per input gradient: written (w), added to (a), summed by the program (s), or not requested (-). The letter
    i follows if the output is in place, and c if the gradient is copied.
    """
    if memory is None:
        return "w" * len(step.inputs)
    summed = {number for number, _, _ in memory.sums}
    asked = (
        "-" if region is None else "s" if i in summed else "a" if memory.accumulate[i] else "w"
        for i, region in enumerate(memory.input_grads)
    )
    in_place = any(region == memory.output for region in memory.inputs)
    return "".join(asked) + "i" * in_place + "c" * memory.copies_gradient


def _text(value: Any) -> str:
    """Return a spec as text; values that are not data are represented by their type."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value) if field.name not in _IRRELEVANT)
        return f"{type(value).__name__}({','.join(f'{name}={_text(getattr(value, name))}' for name in names)})"
    if isinstance(value, tuple | list):
        return f"({','.join(_text(item) for item in value)})"
    if isinstance(value, Enum) or value is None or isinstance(value, bool | int | float | str):
        return str(value)
    return type(value).__name__


def _paddings(value: Any) -> Iterator[str]:
    """Yield all paddings in a spec."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.name == "padding":
                yield str(getattr(value, field.name))
            else:
                yield from _paddings(getattr(value, field.name))


_log = logging.getLogger(__name__)

FORMAT = 1
#: largest ratio between a size and a measured size whose rate determines its time, and whose time need not be measured
REACH, _NEAR = 2.0, 1.25
_DIMS = 3


@dataclass(frozen=True)
class Setting:
    """Machine and software for which measured times are valid.

    Attributes:
        processor: model and instruction sets.
        kernels: name of the kernel set, with versions.
        concurrency: number of ranks that compute at the same time on the node, including this one.
    """

    processor: str
    kernels: str
    threads: int = 1  # of each rank
    concurrency: int = 1

    def __str__(self) -> str:
        return f"{self.processor} | {self.kernels} | {self.threads} threads | {self.concurrency} ranks"


#: instruction sets on which the choice of kernels depends
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16")


def setting_here(kernels: KernelSet, threads: int, concurrency: int) -> Setting:
    """Return the setting of this process and its software, for `threads` threads on each of `concurrency` ranks."""
    version = getattr(kernels, "version", "")
    versions = f"{kernels.name} {version}".strip() + f", NumPy {np.__version__}, hpctrain {__version__}"
    known = processor_flags()
    processor = " ".join([processor_model(), *(flag for flag in _INSTRUCTION_SETS if flag in known)])
    return Setting(processor, versions, threads, concurrency)


def processor_model() -> str:
    """Return the processor's model, as in the sources of machine files; its architecture if the system states no model."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            models = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(models, platform.machine())
    except OSError:
        return platform.machine()


def cache_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file in the user's cache directory, below XDG_CACHE_HOME or ~/.cache; None if the home directory is unknown."""
    directory = user_directory("XDG_CACHE_HOME", ".cache", environment)
    return None if directory is None else directory / "operator-times.json"


class OperatorTimes:
    """Times of operators' phases in one setting, in seconds.

    Args:
        path: file that stores the times; None: in memory only.
    """

    def __init__(self, setting: Setting, path: Path | None = None) -> None:
        self.setting, self._path = setting, path
        self._exact: dict[OperatorKey, float] = {}
        self._families: dict[str, dict[tuple[int, int, int], float]] = {}
        if path is not None:
            for key, seconds in _times_in(_read(path), setting):
                self.put(key, seconds)

    def __len__(self) -> int:
        return len(self._exact)

    def put(self, key: OperatorKey, seconds: float) -> None:
        """Store a time, replacing an earlier one with the same key."""
        self._exact[key] = seconds
        self._families.setdefault(key.family, {})[key.extents] = seconds

    def add_missing(self, other: OperatorTimes) -> None:
        """Store the times of operators that only `other` has."""
        for key, seconds in other._exact.items():
            if key not in self._exact:
                self.put(key, seconds)

    def take_shorter(self, other: OperatorTimes) -> None:
        """Replace times by those of `other` for the same operators if these are shorter in sum."""
        if sum(other._exact.values()) < sum(self._exact.get(key, math.inf) for key in other._exact):
            for key, seconds in other._exact.items():
                self.put(key, seconds)

    def measured(self, key: OperatorKey) -> bool:
        """Return whether an operator with nearly these extents was measured; details may differ."""
        return self.seconds(key, _NEAR) is not None

    def seconds(self, key: OperatorKey, reach: float = REACH) -> float | None:
        """Return the measured time, or one derived from operators that differ in one extent; None if unknown.

        Operators that differ in N are tried first, then operators that differ in H, then operators that differ in W.
        """
        if key in self._exact:
            return self._exact[key]
        samples = self._families.get(key.family)
        if samples is None:
            return None
        if key.extents in samples:
            return samples[key.extents]
        for dim in range(_DIMS):
            others = [other for other in range(_DIMS) if other != dim]
            alike = [extents for extents in samples if all(extents[other] == key.extents[other] for other in others)]
            points = sorted((extents[dim], samples[extents]) for extents in alike)
            seconds = interpolated(points, key.extents[dim], reach)
            if seconds is not None:
                return seconds
        return None

    def save(self) -> None:
        """Write the file, merged with times that other processes have stored since it was read.

        Only one process may save at a time.

        Raises:
            OSError: the file cannot be written.
        """
        if self._path is None:
            return
        content = _read(self._path)
        settings = content.setdefault("times", {})
        times: dict[OperatorKey, float] = dict(_times_in(content, self.setting)) | self._exact
        in_order = sorted(times.items(), key=lambda item: (item[0].family, item[0].extents, item[0].details))
        settings[str(self.setting)] = [[key.family, list(key.extents), key.details, seconds] for key, seconds in in_order]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_json(self._path, content | {"format": FORMAT})


def interpolated(points: Sequence[tuple[int, float]], size: int, reach: float = REACH) -> float | None:
    """Return the seconds at a size from sorted (size, seconds) points.

    Between points, the time is piecewise linear. Outside, it follows from the rate of the nearest point; the result is None if
    this point is not within a factor of `reach`, or if there are no points.
    """
    if not points:
        return None
    place = bisect_left([point[0] for point in points], size)
    if 0 < place < len(points):
        (low, low_seconds), (high, high_seconds) = points[place - 1 : place + 1]
        return low_seconds + (high_seconds - low_seconds) * (size - low) / (high - low)
    nearest, seconds = points[0] if place == 0 else points[-1]
    if nearest == size:
        return seconds
    if not (min(size, nearest) > 0 and max(size, nearest) <= reach * min(size, nearest)):
        return None
    slope = seconds / nearest
    if len(points) > 1:  # calls have a fixed cost, so the slope lies between 0 and the mean rate
        other, other_seconds = points[1] if place == 0 else points[-2]
        slope = min(slope, max(0.0, (seconds - other_seconds) / (nearest - other)))
    return seconds + slope * (size - nearest)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file of times; empty if it is missing or, with a warning, if it is unreadable or invalid."""
    try:
        content = json.loads(read_bytes(path, own=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        _log.warning("Cannot read the operator times in %s (%s); they are measured again.", path, why)
        return {}
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("times"), dict):
        _log.warning("The operator times in %s do not have format %d; they are measured again.", path, FORMAT)
        return {}
    return content


def _times_in(content: Mapping[str, Any], setting: Setting) -> Iterator[tuple[OperatorKey, float]]:
    """Yield the times of one setting, without damaged entries."""
    for entry in content.get("times", {}).get(str(setting), []):
        try:
            family, extents, details, seconds = entry
            n, h, w = (int(extent) for extent in extents)
            if float(seconds) >= 0.0:
                yield OperatorKey(str(family), (n, h, w), str(details)), float(seconds)
        except (TypeError, ValueError):
            continue
