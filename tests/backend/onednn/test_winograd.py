"""Winograd's convolution equals the float64 reference, whole and in chunks of tiles; where it is chosen, how tiles are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.onednn import winograd
from hpctrain.backend.onednn.conv2d import Conv2dOperator
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.onednn.operator import in_layout
from hpctrain.backend.onednn.winograd import Chunk, Product, ScratchPlan, Tiling, WeightGradient
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import Conv2dSpec, Edges, TensorSpec, Window, WithRelu
from tests.backend.onednn.test_operators import SAME, arrays, rectified
from tests.support.kernel_pairs import assert_close, difference, run


def conv(channels_in: int, channels_out: int, padding: Edges = SAME, *, bias: bool = True) -> Conv2dSpec:
    return Conv2dSpec(channels_in, channels_out, Window((3, 3), (1, 1), padding), bias=bias)


def chosen(onednn: KernelSet, spec: Conv2dSpec, shape: tuple[int, ...]) -> tuple[bool, ...]:
    operator = onednn.make(spec, (TensorSpec(shape),), training=True)
    assert isinstance(operator, Conv2dOperator)
    plan = operator._plan
    return tuple(way is not None for way in (plan.winograd, plan.winograd_data, plan.weight_gradient))


def assert_chosen_and_equal(onednn: KernelSet, reference: KernelSet, spec: Conv2dSpec, shape: tuple[int, ...]) -> None:
    x, parameters, dy = arrays(spec, shape)
    assert chosen(onednn, spec, shape) == (True, True, True)
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy, steps=2)
    assert_close(ours, run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64"))


CHUNK_BYTES = {"whole": 1 << 30, "two images": 250_000, "two rows": 50_000, "single rows": 1}


@pytest.fixture(params=CHUNK_BYTES)
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Winograd whatever it costs, in chunks of about so much at these tests' sizes."""
    monkeypatch.setattr(Tiling, "pays", lambda self, speed: True)
    monkeypatch.setattr(winograd, "_CHUNK_BYTES", CHUNK_BYTES[request.param])


@pytest.mark.slow
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("padding", [SAME, (0, 0, 0, 0), (0, 2, 1, 0)])
@pytest.mark.parametrize(("size", "bias"), [((9, 7), True), ((8, 6), False), ((3, 16), True)])
def test_equals_the_reference(onednn: KernelSet, reference: KernelSet, padding: Edges, size: tuple[int, int], bias: bool) -> None:
    assert_chosen_and_equal(onednn, reference, conv(16, 32, padding, bias=bias), (3, *size, 16))


@pytest.mark.parametrize("size", [(1, 7), (1, 6), (7, 1)])
def test_images_of_one_row_or_column_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, onednn: KernelSet, reference: KernelSet, size: tuple[int, int]
) -> None:
    monkeypatch.setattr(Tiling, "pays", lambda self, speed: True)
    assert_chosen_and_equal(onednn, reference, conv(16, 32), (3, *size, 16))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("size", [(9, 7), (8, 6)])
def test_adds_to_the_gradient(onednn: KernelSet, reference: KernelSet, size: tuple[int, int]) -> None:
    spec = conv(32, 16, bias=False)
    x, parameters, dy = arrays(spec, (3, *size, 32))
    before = np.random.default_rng(1).standard_normal(x.shape)
    layouts = [in_layout(TensorSpec(x.shape), onednn.make(spec, (TensorSpec(x.shape),), training=True).inputs[0].layout)]
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy, accumulate=[before], layouts=layouts)
    wanted = run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64").input_grads[0] + before
    assert difference(ours.input_grads[0], wanted) <= 1e-5


@pytest.mark.usefixtures("everywhere")
def test_relu_after_it(onednn: KernelSet, reference: KernelSet) -> None:
    spec = conv(16, 16)
    x, parameters, dy = arrays(spec, (3, 9, 7, 16))
    ours = run(onednn, WithRelu(spec), [x], parameters=parameters, output_grad=dy)
    assert_close(ours, rectified(reference, spec, x, parameters, dy))


def forms(size: tuple[int, int], padding: Edges, channels: tuple[int, int]) -> set[tuple[int, int]]:
    made = Tiling(3, size, *channels, padding, 8)
    return {(chunk.form.images, chunk.form.rows) for chunk in made.chunks()}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [("whole", {(3, 5)}), ("two images", {(2, 5), (1, 5)}), ("two rows", {(1, 2), (1, 1)}), ("single rows", {(1, 1)})],
)
def test_budgets_cut_as_they_are_called(monkeypatch: pytest.MonkeyPatch, budget: str, expected: set[tuple[int, int]]) -> None:
    monkeypatch.setattr(winograd, "_CHUNK_BYTES", CHUNK_BYTES[budget])
    assert forms((9, 7), SAME, (16, 32)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["two rows", "single rows"])
