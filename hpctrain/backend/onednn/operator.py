"""Memory formats of activations: tokens of `TensorSpec.layout` and oneDNN's descriptors of them.

"nChw8c" and "nChw16c" hold blocks of 8 or 16 channels innermost, padded with zeros to whole blocks; "nchw" is the plain order of
the first layer's kernels. oneDNN keeps the padding zero.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hpctrain.backend.onednn.binding import Descriptor, Engine
from hpctrain.backend.specs import NHWC, TensorSpec

NCHW = "nchw"
TAGS = {NHWC: "acdb", NCHW: "abcd", "nChw8c": "aBcd8b", "nChw16c": "aBcd16b"}
BLOCKS = {"nChw8c": 8, "nChw16c": 16}


def blocked_layout(engine: Engine) -> str:
    """The token of the blocked layout that this processor's kernels prefer."""
    return f"nChw{engine.block}c"


def in_layout(spec: TensorSpec, layout: str) -> TensorSpec:
    """The same images (N, H, W, C) in `layout`; plain where the memory is the same byte for byte."""
    n, h, w, channels = spec.shape
    if layout == NHWC or (layout == NCHW and (channels == 1 or h * w == 1)):
        return spec.plain()
    block = BLOCKS.get(layout, 1)
    if h * w == 1 and channels % block == 0:
        return spec.plain()
    padded = -(-channels // block) * block
    return replace(spec, layout=layout, padded_size=n * h * w * padded)


def images(engine: Engine, spec: TensorSpec, layout: str | None = None) -> Descriptor:
    """The format of images (N, H, W, C) in `spec.layout`, or under another token for the same memory."""
    n, h, w, channels = spec.shape
    return Descriptor.tagged(engine, (n, channels, h, w), TAGS[spec.layout if layout is None else layout])


def rows(engine: Engine, spec: TensorSpec) -> Descriptor:
    """Anything in plain memory as pixels with the last dim as channels: (M, C, 1, 1)."""
    channels = spec.shape[-1]
    return Descriptor.tagged(engine, (math.prod(spec.shape[:-1]), channels, 1, 1), TAGS[NHWC])


def elements(engine: Engine, spec: TensorSpec) -> Descriptor:
    """A tensor for element-wise work: its elements in memory order, padding included."""
    return Descriptor.tagged(engine, (spec.size,), "a")


def vector(engine: Engine, size: int) -> Descriptor:
    """(size,) in plain memory."""
    return Descriptor.tagged(engine, (size,), "a")
