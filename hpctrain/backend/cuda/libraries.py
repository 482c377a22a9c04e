"""Convolutions and matrix products by NVIDIA's libraries, cuDNN and cuBLAS.

CuPy is not imported: handles and addresses are integers. Convolutions are graphs of cuDNN, made by NVIDIA's Python package
cudnn (the frontend, version 1.23). cuDNN's dims are logical NCHW and KCRS; strides describe NHWC and KRSC memory. Sums are
float32. Tensors begin at multiples of 16 bytes. A plan determines the engine that computes a graph, its settings, and the size of
its workspace. Plans are made for a device of this machine, from its cuDNN handle, or for any other device, from its properties;
the latter are the same plans, but cannot be run. Every plan is deterministic.

Matrix products call cuBLAS through ctypes. CuPy's own calls set the stream at each call, which resets the workspace. A handle
with its own workspace allocates nothing when a step is captured, and computes the same bits in every run.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.backend.cuda.device import ConvolutionKey, DeviceArray, Extent, Precision
from hpctrain.core.errors import BackendError, MissingLibraryError

Library = Any  # the package cudnn; it has no types
Graph = Any  # cudnn.pygraph
Stream = Any  # CupyStream, whose module imports CuPy

#: IDs of a graph's tensors, by their position in `DeviceConvolution.run`: both inputs, the output, and the bias
FIRST, SECOND, OUT, BIAS = 1, 2, 3, 4


def library() -> Library:
    """Return the package cudnn, loaded at the first call.

    PyTorch is hidden during the import. The package would import it, which takes seconds in each process, only to translate
    dtypes that are not used here.

    Raises:
        MissingLibraryError: the package, or cuDNN itself, cannot be loaded.
    """
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` raise ImportError
    try:
        return importlib.import_module("cudnn")
    except (ImportError, OSError) as error:
        raise MissingLibraryError(
            f"Convolutions on a GPU need cuDNN and its frontend, which cannot be loaded ({error}); "
            "install hpctrain with the extra for this CUDA version, such as hpctrain[gpu13]."
        ) from error
    finally:
        if hide:
            sys.modules.pop("torch", None)


def data_type(cudnn: Library, dtype: str) -> Any:
    """Return cuDNN's constant for a dtype.

    Raises:
        BackendError: cuDNN has no convolutions in the dtype.
    """
    known = {"float32": "FLOAT", "bfloat16": "BFLOAT16"}
    if dtype not in known:
        raise BackendError(f"cuDNN has no convolutions in {dtype} on GPUs; set precision to float32.")
    return getattr(cudnn.data_type, known[dtype])


def build(cudnn: Library, key: ConvolutionKey, **place: Any) -> Graph:
    """Return the cuDNN graph of a key, validated and ready for plans.

    Args:
        place: arguments of `cudnn.pygraph` that identify a device: its handle, or the properties of a device that may be absent.

    Raises:
        BackendError: cuDNN has no convolutions in the key's dtype.
        cudnn.cudnnGraphNotSupportedError: cuDNN does not support the graph.
    """
    dtype, sums = data_type(cudnn, key.dtype), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(name=key.kind, io_data_type=dtype, intermediate_data_type=sums, compute_data_type=sums, **place)
    shapes = {"forward": (key.x, key.w, key.y), "input": (key.y, key.w, key.x), "weight": (key.x, key.y, key.w)}
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
    """Add the key's bias and ReLU after `out`. cuDNN reads the bias in the dtype of activations."""
    if not key.fused:
        return out
    bias = graph.tensor(uid=BIAS, data_type=dtype, **_dims((1, 1, 1, key.y[3])))
    out = graph.bias(input=out, bias=bias)
    return graph.relu(input=out) if key.fused == "bias_relu" else out


def _dims(shape: Extent) -> dict[str, list[int]]:
    """Return cuDNN's dims and strides for memory of shape (N, H, W, C) or (K, R, S, C)."""
    n, h, w, c = shape
    return {"dim": [n, c, h, w], "stride": [h * w * c, 1, w * c, c]}


def describe(key: ConvolutionKey) -> str:
    """Return a one-line description of the key, which identifies it in records and between ranks."""
    shapes = " ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in (("x", key.x), ("w", key.w), ("y", key.y)))
    numbers = [("stride", key.stride), ("padding", key.padding), ("dilation", key.dilation), ("groups", (key.groups,))]
    window = " ".join(f"{name} {','.join(map(str, values))}" for name, values in numbers)
    kind = f"{key.kind}+{key.fused}" if key.fused else key.kind
    return f"{kind} {shapes} {window} {key.dtype} {key.precision}"


#: maximum workspace of a plan. Without a limit, some plans use gigabytes: 6 GB for float32 and 256 images of 224 x 224 x 64.
WORKSPACE_LIMIT_BYTES = 512 << 20


