"""A thin binding of oneDNN's C interface: the library, descriptors, primitives, and prepared calls.

The library's path is taken from the environment. If it is not set there, the library is searched in this Python's prefixes and by
the dynamic loader. `available` reports whether this machine can use it. Every status is checked. Functions keep their C names; a
handle is freed with the Python object that holds it. A `Call` is one `dnnl_primitive_execute` with its arguments prepared. ctypes
releases the interpreter lock while it runs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from hpctrain.backend.onednn import constants as c
from hpctrain.backend.operators import Array
from hpctrain.core.errors import BackendError

ENVIRONMENT_VARIABLE = "HPCTRAIN_ONEDNN_LIBRARY"
OLDEST_MAJOR = 3
_FILE_NAME = f"libdnnl.so.{OLDEST_MAJOR}"


class Version(ctypes.Structure):
    """C structure dnnl_version_t."""

    _fields_ = (
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("hash", ctypes.c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    )


def candidates() -> list[str]:
    """Return the paths to try, in order: the environment's alone if it is set, otherwise this Python's prefixes and a bare name.

    The dynamic loader looks up the bare name. `ctypes.util.find_library` is not used, because it would start ldconfig, gcc and ld
    at each search, even in ranks whose MPI has started.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return [named]
    in_prefixes = dict.fromkeys(str(Path(prefix) / "lib" / _FILE_NAME) for prefix in (sys.prefix, sys.base_prefix))
    return [*(path for path in in_prefixes if Path(path).exists()), _FILE_NAME]


def load() -> ctypes.CDLL:
    """Load and return the library.

    Raises:
        OSError: the library is missing, has a major version other than 3, or cannot be loaded; the message states the reason for
            each path.
    """
    failures = []
    for path in candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            failures.append(str(error) if str(error).startswith(f"{path}: ") else f"{path}: {error}")
            continue
        major = version(library).major
        if major == OLDEST_MAJOR:
            return library
        failures.append(f"{path} has version {major}, not {OLDEST_MAJOR}")
    raise OSError("; ".join(failures))


def version(library: ctypes.CDLL) -> Version:
    """Return the library's version, from dnnl_version()."""
    library.dnnl_version.restype = ctypes.POINTER(Version)
    result: Version = library.dnnl_version().contents
    return result