@pytest.mark.parametrize("size", [(8, 10), (9, 7)])
@pytest.mark.parametrize("top", [0, 1, 2])
@pytest.mark.parametrize("bottom", [0, 1, 2])
def test_rows_of_tiles_equal_the_reference(
    onednn: KernelSet,
    reference: KernelSet,
    monkeypatch: pytest.MonkeyPatch,
    budget: str,
    size: tuple[int, int],
    top: int,
    bottom: int,
) -> None:
    """All paddings above and below, with other ones left and right."""
    monkeypatch.setattr(Tiling, "pays", lambda self, speed: True)
    monkeypatch.setattr(winograd, "_CHUNK_BYTES", CHUNK_BYTES[budget])
    spec = conv(16, 16, (top, bottom, bottom, 2 - top))
    x, parameters, dy = arrays(spec, (2, *size, 16))
    assert chosen(onednn, spec, x.shape) == (True, True, True)
    before = np.random.default_rng(1).standard_normal(x.shape)
    layouts = [in_layout(TensorSpec(x.shape), onednn.make(spec, (TensorSpec(x.shape),), training=True).inputs[0].layout)]
    wanted = run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64")
    assert_close(run(onednn, spec, [x], parameters=parameters, output_grad=dy, layouts=layouts, steps=2), wanted)
    wanted.input_grads[0] = wanted.input_grads[0] + before
    added = run(onednn, spec, [x], parameters=parameters, output_grad=dy, layouts=layouts, accumulate=[before])
    assert_close(added, wanted)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("size", [(9, 7), (12, 8)])
def test_errors_are_those_of_float32(onednn: KernelSet, reference: KernelSet, size: tuple[int, int]) -> None:
    spec = conv(64, 32)
    x, parameters, dy = arrays(spec, (3, *size, 64))
    x, dy = x.astype(np.float32), dy.astype(np.float32)
    parameters = {role: value.astype(np.float32) for role, value in parameters.items()}
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy)
    assert_close(ours, run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64"), 2e-6)


def test_wide_layers_take_it_and_equal_the_reference(onednn: KernelSet, reference: KernelSet) -> None:
    assert_chosen_and_equal(onednn, reference, conv(128, 128, bias=False), (8, 14, 14, 128))


@pytest.mark.parametrize(
    "spec",
    [
        conv(16, 16),
        Conv2dSpec(256, 256, Window((3, 3), (2, 2), SAME)),
        Conv2dSpec(256, 256, Window((1, 1), (1, 1), (0, 0, 0, 0))),
        Conv2dSpec(256, 256, Window((3, 3), (1, 1), (2, 2, 2, 2), (2, 2))),
        Conv2dSpec(256, 256, Window((3, 3), (1, 1), SAME), groups=2),
        conv(250, 256),
    ],
    ids=["narrow", "strided", "1x1", "dilated", "grouped", "channels that fill no blocks"],
)
def test_what_it_cannot_do_or_does_not_do_faster_stays_direct(onednn: KernelSet, spec: Conv2dSpec) -> None:
    assert chosen(onednn, spec, (3, 14, 14, spec.channels_in)) == (False, False, False)


_DEFAULT_BYTES = winograd._CHUNK_BYTES

_STRIDES = (64, 9 * 64, 1)  # of 64 channels' KRSC weights along (tap, out, in)

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
)

budgets = st.integers(0, 22).map(lambda power: 1 << power)


def chunks_within(made: Tiling, budget: int) -> list[Chunk]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "_CHUNK_BYTES", budget)
        return made.chunks()


def one_row_bytes(tiling: Tiling) -> int:
    """What the smallest chunk takes, padded rows of x included."""
    columns = tiling.tiles[1]
    return 4 * (4 * tiling.channels_in * (2 * columns + 2) + columns * sum(tiling.items))


def tile_bytes(tiling: Tiling, chunks: list[Chunk]) -> int:
    return ScratchPlan(tiling, [chunk.form for chunk in chunks], 0, [_NoScratch()], True).total_bytes  # type: ignore[list-item]


class _NoScratch:
    scratchpad_bytes = 0


@given(tiling=tilings, budget=budgets)
def test_chunks_stay_within_the_budget(tiling: Tiling, budget: int) -> None:
    chunks = chunks_within(tiling, budget)
    assert tile_bytes(tiling, chunks) <= max(budget, one_row_bytes(tiling)) + 4 * 64 * 6  # of parts aligned to 64 bytes


@pytest.mark.parametrize("pixels", [224, 768, 2048])
def test_large_images_take_no_more_scratch_than_small_ones(onednn: OnednnKernelSet, pixels: int) -> None:
    engine = onednn._engine
    tiling = Tiling(2, (pixels, pixels), 64, 64, (1, 1, 1, 1), engine.block)
    weights = (16 + 9) * 4 * 64 * 64  # by tile position and by tap
    for made in (Product(engine, "test", tiling, _STRIDES), WeightGradient(engine, "test", tiling, _STRIDES, bias=True)):
        library = made._scratch_plan._library
        assert made.scratch_bytes <= _DEFAULT_BYTES + weights + (library.stop - library.start) + 64 * 10  # of aligned parts
