"""The parallel plan: how the ranks of a split group share each layer, chosen by patterns of layer names."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hpctrain.backend.specs import Pair
from hpctrain.core.errors import ConfigError
from hpctrain.core.text import choices


class Parallelism(StrEnum):
    """Way in which the Pr ranks of a split group share a layer: by its samples, its weights (output channels) or its images."""

    BATCH = "batch"
    MODEL = "model"
    DOMAIN = "domain"


def _parallelism(name: str) -> Parallelism:
    """Return the parallelism with the name `name`.

    Raises:
        ConfigError: there is no parallelism of this name; the message suggests the nearest.
    """
    try:
        return Parallelism(name)
    except ValueError:
        raise ConfigError(f"A layer's use cannot be {name!r}; {choices(str(name), Parallelism)}.") from None


@dataclass(frozen=True)
class ParallelPlan:
    """Use of each layer on a grid of `rows` x `cols` ranks (Pr x Pc), with split groups of `rows` ranks each.

    A layer's use is a `Parallelism` or its name ("domain").

    Attributes:
        rows: ranks of a split group, Pr.
        cols: number of split groups, Pc.
        default: use of layers that match no pattern.
        use: use by pattern, in order. A layer follows the last pattern that matches its dotted name; "*" also matches dots.
        tiles: (vertical, horizontal) tiles of an image under DOMAIN, whose product is `rows`; None: all ranks split the height.

    Raises:
        ConfigError: rows or cols is below 1, a use is unknown, or the product of the tiles is not `rows`.
    """

    rows: int = 1
    cols: int = 1
    default: Parallelism = Parallelism.BATCH
    use: Mapping[str, Parallelism] = field(default_factory=dict)
    tiles: Pair | None = None

    def __post_init__(self) -> None:
        for key, size in (("rows", self.rows), ("cols", self.cols)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"grid.{key} is {size!r}, but must be an integer of at least 1.")
        # Rules compare by identity (`use is Parallelism.DOMAIN`), so strings become members.
        object.__setattr__(self, "default", _parallelism(self.default))
        object.__setattr__(self, "use", {pattern: _parallelism(name) for pattern, name in self.use.items()})
        if self.tiles is not None and math.prod(self.tiles) != self.rows:
            raise ConfigError(
                f"Image tiles {self.tiles[0]} x {self.tiles[1]} make {math.prod(self.tiles)} parts, but must make {self.rows} "
                "(grid.rows)."
            )

    @property
    def image_tiles(self) -> Pair:
        """(vertical, horizontal) tiles; by default all ranks split the height."""
        return self.tiles if self.tiles is not None else (self.rows, 1)

    def use_of(self, name: str) -> Parallelism:
        """Return the parallelism of the layer with the dotted name `name`."""
        matching = [use for pattern, use in self.use.items() if fnmatch.fnmatchcase(name, pattern)]
        return matching[-1] if matching else self.default

    def check(self, names: Sequence[str]) -> None:
        """Raise unless each pattern matches a layer.

        Raises:
            ConfigError: a pattern matches no layer; the message suggests the nearest layer.
        """
        for pattern in self.use:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"No layer matches the plan's pattern {pattern!r}; {choices(pattern.rstrip('*.'), names)}.")