def processor_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """Return the instruction sets of the first processor; empty if the system does not list them."""
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def available() -> str | None:
    """Return the reason why oneDNN cannot be used here, as a sentence; None if it can."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        return f"oneDNN kernels need Linux on x86-64, but this is {sys.platform} on {machine}."
    if "avx2" not in processor_flags():
        return "oneDNN kernels need a processor with AVX2, but this one does not have it."
    try:
        load()
    except OSError as error:
        return (
            f"The oneDNN library cannot be loaded ({error}); install onednn-cpu-gomp, or set {ENVIRONMENT_VARIABLE} to its path."
        )
    return None


Dims = c_int64 * c.MAX_DIMS


class ExecutionArgument(ctypes.Structure):
    """C structure dnnl_exec_arg_t."""

    _fields_ = (("arg", c_int), ("memory", c_void_p))


_PD_HEAD = [POINTER(c_void_p), c_void_p]  # the created descriptor, the engine
_MD = c_void_p
_DIMS = POINTER(c_int64)
_SIGNATURES: dict[str, list[Any]] = {
    "dnnl_engine_create": [POINTER(c_void_p), c_int, c_size_t],
    "dnnl_engine_destroy": [c_void_p],
    "dnnl_stream_create": [POINTER(c_void_p), c_void_p, c_uint],
    "dnnl_stream_destroy": [c_void_p],
    "dnnl_memory_desc_create_with_strides": [POINTER(c_void_p), c_int, _DIMS, c_int, _DIMS],
    "dnnl_memory_desc_create_submemory": [POINTER(c_void_p), c_void_p, _DIMS, _DIMS],
    "dnnl_memory_desc_create_with_tag": [POINTER(c_void_p), c_int, _DIMS, c_int, c_int],
    "dnnl_memory_desc_clone": [POINTER(c_void_p), c_void_p],
    "dnnl_memory_desc_destroy": [c_void_p],
    "dnnl_memory_desc_query": [c_void_p, c_int, c_void_p],
    "dnnl_memory_create": [POINTER(c_void_p), c_void_p, c_void_p, c_void_p],
    "dnnl_memory_destroy": [c_void_p],
    "dnnl_memory_set_data_handle": [c_void_p, c_void_p],
    "dnnl_primitive_attr_create": [POINTER(c_void_p)],
    "dnnl_primitive_attr_destroy": [c_void_p],
    "dnnl_primitive_attr_set_scratchpad_mode": [c_void_p, c_int],
    "dnnl_primitive_attr_set_post_ops": [c_void_p, c_void_p],
    "dnnl_post_ops_create": [POINTER(c_void_p)],
    "dnnl_post_ops_destroy": [c_void_p],
    "dnnl_post_ops_append_sum": [c_void_p, c_float, ctypes.c_int32, c_int],
    "dnnl_post_ops_append_eltwise": [c_void_p, c_int, c_float, c_float],
    "dnnl_post_ops_append_binary": [c_void_p, c_int, c_void_p],
    "dnnl_sgemm": [
        c_char, c_char, c_int64, c_int64, c_int64, c_float, c_void_p, c_int64, c_void_p, c_int64, c_float, c_void_p, c_int64
    ],
    "dnnl_primitive_desc_destroy": [c_void_p],
    "dnnl_primitive_desc_query": [c_void_p, c_int, c_int, c_void_p],
    "dnnl_primitive_desc_next_impl": [c_void_p],
    "dnnl_primitive_create": [POINTER(c_void_p), c_void_p],
    "dnnl_primitive_destroy": [c_void_p],
    "dnnl_primitive_execute": [c_void_p, c_void_p, c_int, POINTER(ExecutionArgument)],
    "dnnl_reorder_primitive_desc_create": [POINTER(c_void_p), _MD, c_void_p, _MD, c_void_p, c_void_p],
    "dnnl_sum_primitive_desc_create": [*_PD_HEAD, _MD, c_int, POINTER(c_float), POINTER(c_void_p), c_void_p],
    "dnnl_binary_primitive_desc_create": [*_PD_HEAD, c_int, _MD, _MD, _MD, c_void_p],
    "dnnl_matmul_primitive_desc_create": [*_PD_HEAD, _MD, _MD, _MD, _MD, c_void_p],
    "dnnl_reduction_primitive_desc_create": [*_PD_HEAD, c_int, _MD, _MD, c_float, c_float, c_void_p],
    "dnnl_eltwise_forward_primitive_desc_create": [*_PD_HEAD, c_int, c_int, _MD, _MD, c_float, c_float, c_void_p],
    "dnnl_eltwise_backward_primitive_desc_create": [*_PD_HEAD, c_int, _MD, _MD, _MD, c_float, c_float, c_void_p, c_void_p],
    "dnnl_pooling_forward_primitive_desc_create": [*_PD_HEAD, c_int, c_int, _MD, _MD, *[_DIMS] * 5, c_void_p],
    "dnnl_pooling_backward_primitive_desc_create": [*_PD_HEAD, c_int, _MD, _MD, *[_DIMS] * 5, c_void_p, c_void_p],
    "dnnl_batch_normalization_forward_primitive_desc_create": [*_PD_HEAD, c_int, _MD, _MD, c_float, c_uint, c_void_p],
    "dnnl_batch_normalization_backward_primitive_desc_create": [
        *_PD_HEAD, c_int, _MD, _MD, _MD, c_float, c_uint, c_void_p, c_void_p
    ],
    "dnnl_convolution_forward_primitive_desc_create": [*_PD_HEAD, c_int, c_int, *[_MD] * 4, *[_DIMS] * 4, c_void_p],
    "dnnl_convolution_backward_data_primitive_desc_create": [*_PD_HEAD, c_int, *[_MD] * 3, *[_DIMS] * 4, c_void_p, c_void_p],
    "dnnl_convolution_backward_weights_primitive_desc_create": [*_PD_HEAD, c_int, *[_MD] * 4, *[_DIMS] * 4, c_void_p, c_void_p],
    "dnnl_inner_product_forward_primitive_desc_create": [*_PD_HEAD, c_int, *[_MD] * 4, c_void_p],
    "dnnl_inner_product_backward_data_primitive_desc_create": [*_PD_HEAD, *[_MD] * 3, c_void_p, c_void_p],
    "dnnl_inner_product_backward_weights_primitive_desc_create": [*_PD_HEAD, *[_MD] * 4, c_void_p, c_void_p],
}  # fmt: skip


def dims(values: Sequence[int]) -> Any:
    """Return numbers as a dnnl_dims_t."""
    return Dims(*values)


class Unimplemented(BackendError):
    """Error for arguments for which oneDNN has no kernel (dnnl_unimplemented). Callers may try others."""


def check(status: int, label: str) -> None:
    """Raise an error unless oneDNN's status is success.

    Raises:
        Unimplemented: the status is dnnl_unimplemented.
        BackendError: the status is another failure; the message has oneDNN's name for it.
    """
    if status == c.SUCCESS:
        return
    name = c.STATUS_NAMES.get(status, f"status {status}")
    kind = Unimplemented if status == c.UNIMPLEMENTED else BackendError
    raise kind(f"oneDNN refused {label}: {name}.")


class Engine:
    """A CPU engine of oneDNN with one in-order stream. Each object created from it keeps it alive."""

    def __init__(self) -> None:
        try:
            self.library = load()
        except OSError as error:
            raise BackendError(f"The oneDNN library cannot be loaded ({error}); install onednn-cpu-gomp.") from error
        number = version(self.library)
        self.version = f"{number.major}.{number.minor}.{number.patch}"
        for name, signature in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = signature, c_int
        self.library.dnnl_memory_desc_get_size.argtypes = [c_void_p]
        self.library.dnnl_memory_desc_get_size.restype = c_size_t
        self.library.dnnl_get_effective_cpu_isa.argtypes = []
        self.library.dnnl_memory_desc_equal.argtypes = [c_void_p, c_void_p]
        self.library.dnnl_primitive_desc_query_md.argtypes = [c_void_p, c_int, c_int]
        self.library.dnnl_primitive_desc_query_md.restype = c_void_p
        self.handle = self.create("dnnl_engine_create", "an engine", c.CPU, 0)
        self.stream = self.create("dnnl_stream_create", "a stream", self.handle, c.STREAM_IN_ORDER)
        weakref.finalize(self, _destroy_engine, self.library, self.stream, self.handle).atexit = False

    @property
    def block(self) -> int:
        """Channels per block of the layouts that this processor's kernels prefer: 16 with AVX-512, otherwise 8."""
        return 16 if self.library.dnnl_get_effective_cpu_isa() & c.ISA_AVX512_CORE == c.ISA_AVX512_CORE else 8

    def create(self, function: str, label: str, *arguments: Any) -> c_void_p:
        """Call a C function that creates an object, and return the handle that it writes to its first argument."""
        handle = c_void_p()
        check(getattr(self.library, function)(byref(handle), *arguments), label)
        return handle

    def free_with(self, holder: object, function: str, handle: c_void_p) -> None:
        """Free `handle` by `function` when `holder` is garbage-collected. The engine outlives the holder."""
        weakref.finalize(holder, _destroy, self, getattr(self.library, function), handle).atexit = False

    def call(self, function: str, label: str, *arguments: Any) -> None:
        """Call a C function and check its status."""
        check(getattr(self.library, function)(*arguments), label)

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        """Write the product of float32 matrices a (m, k) and b (k, n) to `out` (m, n), in the library's threads.

        Each matrix may have a leading dim of 1. In `a` and `b` the elements of a row or of a column must be contiguous, in `out`
        the elements of a row. With a fixed number of threads the result is bitwise reproducible.

        Raises:
            BackendError: oneDNN refuses the sizes.
        """
        (m, n), k = out.shape[-2:], a.shape[-1]
        (turn_a, lead_a), (turn_b, lead_b), (_, lead_out) = map(_leading, (a, b, out))
        sizes = (m, n, k, 1.0, a.ctypes.data, lead_a, b.ctypes.data, lead_b, 0.0, out.ctypes.data, lead_out)
        self.call("dnnl_sgemm", f"a product of ({m}, {k}) and ({k}, {n})", turn_a, turn_b, *sizes)


