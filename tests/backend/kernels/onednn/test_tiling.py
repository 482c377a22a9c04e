"""Chunks of Winograd's tiles: together every tile once, each within its image and, with its weights, within what it may take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.kernels.onednn import tiling as module
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.kernels.onednn.layouts import TAGS, blocked_layout
from hpctrain.backend.kernels.onednn.tiling import Chunk, Scratch, Tiling
from hpctrain.backend.kernels.onednn.winograd import Product, WeightGradient

_DEFAULT_BYTES = module._CHUNK_BYTES
_TAPS = ((9 * 64, 1), 0, 64)  # where 64 channels' KRSC weights lie

edge = st.integers(0, 2)
side = st.integers(3, 40)
tilings = st.builds(
    Tiling,
    batch=st.integers(1, 7),
    size=st.tuples(side, side),
    channels_in=st.sampled_from([8, 16, 64]),
    channels_out=st.sampled_from([8, 16, 64]),
    padding=st.tuples(edge, edge, edge, edge),
    block=st.just(8),
    tag=st.just("aBcd8b"),
)
budgets = st.integers(0, 22).map(lambda power: 1 << power)


def chunks_within(tiling: Tiling, budget: int) -> list[Chunk]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", budget)
        return tiling.chunks()


def one_row_bytes(tiling: Tiling) -> int:
    """What the smallest chunk takes, padded rows of x included."""
    columns = tiling.tiles[1]
    return 4 * (4 * tiling.channels_in * (2 * columns + 2) + columns * sum(tiling.items))


def tile_bytes(tiling: Tiling, chunks: list[Chunk]) -> int:
    return Scratch(tiling, [chunk.form for chunk in chunks], 0, [_NoScratch()], True).total_bytes  # type: ignore[list-item]


class _NoScratch:
    scratchpad_bytes = 0


@given(tiling=tilings, budget=budgets)
def test_every_output_row_belongs_to_one_chunk(tiling: Tiling, budget: int) -> None:
    height = tiling.output_size[0]
    seen = np.zeros((tiling.batch, height), int)
    tiles = 0
    for chunk in chunks_within(tiling, budget):
        form = chunk.form
        assert chunk.write_row % 2 == 0
        assert form.rows == -(-form.written // 2)
        seen[chunk.image : chunk.image + form.images, chunk.write_row : chunk.write_row + form.written] += 1
        assert chunk.write_row + form.written <= height
        assert chunk.image + form.images <= tiling.batch
        tiles += form.tiles
    assert (seen == 1).all()
    assert tiles == tiling.batch * tiling.tiles[0] * tiling.tiles[1]


@given(tiling=tilings, budget=budgets)
def test_rows_read_are_those_of_the_padded_image(tiling: Tiling, budget: int) -> None:
    top, bottom, _, _ = tiling.padding
    height = tiling.size[0]
    padded = np.concatenate([np.zeros(top), 1 + np.arange(height), np.zeros(bottom + 1)])  # one more: a tile over the edge
    for chunk in chunks_within(tiling, budget):
        form = chunk.form
        found = np.zeros(form.padded[0])
        found[form.above : form.above + form.read] = 1 + np.arange(height)[chunk.read_row : chunk.read_row + form.read]
        np.testing.assert_array_equal(found, padded[chunk.write_row : chunk.write_row + form.padded[0]])


@given(tiling=tilings, budget=budgets)
def test_chunks_stay_within_the_budget(tiling: Tiling, budget: int) -> None:
    chunks = chunks_within(tiling, budget)
    assert tile_bytes(tiling, chunks) <= max(budget, one_row_bytes(tiling)) + 4 * 64 * 6  # of parts aligned to 64 bytes


@given(tiling=tilings, budget=budgets)
def test_chunks_are_alike(tiling: Tiling, budget: int) -> None:
    """Sizes differ by one at most, and however many chunks there are, few forms of kernels are needed."""
    chunks = chunks_within(tiling, budget)
    for counts in ({chunk.form.images for chunk in chunks}, {chunk.form.rows for chunk in chunks}):
        assert max(counts) - min(counts) <= 1
    assert len({chunk.form for chunk in chunks}) <= 6


@given(tiling=tilings)
def test_a_small_batch_is_one_chunk(tiling: Tiling) -> None:
    assert len(chunks_within(tiling, 1 << 40)) == 1


@pytest.mark.parametrize("pixels", [224, 768, 2048])
def test_large_images_take_no_more_scratch_than_small_ones(onednn: OnednnKernelSet, pixels: int) -> None:
    engine = onednn._engine
    tiling = Tiling(2, (pixels, pixels), 64, 64, (1, 1, 1, 1), engine.block, TAGS[blocked_layout(engine)])
    weights = (16 + 9) * 4 * 64 * 64  # by tile position and by tap
    for made in (Product(engine, "test", tiling, *_TAPS), WeightGradient(engine, "test", tiling, *_TAPS, bias=True)):
        library = made._scratch._library
        assert made.scratch_bytes <= _DEFAULT_BYTES + weights + (library.stop - library.start) + 64 * 10  # of aligned parts