class ConvolutionPlan:
    """Implementation of `DeviceConvolution` by plan `index` of a cuDNN graph in which this plan is built.

    Args:
        handle_on: function that returns cuDNN's handle, set to enqueue its work on a stream.

    Attributes:
        name: cuDNN's engine and knobs.
    """

    def __init__(self, key: ConvolutionKey, graph: Graph, index: int, handle_on: Callable[[Stream], int]) -> None:
        self.key = key
        self.name = str(graph.get_plan_name_at_index(index))
        self.workspace_bytes = int(graph.get_workspace_size_plan_at_index(index))
        self._graph, self._index, self._handle_on = graph, index, handle_on

    def run(
        self,
        stream: Stream,
        a: DeviceArray,
        b: DeviceArray,
        out: DeviceArray,
        workspace: DeviceArray | None,
        bias: DeviceArray | None = None,
    ) -> None:
        pointers = {FIRST: a.pointer, SECOND: b.pointer, OUT: out.pointer}
        if self.key.fused:
            pointers[BIAS] = 0 if bias is None else bias.pointer
        place = 0 if workspace is None else workspace.pointer
        self._graph._execute_plan_at_index(pointers, place, self._index, self._handle_on(stream))


class CudnnPlans:
    """Cache of a plan per key: the first of the heuristic's list that is deterministic, as precise as the key, small and usable.

    Plans are not timed. On an H100, the fastest of the first three plans did not make ResNet-50's steps faster, and timing took
    10 to 20 s at each start (docs/performance-gpu.md). Pass either properties, or a handle with its capability.

    Args:
        handle: handle of cuDNN, from `new_handle`.
        properties: properties of a device: the object in the JSON of `cudnn.create_device_properties(number).serialize()`. Plans
            made from properties cannot be run.
        capability: (major, minor) compute capability of the handle's device.
    """

    def __init__(
        self,
        handle: int | None = None,
        properties: Mapping[str, Any] | None = None,
        *,
        capability: tuple[int, int] | None = None,
    ) -> None:
        assert (handle is None) == (capability is None) != (properties is None), "pass a handle and its capability, or properties"
        self._cudnn, self._handle, self._stream = library(), handle, -1
        self._plans: dict[ConvolutionKey, ConvolutionPlan] = {}
        # Arguments of `cudnn.pygraph`. Without `sm_version` the frontend would query libcudart, which is not loaded otherwise.
        self._device: dict[str, Any] = {"handle": handle}
        if capability is not None:
            self._device["sm_version"] = 10 * capability[0] + capability[1]
        if properties is not None:
            device = self._cudnn.create_device_properties(json.dumps(dict(properties)))
            self._device = {"device_property": device, "sm_version": properties["deviceVer"] // 10}

    def plan(self, key: ConvolutionKey) -> ConvolutionPlan:
        """Return the plan for a key, made at the first request.

        Raises:
            BackendError: cuDNN has no plan for the key.
        """
        if key not in self._plans:
            self._plans[key] = self._make(key)
        return self._plans[key]

    def _make(self, key: ConvolutionKey) -> ConvolutionPlan:
        unsupported = self._cudnn.cudnnGraphNotSupportedError
        try:
            graph = build(self._cudnn, key, **self._device)
            self._list_plans(graph, key)
        except unsupported as error:
            raise self._no_plan(key, str(error)) from error
        for index in range(graph.get_execution_plan_count()):
            try:
                graph.build_plan_at_index(index)
            except unsupported:  # excluded by `_list_plans`, or not supported by this device
                continue
            return ConvolutionPlan(key, graph, index, self._handle_on)
        raise self._no_plan(key, "every plan in its list is excluded or unsupported")

    def _handle_on(self, stream: Stream) -> int:
        assert self._handle is not None, "plans for a device that is not here cannot be run"
        address: int = stream.raw.ptr
        if address != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=address)
            self._stream = address
        return self._handle

    def _list_plans(self, graph: Graph, key: ConvolutionKey) -> None:
        """List the heuristic's plans, except those that are nondeterministic, less precise than the key, or too large."""
        cudnn, note = self._cudnn, self._cudnn.numerical_note
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        left_out = [note.NONDETERMINISTIC, note.WINOGRAD_TILE_4x4, note.WINOGRAD_TILE_6x6, note.WINOGRAD_TILE_13x13]
        graph.deselect_numeric_notes(left_out + ([note.TENSOR_CORE] if key.precision == "float32" else []))
        graph.deselect_workspace_greater_than(WORKSPACE_LIMIT_BYTES)
        graph.check_support()

    def _no_plan(self, key: ConvolutionKey, reason: str) -> BackendError:
        version = self._cudnn.backend_version_string()
        first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        return BackendError(
            f"cuDNN {version} has no deterministic plan for {describe(key)} in a workspace of at most "
            f"{WORKSPACE_LIMIT_BYTES >> 20} MiB ({first}); try a smaller batch, or another precision."
        )


