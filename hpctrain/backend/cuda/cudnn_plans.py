"""Plans of cuDNN for convolutions: which engine computes a graph, how, and in how much workspace.

Plans are made for a device that is here (by its cuDNN handle), or for one that is not (by its properties): then they are all the
same, but cannot be run. Every plan is deterministic. CuPy is not needed: streams, memory and handles are integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.backend.cuda import cudnn_graphs
from hpctrain.backend.cuda.cudnn_graphs import BIAS, FIRST, OUT, SECOND, Graph, Library
from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.backend.dtypes import item_bytes
from hpctrain.errors import BackendError

#: no plan works in more; without a limit some take gigabytes, such as 6 for float32 and 256 images of 224 x 224 x 64
WORKSPACE_LIMIT_BYTES = 512 << 20
#: plans that are timed, where plans are timed: the first ones of the heuristic's list
TIMED_PLANS = 3

#: seconds of `run(stream, *addresses)` on memory of so many bytes each (none: address 0), on a stream of the caller's choice
Measure = Callable[[Sequence[int], Callable[..., None]], float]


class CudnnQueue:
    """A handle of cuDNN, and the stream that it is told to use.

    Args:
        handle: None where there is no device, and nothing can run.
    """

    def __init__(self, cudnn: Library, handle: int | None) -> None:
        self._cudnn, self._handle, self._stream = cudnn, handle, -1

    def on(self, stream: int) -> int:
        """The handle, whose work is enqueued on this stream from here on."""
        assert self._handle is not None, "plans for a device that is not here cannot be run"
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        return self._handle


@dataclass(frozen=True)
class BuiltPlan:
    """One plan of a graph. index: its place in cuDNN's list. name: its engine and knobs."""

    index: int
    name: str
    workspace_bytes: int


class ConvolutionPlan:
    """The plan of one convolution: one of a few, that work in the same memory.

    Attributes:
        names: of the candidates, best first by cuDNN's heuristic: engine and knobs. workspace_bytes: the most that one needs.
        timed: the choice was made by times, here or elsewhere. seconds: by name, of the candidates that were timed here.
    """

    def __init__(self, key: ConvolutionKey, graph: Graph, candidates: Sequence[BuiltPlan], queue: CudnnQueue) -> None:
        self.key, self.names = key, tuple(candidate.name for candidate in candidates)
        self.workspace_bytes = max(candidate.workspace_bytes for candidate in candidates)
        self.timed = False
        self.seconds: dict[str, float] = {}
        self._graph, self._queue, self._candidates = graph, queue, candidates
        self._chosen = candidates[0]

    @property
    def name(self) -> str:
        """Engine and knobs of the chosen candidate."""
        return self._chosen.name

    def choose(self, name: str) -> None:
        """Run the candidate of this name from here on.

        Raises:
            BackendError: there is none.
        """
        if name not in self.names:
            raise BackendError(
                f"The plan {name} for {cudnn_graphs.describe(self.key)} is none of this device's ({', '.join(self.names)}); "
                "all ranks of a job need the same kind of GPU and the same version of cuDNN."
            )
        self._chosen, self.timed = self._candidates[self.names.index(name)], True

    def run(self, stream: int, first: int, second: int, out: int, workspace: int, bias: int = 0) -> None:
        """Enqueue it on a CUDA stream; arguments are addresses, `workspace` and `bias` 0 where there are none."""
        pointers = {FIRST: first, SECOND: second, OUT: out}
        if self.key.fused:
            pointers[BIAS] = bias
        self._graph._execute_plan_at_index(pointers, workspace, self._chosen.index, self._queue.on(stream))

    def time(self, measure: Measure) -> None:
        """Choose the fastest candidate, the earliest of equal ones."""
        if len(self.names) > 1:
            for name in self.names:
                self.choose(name)
                self.seconds[name] = measure(self._sizes(), self.run)
            self.choose(min(self.names, key=lambda name: self.seconds[name]))
        self.timed = True

    def _sizes(self) -> list[int]:
        """Bytes of the arguments of `run`."""
        key = self.key
        item = item_bytes(key.dtype)
        shapes = {"forward": (key.x, key.w, key.y), "input": (key.y, key.w, key.x), "weight": (key.x, key.y, key.w)}[key.kind]
        sizes = [item * n * h * w * c for n, h, w, c in shapes]
        return [*sizes, self.workspace_bytes, item * key.y[3] if key.fused else 0]


