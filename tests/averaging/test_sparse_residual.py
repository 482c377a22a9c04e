"""One part of a compressed slice on a few nodes: what is sent and what is kept back is all there was."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hpctrain.averaging.slices import Compression
from hpctrain.averaging.sparse_residual import SparsePart, SparseSettings
from hpctrain.compress.selection import Selection
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait

SIZE = 40


def _part(comm: ThreadCommunicator, settings: SparseSettings) -> SparsePart:
    return SparsePart(SIZE, "float64", Compression(comm.size, settings.density), settings, comm, Selection("float64"), (3,))


def test_the_density_falls_exponentially_to_the_last_one() -> None:
    settings = SparseSettings(0.01, 0.25, 4)
    densities = [settings.density_at(step) for step in range(6)]
    assert densities[0] == 0.25
    assert densities[4:] == [0.01, 0.01]
    ratios = [b / a for a, b in pairwise(densities[:5])]
    assert ratios == pytest.approx([(0.01 / 0.25) ** 0.25] * 4)
    assert (settings.largest_density, SparseSettings(0.01, 0.25, 0).largest_density) == (0.25, 0.01)
    assert SparseSettings(0.01, 0.25, 0).density_at(0) == 0.01


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("nodes", [2, 3])
def test_residuals_and_sums_are_all_gradients(nodes: int, warmup: int) -> None:
    settings = SparseSettings(0.1, 0.5, warmup)

    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        part, random = _part(comm, settings), np.random.default_rng(comm.rank)
        given, applied, gradient = np.zeros(SIZE), np.zeros(SIZE), np.empty(SIZE)
        chosen = []
        for step in range(6):
            new = random.standard_normal(SIZE)
            before = part.residual + new
            wait(part.send(new, step))
            sent = before - part.residual
            kept = Compression(comm.size, 0.1).kept(SIZE, settings.density_at(step))
            # The k largest, whole: nothing that is kept back is larger, and what is sent leaves nothing.
            assert np.count_nonzero(sent) == kept
            assert not part.residual[sent != 0].any()
            assert np.abs(before[sent == 0]).max() <= np.abs(before[sent != 0]).min()
            chosen.append(kept)
            part.receive(gradient)
            given, applied = given + new, applied + gradient
        return given, applied, part.residual, chosen

    results = run_virtual(nodes, program)
    given, residuals = (sum(result[i] for result in results) for i in (0, 2))
    for _, applied, _, chosen in results:
        np.testing.assert_allclose(applied + residuals, given, rtol=0, atol=1e-13)
        assert applied.tobytes() == results[0][1].tobytes()
        assert chosen == ([20, 12, 7, 4, 4, 4] if warmup else [4] * 6)


@pytest.mark.parametrize("masking", [False, True])
def test_momentum_is_added_up_before_the_choice(masking: bool) -> None:
    """u := m u + g, v := v + u; sent are the largest of v, and u is zeroed there with masking."""
    settings = SparseSettings(0.1, 0.1, 0, 0.5, masking)

    def program(comm: ThreadCommunicator) -> None:
        part, random = _part(comm, settings), np.random.default_rng(comm.rank)
        u, v = np.zeros(SIZE), np.zeros(SIZE)
        for step in range(5):
            new = random.standard_normal(SIZE)
            u = 0.5 * u + new
            v = v + u
            sent = np.argsort(-np.abs(v))[:4]
            v[sent] = 0.0
            if masking:
                u[sent] = 0.0
            wait(part.send(new, step))
            np.testing.assert_array_equal(part.velocity, u)
            np.testing.assert_array_equal(part.residual, v)

    run_virtual(2, program)


def test_what_is_not_finite_is_sent_first() -> None:
    def program(comm: ThreadCommunicator) -> np.ndarray:
        part, gradient = _part(comm, SparseSettings(0.1, 0.1, 0)), np.arange(SIZE, dtype=np.float64)
        if comm.rank == 1:
            gradient[5], gradient[7] = np.nan, -np.inf
        wait(part.send(gradient, 0))
        result = np.empty(SIZE)
        part.receive(result)
        return result

    for result in run_virtual(3, program):
        assert np.flatnonzero(~np.isfinite(result)).tolist() == [5, 7]
