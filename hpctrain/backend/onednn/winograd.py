"""3x3 convolutions of stride 1 with 16 multiplications where 36 are usual (Winograd's F(2x2, 3x3); Lavin and Gray 2016).

oneDNN has no such kernel in float32 on x86-64, but it has the parts: an image's overlapping 4x4 tiles are gathered by strided
reorders, the transforms are products with small constant matrices (`tiles.py`), and between them stand 16 convolutions of 1x1,
its fastest kernels. All of it runs on oneDNN's threads. With images in blocks of channels everything moves whole blocks.

Written over tile positions (Kronecker products make the two-sided transforms one product):
    forward   y = (At x At) [(G x G) w . (Bt x Bt) patches]                                   section 4.1, eq. 8
    weights   dw = (Gt x Gt) sum over tiles [(A x A) dy . (Bt x Bt) patches]                  its adjoint
The input's gradient is the forward convolution of dy with the turned and transposed kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hpctrain.backend.operators import Array
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Descriptor, Engine, Primitive
from hpctrain.backend.kernels.onednn.geometry import convolution_geometry
from hpctrain.backend.onednn.operator import vector
from hpctrain.backend.kernels.onednn.reorder import Copy
from hpctrain.backend.kernels.onednn.tiles import Matrix, OutputGradients, Outputs, Patches, Work
from hpctrain.backend.kernels.onednn.tiling import Form, Room, Scratch, Tiling
from hpctrain.backend.specs import Pair, Window

_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)

_BIAS_POSITION = 5  # tile position (1, 1): adds to all four outputs alike, and is the sum of all four of dy


class Works:
    """Prepared calls, one after another."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def __call__(self) -> None:
        for work in self._works:
            work()


class _Products:
    """The 16 convolutions of 1x1 between the tiles of one chunk, forward or for the weights' gradient."""

    def __init__(
        self, engine: Engine, what: str, tiling: Tiling, tiles: int, *, weights: Descriptor | None, bias: bool, backward: bool
    ) -> None:
        self._tiling, self._tiles = tiling, tiles
        k, channels = tiling.channels_out, tiling.channels_in
        self._left = Descriptor.tagged(engine, (1, channels, self._tiles, 1), tiling.tag)
        self._right = Descriptor.tagged(engine, (1, k, self._tiles, 1), tiling.tag)
        self._bias, self._backward = vector(engine, k), backward
        geometry, own = convolution_geometry(Window((1, 1), (1, 1), (0, 0, 0, 0))), Attributes(engine)

        def make(weights: Descriptor, with_bias: bool) -> Primitive:
            formats = (self._left, weights, self._bias if with_bias else None, self._right)
            head = (c.FORWARD_TRAINING, c.CONVOLUTION_DIRECT)
            if not backward:
                return Primitive(engine, "convolution_forward", what, *head, *formats, *geometry, own)
            free = Descriptor.tagged(engine, (k, channels, 1, 1), "any")
            hint = Primitive(
                engine, "convolution_forward", what, *head, self._left, free, formats[2], self._right, *geometry, own
            )
            return Primitive(engine, "convolution_backward_weights", what, head[1], *formats, *geometry, hint, own)

        wanted = weights if weights is not None else Descriptor.tagged(engine, (k, channels, 1, 1), "any")
        self.plain = make(wanted, False)
        self.weights = self.plain.descriptor(c.QUERY_DIFF_WEIGHTS_MD if backward else c.QUERY_WEIGHTS_MD)
        self.biased = make(self.weights, True) if bias else None
        self.weight_items = self.weights.size_bytes // 4

    @property
    def primitives(self) -> list[Primitive]:
        return [self.plain] if self.biased is None else [self.plain, self.biased]

    def bind(self, room: Room, bias: Array | None) -> list[Work]:
        tiling, works = self._tiling, list[Work]()
        names = (
            (c.ARG_SRC, c.ARG_DIFF_WEIGHTS, c.ARG_DIFF_DST, c.ARG_DIFF_BIAS)
            if self._backward
            else (c.ARG_SRC, c.ARG_WEIGHTS, c.ARG_DST, c.ARG_BIAS)
        )
        for position in range(16):
            memories = {
                names[0]: (self._left, room.left[position * tiling.channels_in * self._tiles :]),
                names[1]: (self.weights, room.weights[position * self.weight_items :]),
                names[2]: (self._right, room.right[position * tiling.channels_out * self._tiles :]),
            }
            primitive = self.plain
            if position == _BIAS_POSITION and self.biased is not None:
                primitive = self.biased
                memories[names[3]] = (self._bias, bias)
            works.append(primitive.bind(memories, room.library))
        return works


class _Winograd:
    """The parts that both directions have: kernels for each form of chunk, places in the scratch, the weights tap by tap.

    Args:
        strides: of the weights' (out, in) in elements. first, step: elements from the weights' start to tap (0, 0), and from
            each tap to the next in row order.
    """

    def __init__(
        self, engine: Engine, what: str, tiling: Tiling, strides: Pair, first: int, step: int, *, bias: bool, backward: bool
    ) -> None:
        self._engine, self._what, self._tiling = engine, f"{what} by Winograd", tiling
        self._taps = [first + tap * step for tap in range(9)]
        self._chunks = tiling.chunks()
        self._forms: list[Form] = list(dict.fromkeys(chunk.form for chunk in self._chunks))
        self._patches = {form: Patches(engine, self._what, tiling, form) for form in self._forms}
        self._products: dict[int, _Products] = {}
        weights: Descriptor | None = None
        for tiles in dict.fromkeys(form.tiles for form in self._forms):
            made = _Products(engine, self._what, tiling, tiles, weights=weights, bias=bias, backward=backward)
            self._products[tiles], weights = made, made.weights
        assert weights is not None
        self._weights, self._items = weights, weights.size_bytes // 4
        shape = (tiling.channels_out, tiling.channels_in, 1, 1)
        self._plain_weights = Descriptor.strided(engine, shape, (*strides, max(strides), max(strides)))

    def _place(self, own: Sequence[Primitive], *, taps_alone: bool) -> None:
        """Divides the scratch, given the direction's own primitives that may need some of the library's."""
        shared = [each for parts in (self._products, self._patches) for part in parts.values() for each in part.primitives]
        self._scratch = Scratch(self._tiling, self._forms, self._items, [*shared, *own], taps_alone)
        self.scratch_bytes = self._scratch.total_bytes