class CudnnPlans:
    """Makes plans and keeps them by key.

    Args:
        handle: of cuDNN, from `new_handle`. capability: the compute capability of its device.
        properties: a device's, in JSON, as `cudnn.create_device_properties(number).serialize()` gives them: plans for it are
            made and not run. One of both is given.
        candidates: plans that are built for each convolution, for `time` to choose from: 1 where nothing is timed. Plans that
            cuDNN compiles at run time take seconds each.
        workspace_limit_bytes: of a plan.
    """

    def __init__(
        self,
        handle: int | None = None,
        properties: Mapping[str, Any] | None = None,
        *,
        capability: tuple[int, int] | None = None,
        candidates: int = 1,
        workspace_limit_bytes: int = WORKSPACE_LIMIT_BYTES,
    ) -> None:
        assert (handle is None) == (capability is None) != (properties is None), "a handle with its capability, or properties"
        self._cudnn = cudnn_graphs.library()
        self._queue, self._place = CudnnQueue(self._cudnn, handle), _place(self._cudnn, handle, capability, properties)
        self._candidates, self._limit = candidates, workspace_limit_bytes
        self._plans: dict[ConvolutionKey, ConvolutionPlan] = {}
        self._wanted: dict[str, str] = {}

    def plan(self, key: ConvolutionKey) -> ConvolutionPlan:
        """The plan for a key, made at the first request.

        Raises:
            BackendError: cuDNN has none, or has not the one that was chosen elsewhere.
        """
        if key not in self._plans:
            self._plans[key] = self._make(key)
        return self._plans[key]

    def time(self, measure: Measure) -> None:
        """Choose the fastest candidate of every plan that has not been chosen by time yet. Their workspaces stay as they are."""
        for plan in self._plans.values():
            if not plan.timed:
                plan.time(measure)

    def choices(self) -> dict[str, str]:
        """The name of each plan that was chosen by time, by a description of its convolution: text, to be stored or sent."""
        chosen = {cudnn_graphs.describe(key): plan.name for key, plan in self._plans.items() if plan.timed}
        return {**self._wanted, **chosen}

    def seconds(self) -> dict[str, dict[str, float]]:
        """Times of the candidates that were timed here, best first by the heuristic, by a description of the convolution."""
        return {cudnn_graphs.describe(key): dict(plan.seconds) for key, plan in self._plans.items() if plan.seconds}

    def take_choices(self, choices: Mapping[str, str]) -> None:
        """Use these plans, for convolutions that are planned already and for those to come; any for those not among them.

        Raises:
            BackendError: this device has no such plan.
        """
        self._wanted.update(choices)
        for key, plan in self._plans.items():
            wanted = self._wanted.get(cudnn_graphs.describe(key))
            if wanted is not None:
                plan.choose(wanted)

    def _make(self, key: ConvolutionKey) -> ConvolutionPlan:
        wanted = self._wanted.get(cudnn_graphs.describe(key))
        try:
            graph = cudnn_graphs.build(self._cudnn, key, **self._place)
            self._list_plans(graph, key)
        except self._cudnn.cudnnGraphNotSupportedError as error:
            raise self._none(key, str(error)) from error
        candidates = self._build(graph, wanted)
        if not candidates:
            raise self._none(key, "every plan of its list is left out" if wanted is None else f"{wanted} is not in its list")
        plan = ConvolutionPlan(key, graph, candidates, self._queue)
        if wanted is not None:
            plan.choose(wanted)
        return plan

    def _list_plans(self, graph: Graph, key: ConvolutionKey) -> None:
        """Have the heuristic list plans, and leave out those whose results differ from run to run, or from what is asked for."""
        cudnn, note = self._cudnn, self._cudnn.numerical_note
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        left_out = [note.NONDETERMINISTIC, note.WINOGRAD_TILE_4x4, note.WINOGRAD_TILE_6x6, note.WINOGRAD_TILE_13x13]
        graph.deselect_numeric_notes(left_out + ([note.TENSOR_CORE] if key.precision == "float32" else []))
        graph.deselect_workspace_greater_than(self._limit)
        graph.check_support()

    def _build(self, graph: Graph, wanted: str | None) -> list[BuiltPlan]:
        """The first plans that can be built; of the one wanted, where one is."""
        built: dict[str, BuiltPlan] = {}
        for index in range(graph.get_execution_plan_count()):
            name = graph.get_plan_name_at_index(index)
            if name in built or (wanted is not None and name != wanted):
                continue
            try:
                graph.build_plan_at_index(index)
            except self._cudnn.cudnnGraphNotSupportedError:  # left out, or not for this device
                continue
            built[name] = BuiltPlan(index, name, graph.get_workspace_size_plan_at_index(index))
            if len(built) == (self._candidates if wanted is None else 1):
                break
        return list(built.values())

    def _none(self, key: ConvolutionKey, reason: str) -> BackendError:
        version = self._cudnn.backend_version_string()
        first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        return BackendError(
            f"cuDNN {version} has no deterministic plan for {cudnn_graphs.describe(key)} in a workspace of at most "
            f"{self._limit >> 20} MiB ({first}); a smaller batch, or another precision, may have one."
        )


def new_handle() -> int:
    """A handle of cuDNN on the current CUDA device.

    Raises:
        MissingLibraryError: cuDNN or its frontend is not installed.
    """
    return int(cudnn_graphs.library().create_handle())


def _place(
    cudnn: Library, handle: int | None, capability: tuple[int, int] | None, properties: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what `cudnn.pygraph` needs of a device. Without `sm_version` it asks libcudart, which nothing else here loads."""
    if properties is not None:
        device = cudnn.create_device_properties(json.dumps(dict(properties)))
        return {"device_property": device, "sm_version": properties["deviceVer"] // 10}
    assert capability is not None
    return {"handle": handle, "sm_version": 10 * capability[0] + capability[1]}