def _leading(matrix: Array) -> tuple[bytes, int]:
    """Return dnnl_sgemm's transposition flag (`b"T"` or `b"N"`) and leading dimension of a matrix."""
    (rows, columns), (row, column) = matrix.shape[-2:], (stride // matrix.itemsize for stride in matrix.strides[-2:])
    if column == 1 or columns == 1:
        return b"N", max(row, columns)
    assert row == 1 or rows == 1, f"neither rows nor columns of {matrix.shape} with strides {matrix.strides} are contiguous"
    return b"T", max(column, rows)


def _destroy(engine: Engine, function: Callable[[c_void_p], int], handle: c_void_p) -> None:
    function(handle)


def _destroy_engine(library: ctypes.CDLL, stream: c_void_p, engine: c_void_p) -> None:
    library.dnnl_stream_destroy(stream)
    library.dnnl_engine_destroy(engine)


class Descriptor:
    """A dnnl_memory_desc_t: logical dims in oneDNN's order, (N, C, H, W) or (K, C, R, S), data type and memory format."""

    def __init__(self, engine: Engine, handle: c_void_p) -> None:
        self.engine, self.handle = engine, handle
        engine.free_with(self, "dnnl_memory_desc_destroy", handle)
        self._extent_bytes: int | None = None

    @classmethod
    def tagged(cls, engine: Engine, shape: Sequence[int], tag: str, dtype: str = "float32") -> Descriptor:
        """Return a descriptor of `shape` in the format named `tag`; "any" leaves the choice to the primitive."""
        label = f"a descriptor of {tuple(shape)} as {tag}"
        create = "dnnl_memory_desc_create_with_tag"
        return cls(engine, engine.create(create, label, len(shape), dims(shape), c.DATA_TYPE[dtype], c.FORMAT_TAG[tag]))

    @classmethod
    def strided(cls, engine: Engine, shape: Sequence[int], strides: Sequence[int]) -> Descriptor:
        """Return a descriptor of float32 memory of `shape` with strides in elements."""
        label = f"a descriptor of {tuple(shape)} with strides {tuple(strides)}"
        create = "dnnl_memory_desc_create_with_strides"
        made = cls(engine, engine.create(create, label, len(shape), dims(shape), c.DATA_TYPE["float32"], dims(strides)))
        made._extent_bytes = 4 * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
        return made

    def part(self, shape: Sequence[int], begin: Sequence[int] | None = None) -> Descriptor:
        """Return the descriptor of a part of this memory: `shape` elements along each dim, from `begin` (default: the first)."""
        label, begin = f"a part {tuple(shape)} of a descriptor", [0] * len(shape) if begin is None else begin
        create = "dnnl_memory_desc_create_submemory"
        return Descriptor(self.engine, self.engine.create(create, label, self.handle, dims(shape), dims(begin)))

    @property
    def size_bytes(self) -> int:
        """Size in bytes of memory in this format, padding included."""
        return int(self.engine.library.dnnl_memory_desc_get_size(self.handle))

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first to the last element; oneDNN's size also counts the gaps after the last element."""
        return self.size_bytes if self._extent_bytes is None else self._extent_bytes

    def equals(self, other: Descriptor) -> bool:
        """Return whether both have the same dims, type and format."""
        return bool(self.engine.library.dnnl_memory_desc_equal(self.handle, other.handle))


class Attributes:
    """A dnnl_primitive_attr_t with the user's scratchpad and optional post-operations, which are applied in the order below.

    Args:
        then: further operations on the result, each as oneDNN's kind and the descriptor of its second operand; None: the
            operation has one operand.
        kept: factor with which the previous destination is added to the result; 0: the destination is overwritten.
        relu: whether a ReLU is applied to the result.
    """

    def __init__(
        self, engine: Engine, *, then: Sequence[tuple[int, Descriptor | None]] = (), kept: float = 0.0, relu: bool = False
    ) -> None:
        self.handle = engine.create("dnnl_primitive_attr_create", "attributes")
        engine.free_with(self, "dnnl_primitive_attr_destroy", self.handle)
        engine.call("dnnl_primitive_attr_set_scratchpad_mode", "user scratchpads", self.handle, c.SCRATCHPAD_MODE_USER)
        if not (then or kept or relu):
            return
        post = engine.create("dnnl_post_ops_create", "post-operations")
        try:
            for kind, operand in then:
                if operand is None:
                    engine.call("dnnl_post_ops_append_eltwise", "an element-wise post-operation", post, kind, 0.0, 0.0)
                else:
                    engine.call("dnnl_post_ops_append_binary", "a binary post-operation", post, kind, operand.handle)
            if kept:
                engine.call("dnnl_post_ops_append_sum", "a sum post-operation", post, kept, 0, 0)
            if relu:
                engine.call("dnnl_post_ops_append_eltwise", "a ReLU post-operation", post, c.ELTWISE_RELU, 0.0, 0.0)
            engine.call("dnnl_primitive_attr_set_post_ops", "post-operations", self.handle, post)
        finally:
            engine.library.dnnl_post_ops_destroy(post)


class Primitive:
    """A primitive descriptor and the primitive created from it.

    Args:
        kind: name in C without "dnnl_" and "_primitive_desc_create", for example "convolution_forward".
        label: name of the operation in errors, for example "conv2d 3->64 forward".
        arguments: arguments of the C function after the descriptor and the engine; descriptors and attributes as objects.
    """

    def __init__(self, engine: Engine, kind: str, label: str, *arguments: Any) -> None:
        self.engine, self.label = engine, label
        raw = [getattr(argument, "handle", argument) for argument in arguments]
        head = [] if kind == "reorder" else [engine.handle]
        self.handle = engine.create(f"dnnl_{kind}_primitive_desc_create", label, *head, *raw)
        engine.free_with(self, "dnnl_primitive_desc_destroy", self.handle)
        self.primitive = engine.create("dnnl_primitive_create", label, self.handle)
        engine.free_with(self, "dnnl_primitive_destroy", self.primitive)

    def descriptor(self, query: int) -> Descriptor:
        """Return a copy of the descriptor that the primitive has chosen for one of its arguments."""
        chosen = self.engine.library.dnnl_primitive_desc_query_md(self.handle, query, 0)
        handle = self.engine.create("dnnl_memory_desc_clone", f"a descriptor of {self.label}", chosen)
        return Descriptor(self.engine, handle)

    @property
    def implementation(self) -> str:
        """oneDNN's name of the chosen kernel, for reports."""
        text = c_char_p()
        self.engine.call("dnnl_primitive_desc_query", self.label, self.handle, c.QUERY_IMPL_INFO_STR, 0, byref(text))
        return (text.value or b"").decode()

    @property
    def is_plain(self) -> bool:
        """Whether the library has only plain loops ("ref") for the primitive, which are at least ten times slower."""
        return self.implementation.startswith("ref")

    @property
    def scratchpad_bytes(self) -> int:
        """Size in bytes of the scratchpad that every call needs."""
        return self.descriptor(c.QUERY_SCRATCHPAD_MD).size_bytes

    def bind(self, memories: Mapping[int, tuple[Descriptor, Array | None]], scratch: Array | None = None) -> Call:
        """Return a call on fixed memory.

        Args:
            memories: (format, array at whose start the memory begins) by number of the execution argument. An array may be None
                if `Call.set_address` is called before the first execution.
            scratch: memory for the scratchpad.
        """
        every = dict(memories)
        if self.scratchpad_bytes:
            assert scratch is not None, self.label
            every[c.ARG_SCRATCHPAD] = (self.descriptor(c.QUERY_SCRATCHPAD_MD), scratch)
        return Call(self, every)


class _Memory:
    """A dnnl_memory_t over an array's bytes, which keeps the array alive. Without one, `Call.set_address` sets the address."""

    def __init__(self, descriptor: Descriptor, array: Array | None, label: str) -> None:
        assert array is None or array.nbytes >= descriptor.extent_bytes, (
            f"{label}: {array.nbytes} bytes are too small, {descriptor.extent_bytes} are needed"
        )
        engine = descriptor.engine
        self.array = array
        address = c_void_p(None if array is None else array.ctypes.data)
        self.handle = engine.create("dnnl_memory_create", f"memory of {label}", descriptor.handle, engine.handle, address)
        engine.free_with(self, "dnnl_memory_destroy", self.handle)


class Call:
    """One execution of a primitive with prepared arguments. A call returns when the execution is complete."""

    __slots__ = ("_arguments", "_count", "_execute", "_memories", "_primitive", "_raw", "_set_address", "_stream")

    def __init__(self, primitive: Primitive, memories: Mapping[int, tuple[Descriptor, Array | None]]) -> None:
        engine = primitive.engine
        self._primitive = primitive
        self._memories = [_Memory(*memory, primitive.label) for memory in memories.values()]
        self._count = len(memories)
        self._arguments = (ExecutionArgument * self._count)()
        for argument, kind, memory in zip(self._arguments, memories, self._memories, strict=True):
            argument.arg, argument.memory = kind, memory.handle
        self._execute, self._set_address = engine.library.dnnl_primitive_execute, engine.library.dnnl_memory_set_data_handle
        self._raw, self._stream = primitive.primitive, engine.stream

    def set_address(self, argument: int, address: int) -> None:
        """Set the address of an argument's memory for the following executions. The caller keeps the memory alive.

        Args:
            argument: index of the argument in the order of `memories`.
        """
        self._set_address(self._memories[argument].handle, address)

    def __call__(self) -> None:
        """Execute the primitive, and return when it is complete.

        Raises:
            BackendError: oneDNN refuses the arguments.
        """
        status = self._execute(self._raw, self._stream, self._count, self._arguments)
        if status:
            check(status, f"to run {self._primitive.label}")
