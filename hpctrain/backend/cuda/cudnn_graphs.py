"""Convolutions as graphs of cuDNN, by NVIDIA's Python package cudnn (the frontend, version 1.23): descriptions without plans.

cuDNN's dims are logical NCHW and KCRS; that memory is NHWC and KRSC is said by strides. Sums are float32. Tensors begin at
multiples of 16 bytes.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hpctrain.backend.cuda.device import ConvolutionKey, Extent
from hpctrain.core.errors import BackendError, MissingLibraryError

Library = Any  # the package cudnn; it has no types
Graph = Any  # cudnn.pygraph

#: numbers of tensors in a graph, by their place in `DeviceConvolution.run`: the two that are read, the one written, the bias
FIRST, SECOND, OUT, BIAS = 1, 2, 3, 4


def library() -> Library:
    """Return the package cudnn, loaded at first use.

    Hide PyTorch during the import. The package would import it, which takes seconds in each process, to translate dtypes that
    are not used here.

    Raises:
        MissingLibraryError: it, or cuDNN itself, is not installed.
    """
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` raise ImportError
    try:
        return importlib.import_module("cudnn")
    except (ImportError, OSError) as error:
        raise MissingLibraryError(
            f"Convolutions on a GPU need cuDNN and its frontend, which cannot be loaded ({error}); "
            "install hpctrain with its extra for this CUDA version, such as hpctrain[gpu13]."
        ) from error
    finally:
        if hide:
            sys.modules.pop("torch", None)


def data_type(cudnn: Library, dtype: str) -> Any:
    """cuDNN's name of a dtype.

    Raises:
        BackendError: it has no convolutions in it.
    """
    known = {"float32": "FLOAT", "bfloat16": "BFLOAT16"}
    if dtype not in known:
        raise BackendError(f"cuDNN has no convolutions in {dtype} on these GPUs; precision float32 is the nearest.")
    return getattr(cudnn.data_type, known[dtype])


def build(cudnn: Library, key: ConvolutionKey, **place: Any) -> Graph:
    """The graph of a key, with its operation graph built: ready for plans.

    Args:
        place: the handle of a device, or the properties of one that need not be here, as arguments of `cudnn.pygraph`.

    Raises:
        BackendError: a dtype that cuDNN does not convolve in. cudnn.cudnnGraphNotSupportedError: a graph it does not know.
    """
    dtype, sums = data_type(cudnn, key.dtype), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(name=key.kind, io_data_type=dtype, intermediate_data_type=sums, compute_data_type=sums, **place)
    shapes = {
        "forward": (key.x, key.w, key.y),
        "input": (key.y, key.w, key.x),
        "weight": (key.x, key.y, key.w),
    }
    first, second, written = shapes[key.kind]
    a, b = (graph.tensor(uid=uid, data_type=dtype, **_dims(shape)) for uid, shape in ((FIRST, first), (SECOND, second)))
    out = _fused(graph, key, _convolution(graph, key, a, b), dtype)
    dims = _dims(written)
    out.set_uid(OUT).set_dim(dims["dim"]).set_stride(dims["stride"]).set_data_type(dtype).set_output(True)
    graph.validate()
    graph.build_operation_graph()
    return graph


def _convolution(graph: Graph, key: ConvolutionKey, a: Any, b: Any) -> Any:
    top, bottom, left, right = key.padding
    window = {
        "pre_padding": [top, left],
        "post_padding": [bottom, right],
        "stride": list(key.stride),
        "dilation": list(key.dilation),
    }
    if key.kind == "forward":
        return graph.conv_fprop(image=a, weight=b, **window)
    if key.kind == "input":
        return graph.conv_dgrad(loss=a, filter=b, **window)
    return graph.conv_wgrad(image=a, loss=b, **window)


def _fused(graph: Graph, key: ConvolutionKey, out: Any, dtype: Any) -> Any:
    """`out` with the key's bias and ReLU behind it; cuDNN takes the bias in the dtype of activations."""
    if not key.fused:
        return out
    bias = graph.tensor(uid=BIAS, data_type=dtype, **_dims((1, 1, 1, key.y[3])))
    out = graph.bias(input=out, bias=bias)
    return graph.relu(input=out) if key.fused == "bias_relu" else out


def _dims(shape: Extent) -> dict[str, list[int]]:
    """The dims and strides of NHWC memory: (N, H, W, C), or (K, R, S, C)."""
    n, h, w, c = shape
    return {"dim": [n, c, h, w], "stride": [h * w * c, 1, w * c, c]}


def describe(key: ConvolutionKey) -> str:
    """The key in a line, the same everywhere and different for different keys: a name for records and between ranks."""
    shapes = " ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in (("x", key.x), ("w", key.w), ("y", key.y)))
    numbers = [("stride", key.stride), ("padding", key.padding), ("dilation", key.dilation), ("groups", (key.groups,))]
    window = " ".join(f"{name} {','.join(map(str, values))}" for name, values in numbers)
    kind = f"{key.kind}+{key.fused}" if key.fused else key.kind
    return f"{kind} {shapes} {window} {key.dtype} {key.precision}"