def new_handle() -> int:
    """Return a new handle of cuDNN on the current CUDA device.

    Raises:
        MissingLibraryError: cuDNN or its frontend cannot be loaded.
    """
    return int(library().create_handle())


#: size of cuBLAS's workspace that NVIDIA recommends for its GPUs since 2022
WORKSPACE_BYTES = 32 << 20

_OPERATION = {False: 0, True: 1}  # CUBLAS_OP_N, CUBLAS_OP_T
_DATA_TYPE = {"float32": 0, "bfloat16": 14}  # CUDA_R_32F, CUDA_R_16BF
# CUBLAS_COMPUTE_32F, _32F_PEDANTIC (no tensor cores), _32F_FAST_TF32
_COMPUTE_TYPE: dict[Precision, int] = {"bfloat16": 68, "float32": 69, "tf32": 77}
_MOST_ROWS = 2**31 - 1  # cuBLAS's sizes are 32-bit integers
_DEFAULT_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT
# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums of bfloat16 products are combined in float32
_MATH_MODE = 16


class MatrixProducts:
    """Matrix products that are enqueued on one stream.

    Args:
        library: cuBLAS, loaded by ctypes.
        stream: address of the stream.
        workspace: memory of the device, kept alive by this object.

    Raises:
        BackendError: cuBLAS cannot be initialised.
    """

    def __init__(self, library: Library, stream: int, workspace: DeviceArray) -> None:
        self._library, self._workspace = library, workspace
        self._handle = ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._check("cublasCreate", library.cublasCreate_v2(ctypes.byref(self._handle)))
        # The stream is set before the workspace, which it would reset.
        self._check("cublasSetStream", library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))
        place = (ctypes.c_void_p(workspace.pointer), ctypes.c_size_t(workspace.nbytes))
        self._check("cublasSetWorkspace", library.cublasSetWorkspace_v2(self._handle, *place))
        self._check("cublasSetMathMode", library.cublasSetMathMode(self._handle, ctypes.c_int(_MATH_MODE)))

    def run(
        self,
        a: DeviceArray,
        b: DeviceArray,
        c: DeviceArray,
        *,
        transpose_a: bool,
        transpose_b: bool,
        accumulate: bool,
        precision: Precision,
    ) -> None:
        """Enqueue c := op(a) op(b), plus c if `accumulate`. Row-major c is column-major c^T = op(b)^T op(a)^T.

        Raises:
            ValueError: the shapes of the matrices are incompatible.
            BackendError: the dtype or precision is not supported on GPUs, or there are more than 2**31 - 1 rows or columns.
        """
        rows, inner = a.shape[::-1] if transpose_a else a.shape
        inner_b, cols = b.shape[::-1] if transpose_b else b.shape
        if inner != inner_b or c.shape != (rows, cols):
            raise ValueError(f"The product of {a!r} and {b!r} does not have the shape of {c!r}.")
        types = [_number(_DATA_TYPE, array.dtype) for array in (b, a, c)]
        compute = _number(_COMPUTE_TYPE, precision)
        if not rows or not cols or not inner:
            assert accumulate or not c.size, "the caller computes sums over no elements"
            return
        if max(rows, cols, inner) > _MOST_ROWS:
            raise BackendError(
                f"cuBLAS multiplies matrices of at most {_MOST_ROWS} rows and columns, not {rows} x {inner} by {inner} x {cols}; "
                "train with smaller micro-batches."
            )
        status = self._library.cublasGemmEx(
            self._handle,
            ctypes.c_int(_OPERATION[transpose_b]),
            ctypes.c_int(_OPERATION[transpose_a]),
            *map(ctypes.c_int, (cols, rows, inner)),
            ctypes.byref(self._one),
            *(ctypes.c_void_p(b.pointer), ctypes.c_int(types[0]), ctypes.c_int(max(1, b.shape[1]))),
            *(ctypes.c_void_p(a.pointer), ctypes.c_int(types[1]), ctypes.c_int(max(1, a.shape[1]))),
            ctypes.byref(self._one if accumulate else self._zero),
            *(ctypes.c_void_p(c.pointer), ctypes.c_int(types[2]), ctypes.c_int(cols)),
            ctypes.c_int(compute),
            ctypes.c_int(_DEFAULT_ALGORITHM),
        )
        self._check("cublasGemmEx", status)

    @staticmethod
    def _check(function: str, status: int) -> None:
        if status:
            raise BackendError(f"{function} failed with status {status} of cuBLAS; see cublasStatus_t in its documentation.")


def _number(known: Any, name: str) -> int:
    """Return cuBLAS's number of a dtype or precision."""
    if name not in known:
        raise BackendError(f"Matrix products on GPUs support {', '.join(known)}, not {name}; set precision to float32.")
    number: int = known[name]
    return number
