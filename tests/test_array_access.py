"""Arrays that kernels compute on are touched by kernel sets and transports alone: all others ask the arithmetic service.

They may lie on a GPU. What such code does with them by NumPy works on a CPU, so it is looked for in the sources; a training
whose arrays NumPy does not find is in tests/training/test_devices.py.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
#: these know where their arrays lie: kernels, transports, data on the host, ranks of a grid (refused elsewhere), checks for users
FREE = ("backend", "comm", "data", "parallel", "testing")
#: messages of the host's arrays
FREE_MODULES = ("averaging/sixteen_bits.py", "averaging/top_k.py")
#: attributes that hold such arrays
ARRAYS = {"d_logits", "data", "grad", "input_grads", "logits", "output", "output_grad", "shadow", "x", "x_grad"}
#: functions that write to arrays that they are given, in addition to those with `out`
WRITES = {"copyto", "place", "put", "put_along_axis", "putmask"}
EXCEPTIONS = {
    "hpctrain/bench/data.py: out= of np.take",  # images on the host
    "hpctrain/nn/parameter.py: out= of np.multiply",  # of what was fetched
    "hpctrain/planner/measure/calibration.py: np.copyto of target",  # measures the host
    # on the host
    *(f"hpctrain/training/state_hashes.py: out= of np.{name}" for name in ("add", "bitwise_xor", "multiply", "right_shift")),
    "hpctrain/planner/measure/program_timing.py: out= of np.multiply",  # batch statistics, which were fetched to be merged
}


def _is_array(node: ast.AST, names: set[str]) -> bool:
    """An expression that is one of the arrays, or a view of one."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if node.attr == "batch":  # of most things a number
            return owner.endswith("statistics")
        return node.attr in ARRAYS and owner not in ("batch", "hpctrain")
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Subscript):
        return _is_array(node.value, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in {"reshape", "view", "copy", "astype"} and _is_array(node.func.value, names)
    return False


def _named(function: ast.AST) -> set[str]:
    """Local names of such arrays, by a function's assignments in their order."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                names |= {place.id for place, value in pairs if isinstance(place, ast.Name) and _is_array(value, names)}
    return names


def _numpy(node: ast.expr) -> str | None:
    """The name of a function of NumPy."""
    is_numpy = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np"
    return node.attr if is_numpy else None


def _faults(tree: ast.AST) -> Iterator[str]:
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        names = _named(function)
        for node in ast.walk(function):
            yield from _faults_of(node, names)


def _faults_of(node: ast.AST, names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Call) and (called := _numpy(node.func)) is not None:
        yield from (f"out= of np.{called}" for keyword in node.keywords if keyword.arg == "out")
        if called in WRITES or any(_is_array(argument, names) for argument in node.args):
            yield f"np.{called} of {ast.unparse(node.args[0])}"
    elif isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            is_view = isinstance(node, ast.AugAssign) or isinstance(target, ast.Subscript)
            if is_view and _is_array(target, names):
                yield f"elements of {ast.unparse(target.value if isinstance(target, ast.Subscript) else target)}"
    elif isinstance(node, ast.BinOp) and (_is_array(node.left, names) or _is_array(node.right, names)):
        yield f"arithmetic {ast.unparse(node)}"


def _modules() -> Iterator[Path]:
    package = TOP / "hpctrain"
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if inside.parts[0] not in FREE and inside.as_posix() not in FREE_MODULES:
            yield path


def test_elements_are_touched_by_those_alone_who_know_where_they_lie() -> None:
    faults = {f"{path.relative_to(TOP)}: {fault}" for path in _modules() for fault in _faults(ast.parse(path.read_text()))}
    assert faults <= EXCEPTIONS, f"ask the arithmetic service instead: {sorted(faults - EXCEPTIONS)}"
    assert faults >= EXCEPTIONS, f"take out of the list of exceptions what is none now: {sorted(EXCEPTIONS - faults)}"


@pytest.mark.parametrize(
    "line",
    [
        "np.add(total, group.grad, out=total)",
        "np.multiply(a, 2.0, out=b)",
        "np.copyto(target, source)",
        "np.zeros_like(group.grad)",
        "np.isfinite(parameter.data).all()",
        "parameter.data[...] = value",
        "self._group.grad[begin:end] = sums",
        "program.x[...] = images",
        "parameter.grad += partial",
        "program.logits[0, 0] += 1.0",
        "norm = parameter.grad.reshape(-1) * 2",
        "ratio = lr * group.data[start:stop]",
        "flat = parameter.grad.reshape(-1); flat += partial",
        "w, g = group.data[a:b], group.grad[a:b]; w[...] = 0",
        "sums = count * network.statistics.batch",
        "gradient = self.group.grad[a:b]; half = gradient[1:]; half *= 0.5",
    ],
)
def test_what_touches_elements_is_seen(line: str) -> None:
    assert list(_faults(ast.parse(f"def f():\n{textwrap.indent(line, '    ')}")))
