"""When the largest elements alone are worth sending: the formula of the paper, and the points where the answer turns."""

from __future__ import annotations

import math

import pytest

from hpctrain.averaging.slice_sizes import RULE_LINK
from hpctrain.averaging.sparse_choice import (
    SELECTION_SECONDS,
    PartOnLink,
    crossover_bytes_per_second,
    crossover_density,
    sparse_pays,
)
from hpctrain.comm.link import LinkModel

D = 10_000_000
#: 200 Mb/s and 100 us
SLOW = LinkModel(100e-6, 1 / 25e6)


@pytest.mark.parametrize("nodes", [2, 4, 16])
@pytest.mark.parametrize("item_bytes", [4, 8])
def test_by_bytes_alone_it_is_the_papers_rule(nodes: int, item_bytes: int) -> None:
    """rho < 2 b_v / (m (b_v + b_i)): below 1 / m for float32."""
    part, link = PartOnLink(D, nodes, item_bytes), LinkModel(0.0, 1e-9)
    expected = 2 * item_bytes / (nodes * (item_bytes + 4))
    assert crossover_density(part, link) == pytest.approx(expected)
    assert sparse_pays(part, link, int(D * expected * 0.999))
    assert not sparse_pays(part, link, math.ceil(D * expected * 1.001))


@pytest.mark.parametrize("seconds", [0.0, SELECTION_SECONDS])
@pytest.mark.parametrize("link", [SLOW, RULE_LINK, LinkModel(1e-3, 1e-8)], ids=str)
@pytest.mark.parametrize("elements", [1000, D])
def test_it_turns_at_the_crossover_density(elements: int, link: LinkModel, seconds: float) -> None:
    part = PartOnLink(elements, 4, 4, seconds)
    density = crossover_density(part, link)
    below, above = math.floor(density * elements) - 1, math.ceil(density * elements) + 1
    assert not sparse_pays(part, link, max(above, 0))
    assert below < 0 or sparse_pays(part, link, below)


@pytest.mark.parametrize("alpha", [0.0, 100e-6])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_it_turns_at_the_crossover_rate(density: float, alpha: float) -> None:
    part, kept = PartOnLink(D, 4, 4, SELECTION_SECONDS), int(D * density)
    rate = crossover_bytes_per_second(part, alpha, kept)
    assert 0.0 < rate < math.inf
    assert sparse_pays(part, LinkModel(alpha, 1 / (rate * 0.99)), kept)
    assert not sparse_pays(part, LinkModel(alpha, 1 / (rate * 1.01)), kept)


def test_ends_of_the_range() -> None:
    part = PartOnLink(D, 4, 4, SELECTION_SECONDS)
    assert crossover_bytes_per_second(part, 0.0, D) == 0.0  # all of it, twice as many bytes: at no rate
    assert crossover_bytes_per_second(PartOnLink(D, 4, 4), 0.0, D // 100) == math.inf  # no work: at any rate
    assert not sparse_pays(PartOnLink(D, 1, 4), SLOW, 1)  # one node: nothing crosses
    assert sparse_pays(part, SLOW, D // 100)
