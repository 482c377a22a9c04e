"""The cases of `slow_links.py` as data: networks, hosts, rates, and the averagers that are compared in each.

A variant is a section `averager` of a configuration; None is the local update alone. Those that this program does not know, or
refuses on these ranks, are left out and named with the sentence of the refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import SHAPES
from hpctrain.averaging.averagers import make_strategy
from hpctrain.averaging.base import PlannedGroup
from hpctrain.core.errors import HpctrainError
from hpctrain.nn.parameter import GroupLayout

#: averager, with its options under their names; None: the local update alone
Section = Mapping[str, Any] | None

ALONE = "compute-only"
# The wire is busy all the time in these cases, so the order of gathers matters little, and to find it takes six steps of each.
_NEVER: Mapping[str, Any] = {"name": "sharded", "fc_exchange": "never", "replan": False}
_AUTO: Mapping[str, Any] = {"name": "sharded", "fc_exchange": "auto", "replan": False}
_BUCKETED: Mapping[str, Any] = {"name": "bucketed"}

DENSE: Mapping[str, Section] = {
    "blocking": {"name": "blocking"},
    "bucketed": _BUCKETED,
    "sharded": _NEVER,
    "sharded-exchange": _AUTO,
    "priority": {"name": "priority", "replan": False},
}
#: name -> (the variant with messages of 32 bits, the section)
WIRE: Mapping[str, tuple[str, Section]] = {
    "bucketed, bfloat16": ("bucketed", {**_BUCKETED, "wire": "bfloat16"}),
    "sharded, bfloat16": ("sharded", {**_NEVER, "wire": "bfloat16"}),
    "sharded, float16": ("sharded", {**_NEVER, "wire": "float16"}),
    "sharded, bfloat16 and parameters": ("sharded", {**_NEVER, "wire": "bfloat16", "wire_parameters": "bfloat16"}),
    "sharded-exchange, bfloat16": ("sharded-exchange", {**_AUTO, "wire": "bfloat16"}),
    "sharded-exchange, bfloat16 and parameters": (
        "sharded-exchange",
        {**_AUTO, "wire": "bfloat16", "wire_parameters": "bfloat16"},
    ),
}
#: name -> density
DENSITIES: Mapping[str, float] = {f"sparse {density:g}": density for density in (0.001, 0.01, 0.1, 0.3, 0.6)}
TOP_ONE_PERCENT = "sparse 0.01"
# Compressed whether it pays or not: the densities are to show from where on it does not.
SPARSE: Mapping[str, Section] = {
    name: {"name": "sparse", "density": density, "compress": "always", "replan": False} for name, density in DENSITIES.items()
}

# Here the order is the point, and is measured.
PRIORITY: Mapping[str, Section] = {
    "blocking": {"name": "blocking"},
    "sharded": {"name": "sharded", "fc_exchange": "never"},
    "sharded-exchange": {"name": "sharded", "fc_exchange": "auto"},
    "priority": {"name": "priority", "fc_exchange": "never"},
    "priority-exchange": {"name": "priority", "fc_exchange": "auto"},
}

_SLOW: Mapping[str, Section] = {
    ALONE: None,
    **DENSE,
    **{name: section for name, (_, section) in WIRE.items()},
    **SPARSE,
}
# What comes of 16 bits where messages take nearly all of a step; a case in which no variant leaves, so that pairs are many.
_WIRED = ("bucketed", "bucketed, bfloat16", "sharded", "sharded, bfloat16", "sharded, bfloat16 and parameters")
_ESSENTIAL = (
    ALONE,
    "bucketed",
    "sharded",
    "sharded-exchange",
    "sharded, bfloat16",
    "sharded-exchange, bfloat16",
    TOP_ONE_PERCENT,
    "sparse 0.1",
)


@dataclass(frozen=True)
class Case:
    """One job: variants that step in turn on the same ranks.

    Attributes:
        kind: slow, wire or priority. model: a key of `SHAPES`. rate: of each host's link, as tc writes it; None: the ranks are on
            this machine, a core each. variants: by name. share: fraction of the requested rounds that this case runs.
    """

    kind: str
    model: str
    hosts: int
    ranks_per_host: int
    rate: str | None
    variants: Mapping[str, Section]
    share: float = 1.0

    @property
    def name(self) -> str:
        """A name within the list."""
        where = "shared-memory" if self.rate is None else f"{self.hosts}x{self.ranks_per_host}-{self.rate}"
        return f"{self.kind}-{self.model}-{where}"

    @property
    def wire_bound(self) -> bool:
        """Messages take nearly all of a step, so that variants warm up over links that are not shaped."""
        return self.kind in ("slow", "wire")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def nodes(self) -> tuple[int, ...]:
        """The host of each rank."""
        return tuple(rank // self.ranks_per_host for rank in range(self.ranks))

    def rounds(self, asked: int) -> int:
        """Rounds of this case if `asked` rounds are requested."""
        return max(min(asked, 2), round(self.share * asked))

    @property
    def screen(self) -> dict[str, Any] | None:
        """The rule by which variants leave after the first rounds (see overlap_rounds.py); None: all stay."""
        if self.kind != "slow":
            return None
        kept_with = {base: [name for name, (of, _) in WIRE.items() if of == base] for base in DENSE}
        return {"best_of": list(DENSE), "with": kept_with, "always": [ALONE, TOP_ONE_PERCENT]}


def _cases() -> tuple[Case, ...]:
    layouts = ((4, 1), (2, 2))
    # With 4 nodes sparse averaging ceases to pay below 1/4, with 2 below 1/2.
    far = {(4, 1): ("sparse 0.6",), (2, 2): ("sparse 0.1",)}
    at_200 = {layout: {name: section for name, section in _SLOW.items() if name not in far[layout]} for layout in layouts}
    whole = [Case("slow", model, *layout, "200mbit", at_200[layout]) for layout in layouts for model in ("vgg16", "resnet18")]
    wired = [
        Case("wire", model, *layout, "200mbit", {name: _SLOW[name] for name in (ALONE, *_WIRED)})
        for layout in layouts
        for model in ("vgg16", "resnet18")
    ]
    order = [
        Case("priority", model, 2, 1, rate, {ALONE: None, **PRIORITY})
        for model in ("vgg16", "resnet18")
        for rate in ("1gbit", "500mbit", "2gbit", None)
    ]
    essential = {name: _SLOW[name] for name in _ESSENTIAL}
    rest = [
        Case("slow", model, *layout, rate, essential, share=1 / 3)
        for rate in ("500mbit", "100mbit")
        for layout in layouts
        for model in ("vgg16", "resnet18")
    ]
    return (*whole, *wired, *order, *rest)


#: the most important first
CASES: tuple[Case, ...] = _cases()


def named(patterns: Sequence[str]) -> tuple[Case, ...]:
    """The cases whose name contains any of these words; all without words.

    Raises:
        ValueError: a word that is in no name.
    """
    for word in patterns:
        if not any(word in case.name for case in CASES):
            raise ValueError(f"no case has {word} in its name; there are {', '.join(case.name for case in CASES)}")
    return tuple(case for case in CASES if not patterns or any(word in case.name for word in patterns))


def possible(case: Case) -> tuple[dict[str, Section], dict[str, str]]:
    """(variants that can be made on the case's ranks, the sentence of the refusal for each of the others)."""
    group = PlannedGroup(GroupLayout({}, "float32"), case.ranks, case.nodes, case.ranks * SHAPES[case.model].batch)
    legal: dict[str, Section] = {}
    refused: dict[str, str] = {}
    for name, section in case.variants.items():
        try:
            if section is not None:
                make_strategy(*choice(section), group)
            legal[name] = section
        except HpctrainError as error:
            refused[name] = str(error)
    return legal, refused


def choice(section: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(averager, its options) of a section."""
    options = dict(section)
    return options.pop("name"), options