class Product(_Winograd):
    """y = conv(x, w) + bias, then ReLU; or y += conv(x, w)."""

    def __init__(
        self,
        engine: Engine,
        what: str,
        tiling: Tiling,
        strides: Pair,
        first: int,
        step: int,
        *,
        bias: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__(engine, what, tiling, strides, first, step, bias=bias, backward=False)
        self._outputs = {form: Outputs(engine, self._what, tiling, form, relu=relu) for form in self._forms}
        self._transform = Matrix(engine, self._what, np.kron(_G, _G), self._items)
        own = [each for outputs in self._outputs.values() for each in outputs.primitives]
        self._place([*own, self._transform.primitive], taps_alone=True)

    def bind(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        y: Array,
        scratch: Array,
        *,
        accumulate: bool = False,
        leader: tuple[Product, Array] | None = None,
    ) -> Work:
        """The convolution on fixed memory, weights included.

        leader: (another one, its scratch), which always runs just before with the same weights; None: there is none.
        """
        room, works = self._scratch.room(scratch), list[Work]()
        if leader is not None and self._weights.equals(leader[0]._weights):
            room = replace(room, weights=leader[0]._scratch.room(leader[1]).weights)
        else:
            works += self._load(weight.reshape(-1), room)
        between = {form: self._between(form, bias, room) for form in self._forms}
        for chunk in self._chunks:
            works += self._patches[chunk.form].load(chunk, x, room)
            works += between[chunk.form]
            works += self._outputs[chunk.form].store(chunk, y, room, accumulate=accumulate)
        return Works(works)

    def _load(self, plain: Array, room: Room) -> list[Work]:
        """room.weights = (G x G) weights."""
        copy = Copy(self._engine, f"{self._what} weights", self._plain_weights, self._weights)
        works: list[Work] = [copy.bind(plain[at:], room.taps[tap * self._items :]) for tap, at in enumerate(self._taps)]
        return [*works, self._transform.bind(room.taps, room.weights, room.library)]

    def _between(self, form: Form, bias: Array | None, room: Room) -> list[Work]:
        """The calls that do not depend on where a chunk lies, so that all of one form share them."""
        transforms, products = self._patches[form].transform(room), self._products[form.tiles].bind(room, bias)
        return [*transforms, *products, *self._outputs[form].transform(room)]


class WeightGradient(_Winograd):
    """dw, and db where there is a bias, from x and dy."""

    def __init__(
        self, engine: Engine, what: str, tiling: Tiling, strides: Pair, first: int, step: int, *, bias: bool = False
    ) -> None:
        super().__init__(engine, f"{what} backward weights", tiling, strides, first, step, bias=bias, backward=True)
        self._gradients = {form: OutputGradients(engine, self._what, tiling, form) for form in self._forms}
        own = [each for gradients in self._gradients.values() for each in gradients.primitives]
        back = np.kron(_G.T, _G.T)
        self._write, self._add = (Matrix(engine, self._what, back, self._items, add=add) for add in (False, True))
        # The gradients of several chunks add up while tiles come and go.
        self._place([*own, self._write.primitive, self._add.primitive], taps_alone=len(self._chunks) == 1)

    def bind(self, x: Array, dy: Array, weight: Array, bias: Array | None, scratch: Array) -> Work:
        """The gradients on fixed memory."""
        room, plain = self._scratch.room(scratch), weight.reshape(-1)
        patches = {form: self._patches[form].transform(room) for form in self._forms}
        adding = {form: self._behind(form, bias, room, add=True) for form in {chunk.form for chunk in self._chunks[1:]}}
        works: list[Work] = []
        for number, chunk in enumerate(self._chunks):
            works += [*self._patches[chunk.form].load(chunk, x, room), *patches[chunk.form]]
            works += self._gradients[chunk.form].load(chunk, dy, room)
            works += adding[chunk.form] if number else self._behind(chunk.form, bias, room, add=False)
        store = Copy(self._engine, f"{self._what} weights", self._weights, self._plain_weights)
        works += [store.bind(room.taps[tap * self._items :], plain[at:]) for tap, at in enumerate(self._taps)]
        return Works(works)

    def _behind(self, form: Form, bias: Array | None, room: Room, *, add: bool) -> list[Work]:
        """The calls that follow the reading of a chunk: they write the gradients, or add to those of earlier chunks."""
        products = self._products[form.tiles].bind(room, room.bias if add else bias)
        works = [*self._gradients[form].transform(room), *products]
        if add and bias is not None:
            works.append(partial(np.add, bias, room.bias, bias))
        transform = self._add if add else self._write
        return [*works, transform.bind(room.weights, room.taps, room.library)]
