"""Plans of cuDNN for convolutions: which engine computes a graph, how, and in how much workspace.

Plans are made for a device of this machine, by its cuDNN handle, or for any other device, by its properties. The latter are the
same plans, but cannot be run. Every plan is deterministic. CuPy is not needed: streams, memory and handles are integers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpctrain.backend.cuda import cudnn_graphs
from hpctrain.backend.cuda.cudnn_graphs import BIAS, FIRST, OUT, SECOND, Graph, Library
from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.core.errors import BackendError

#: largest workspace of a plan; without a limit some take gigabytes: 6 GB for float32 and 256 images of 224 x 224 x 64
WORKSPACE_LIMIT_BYTES = 512 << 20


class CudnnQueue:
    """A handle of cuDNN, and the stream that it uses.

    Args:
        handle: None if there is no device; then nothing can run.
    """

    def __init__(self, cudnn: Library, handle: int | None) -> None:
        self._cudnn, self._handle, self._stream = cudnn, handle, -1

    def on(self, stream: int) -> int:
        """Return the handle, which enqueues its work on this stream from now on."""
        assert self._handle is not None, "plans for a device that is not here cannot be run"
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        return self._handle


class ConvolutionPlan:
    """The plan of one convolution.

    Attributes:
        name: its engine and knobs. workspace_bytes: the memory that it works in.
    """

    def __init__(self, key: ConvolutionKey, graph: Graph, index: int, queue: CudnnQueue) -> None:
        self.key = key
        self.name = str(graph.get_plan_name_at_index(index))
        self.workspace_bytes = int(graph.get_workspace_size_plan_at_index(index))
        self._graph, self._index, self._queue = graph, index, queue

    def run(self, stream: int, first: int, second: int, out: int, workspace: int, bias: int = 0) -> None:
        """Enqueue the convolution on a CUDA stream. Arguments are addresses; `workspace` and `bias` may be 0."""
        pointers = {FIRST: first, SECOND: second, OUT: out}
        if self.key.fused:
            pointers[BIAS] = bias
        self._graph._execute_plan_at_index(pointers, workspace, self._index, self._queue.on(stream))


class CudnnPlans:
    """Makes and keeps one plan for each key: the first of the heuristic's list that can be built.

    Plans are not timed. Steps of ResNet-50 on an H100 took as long with the fastest of the first three, and timing these took 10
    to 20 s at each start (docs/performance.md).

    Args:
        handle: of cuDNN, from `new_handle`. capability: (major, minor) compute capability of its device.
        properties: of a device, the object in the JSON of `cudnn.create_device_properties(number).serialize()`. Plans for it are
            made, but cannot be run. Pass either properties, or a handle with its capability.
        workspace_limit_bytes: of a plan.
    """

    def __init__(
        self,
        handle: int | None = None,
        properties: Mapping[str, Any] | None = None,
        *,
        capability: tuple[int, int] | None = None,
        workspace_limit_bytes: int = WORKSPACE_LIMIT_BYTES,
    ) -> None:
        assert (handle is None) == (capability is None) != (properties is None), "pass a handle and its capability, or properties"
        self._cudnn = cudnn_graphs.library()
        self._queue = CudnnQueue(self._cudnn, handle)
        self._device = _device_arguments(self._cudnn, handle, capability, properties)
        self._limit = workspace_limit_bytes
        self._plans: dict[ConvolutionKey, ConvolutionPlan] = {}

    def plan(self, key: ConvolutionKey) -> ConvolutionPlan:
        """Return the plan for a key, made at the first request.

        Raises:
            BackendError: cuDNN has no plan for it.
        """
        if key not in self._plans:
            self._plans[key] = self._make(key)
        return self._plans[key]

    def _make(self, key: ConvolutionKey) -> ConvolutionPlan:
        unsupported = self._cudnn.cudnnGraphNotSupportedError
        try:
            graph = cudnn_graphs.build(self._cudnn, key, **self._device)
            self._list_plans(graph, key)
        except unsupported as error:
            raise self._no_plan(key, str(error)) from error
        for index in range(graph.get_execution_plan_count()):
            try:
                graph.build_plan_at_index(index)
            except unsupported:  # left out, or not for this device
                continue
            return ConvolutionPlan(key, graph, index, self._queue)
        raise self._no_plan(key, "every plan of its list is left out")

    def _list_plans(self, graph: Graph, key: ConvolutionKey) -> None:
        """Have the heuristic list plans. Leave out those that are not deterministic, less precise than the key, or too large."""
        cudnn, note = self._cudnn, self._cudnn.numerical_note
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        left_out = [note.NONDETERMINISTIC, note.WINOGRAD_TILE_4x4, note.WINOGRAD_TILE_6x6, note.WINOGRAD_TILE_13x13]
        graph.deselect_numeric_notes(left_out + ([note.TENSOR_CORE] if key.precision == "float32" else []))
        graph.deselect_workspace_greater_than(self._limit)
        graph.check_support()

    def _no_plan(self, key: ConvolutionKey, reason: str) -> BackendError:
        version = self._cudnn.backend_version_string()
        first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        return BackendError(
            f"cuDNN {version} has no deterministic plan for {cudnn_graphs.describe(key)} in a workspace of at most "
            f"{self._limit >> 20} MiB ({first}); a smaller batch, or another precision, may have one."
        )


def new_handle() -> int:
    """Return a new handle of cuDNN on the current CUDA device.

    Raises:
        MissingLibraryError: cuDNN or its frontend is not installed.
    """
    return int(cudnn_graphs.library().create_handle())


def _device_arguments(
    cudnn: Library, handle: int | None, capability: tuple[int, int] | None, properties: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of `cudnn.pygraph` that describe a device.

    Without `sm_version` the frontend would ask libcudart, which nothing else here loads.
    """
    if properties is not None:
        device = cudnn.create_device_properties(json.dumps(dict(properties)))
        return {"device_property": device, "sm_version": properties["deviceVer"] // 10}
    assert capability is not None
    return {"handle": handle, "sm_version": 10 * capability[0] + capability[1]}
