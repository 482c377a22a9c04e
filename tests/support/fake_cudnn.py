"""A stand-in for the package cudnn: graphs that record their calls, with a list of plans that a test makes up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

DataType = Enum("DataType", ["FLOAT", "BFLOAT16"])
Heuristic = Enum("Heuristic", ["A", "B", "FALLBACK"])
Note = Enum(
    "Note", ["TENSOR_CORE", "NONDETERMINISTIC", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13"]
)


class NotSupportedError(Exception):
    """The error of cuDNN for graphs and plans that it does not have."""


@dataclass(frozen=True)
class FakePlan:
    """An entry of a heuristic's list. works: it can be built on this device."""

    name: str
    workspace_bytes: int = 0
    notes: frozenset[Note] = frozenset()
    works: bool = True


@dataclass
class FakeTensor:
    """Keeps what is set; setters give the tensor back."""

    settings: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value: Any) -> FakeTensor:
            self.settings[name.removeprefix("set_")] = value
            return self

        return setter


class FakeGraph:
    """One graph. Enforces the order of calls that the frontend wants."""

    def __init__(self, module: FakeCudnn, arguments: dict[str, Any]) -> None:
        self._module, self.arguments = module, arguments
        self.calls: list[str] = []
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self.tensors: list[FakeTensor] = []
        self.heuristics: list[Heuristic] = []
        self.left_out: set[Note] = set()
        self.limit_bytes: int | None = None
        self.built: list[int] = []

    def tensor(self, **settings: Any) -> FakeTensor:
        self.tensors.append(FakeTensor(settings))
        return self.tensors[-1]

    def _operation(self, name: str, **arguments: Any) -> FakeTensor:
        self.operations.append((name, arguments))
        return FakeTensor({})

    def conv_fprop(self, **arguments: Any) -> FakeTensor:
        return self._operation("conv_fprop", **arguments)

    def conv_dgrad(self, **arguments: Any) -> FakeTensor:
        return self._operation("conv_dgrad", **arguments)

    def conv_wgrad(self, **arguments: Any) -> FakeTensor:
        return self._operation("conv_wgrad", **arguments)

    def bias(self, **arguments: Any) -> FakeTensor:
        return self._operation("bias", **arguments)

    def relu(self, **arguments: Any) -> FakeTensor:
        out = self._operation("relu", **arguments)
        self.tensors.append(out)
        return out

    def validate(self) -> None:
        self._after()
        if self._module.refusal:
            raise NotSupportedError(self._module.refusal)
        self.calls.append("validate")

    def build_operation_graph(self) -> None:
        self._after("validate")
        self.calls.append("build_operation_graph")

    def create_execution_plans(self, heuristics: list[Heuristic]) -> None:
        self._after("validate", "build_operation_graph")
        self.calls.append("create_execution_plans")
        self.heuristics = heuristics

    def deselect_numeric_notes(self, notes: list[Note]) -> None:
        self._after("validate", "build_operation_graph", "create_execution_plans")
        self.left_out |= set(notes)

    def deselect_workspace_greater_than(self, size_bytes: int) -> None:
        self._after("validate", "build_operation_graph", "create_execution_plans")
        self.limit_bytes = size_bytes

    def check_support(self) -> None:
        self._after("validate", "build_operation_graph", "create_execution_plans")
        if "sm_version" not in self.arguments:  # which the frontend would ask CUDA's runtime for
            raise RuntimeError("Unable to load any libcudart.so.* library")
        self.calls.append("check_support")

    def get_execution_plan_count(self) -> int:
        """Of the whole list: what is left out stays in it."""
        return len(self._module.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self._module.plans[index].name

    def build_plan_at_index(self, index: int) -> None:
        self._after("validate", "build_operation_graph", "create_execution_plans", "check_support")
        plan = self._module.plans[index]
        too_large = self.limit_bytes is not None and plan.workspace_bytes > self.limit_bytes
        if not plan.works or plan.notes & self.left_out or too_large:
            raise NotSupportedError("Deselecting execution plan")
        self.built.append(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self._module.plans[index].workspace_bytes if index in self.built else 0

    def _execute_plan_at_index(self, pointers: dict[int, int], workspace: int, index: int, handle: int) -> None:
        assert index in self.built, "a plan is built before it is run"
        assert all(type(pointer) is int for pointer in (*pointers.values(), workspace, handle))
        self._module.executed.append((self._module.stream, pointers, workspace, self._module.plans[index].name))

    def _after(self, *calls: str) -> None:
        assert tuple(self.calls) == calls, f"called after {self.calls}, not after {calls}"


@dataclass
class FakeCudnn:
    """The package. plans: of every graph made from now on. refusal: why it knows no such graph. handle: the only one there is."""

    plans: list[FakePlan] = field(default_factory=lambda: [FakePlan("eng1")])
    refusal: str = ""
    graphs: list[FakeGraph] = field(default_factory=list)
    executed: list[tuple[int, dict[int, int], int, str]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    handle: int = 77

    data_type = DataType
    heur_mode = Heuristic
    numerical_note = Note
    cudnnGraphNotSupportedError = NotSupportedError

    @property
    def stream(self) -> int:
        return self.streams[-1]

    def create_handle(self) -> int:
        return self.handle

    def set_stream(self, *, handle: int, stream: int) -> None:
        assert handle == self.handle
        self.streams.append(stream)

    def create_device_properties(self, text: str) -> Any:
        return SimpleNamespace(text=text)

    def pygraph(self, **arguments: Any) -> FakeGraph:
        self.graphs.append(FakeGraph(self, arguments))
        return self.graphs[-1]

    def backend_version_string(self) -> str:
        return "9.19.0"
