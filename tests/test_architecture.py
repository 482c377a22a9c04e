"""Rules that every module of the package keeps, read from the sources. Lists of exceptions may only shrink.

The layers that imports follow are contracts of import-linter, in pyproject.toml.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
MOST_METHODS = 20
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_MODULE = 800
ONLY_IMPORTER_OF_MPI4PY = "hpctrain.comm.mpi"
IMPORTERS_OF_CUPY = ["hpctrain.backend.cuda.cupy_device"]

CLASSES_WITH_LATE_ATTRIBUTES = {
    "hpctrain.backend.numpy.pool.NumpyAdaptiveAveragePool",
    "hpctrain.backend.numpy.batch_norm.NumpyBatchNorm",
    "hpctrain.backend.numpy.conv2d.NumpyConv2d",
    "hpctrain.backend.numpy.conv2d._Flipped",
    "hpctrain.backend.numpy.conv2d._Scattered",
    "hpctrain.backend.numpy.elementwise.NumpyDropout",
    "hpctrain.backend.numpy.elementwise.Add",
    "hpctrain.backend.numpy.elementwise.Relu",
    "hpctrain.backend.numpy.pool._Pool",
    "hpctrain.backend.numpy.elementwise.NumpyStochasticDepth",
    "hpctrain.backend.onednn.batch_norm.BatchNormOperator",
    "hpctrain.backend.onednn.conv2d.Conv2dOperator",
    "hpctrain.backend.onednn.conv2d.Convolution",
    "hpctrain.backend.onednn.elementwise.AddOperator",
    "hpctrain.backend.onednn.elementwise.ReluOperator",
    "hpctrain.backend.onednn.linear.LinearOperator",
    "hpctrain.backend.onednn.pool.PoolOperator",
    "hpctrain.backend.onednn.operator.ReorderOperator",
    "hpctrain.backend.onednn.winograd._Winograd",
    "hpctrain.parallel.moves.RedistributeOperator",
    "hpctrain.parallel.moves.ReduceScatterOperator",
}

#: module and assigned attribute; the object is one of rich, which no class of the package creates
ASSIGNED_IN_OTHER_ROOMS = {"hpctrain.cli.simulation_tables: table.title"}


@cache
def modules() -> dict[str, ast.Module]:
    """The package's modules by dotted name; a package's is that of its __init__."""
    trees = {}
    for path in sorted((TOP / "hpctrain").rglob("*.py")):
        parts = path.relative_to(TOP).with_suffix("").parts
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(), str(path))
    return trees


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(dotted name, class) of every class at the top of a module."""
    for module, tree in modules().items():
        yield from ((f"{module}.{node.name}", node) for node in tree.body if isinstance(node, ast.ClassDef))


def imports(module: str, tree: ast.Module) -> set[str]:
    """The package's modules that a module imports, anywhere in it, for types alone included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            source = str(node.module)
            members = {f"{source}.{alias.name}" for alias in node.names}
            submodules = members & modules().keys()
            names |= submodules
            if submodules != members:
                names.add(source)
    return names


def check_exceptions(breaking: Iterable[str], known: set[str], rule: str) -> None:
    """Fail where something new breaks a rule, and where something known keeps it by now."""
    names = set(breaking)
    assert names <= known, f"{rule}, but this does not: {sorted(names - known)}"
    assert known <= names, f"take out of the list of exceptions what keeps the rule now: {sorted(known - names)}"


def test_no_class_has_too_many_methods() -> None:
    large = [name for name, node in classes() if sum(isinstance(item, ast.FunctionDef) for item in node.body) > MOST_METHODS]
    assert not large


def _assigned(function: ast.FunctionDef) -> set[str]:
    """Attributes of self that a method assigns."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _born(node: ast.ClassDef) -> set[str]:
    """Names that the body of a class, or its construction, defines."""
    names: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.Assign):
            names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
        elif isinstance(item, ast.FunctionDef):
            names |= _assigned(item) if item.name in ("__init__", "__post_init__") else {item.name}
    return names


def _name_of(base: ast.expr) -> str:
    """The last word of a base class's name, without its type parameters."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def late_attributes() -> dict[str, set[str]]:
    """By class: attributes that are assigned outside its construction, or its bases', for the first time."""
    by_word: dict[str, list[ast.ClassDef]] = defaultdict(list)
    for name, node in classes():
        by_word[name.rpartition(".")[2]].append(node)

    def inherited(node: ast.ClassDef) -> set[str]:
        bases = [other for base in node.bases for other in by_word[_name_of(base)] if other is not node]
        return _born(node).union(*map(inherited, bases))

    late = {}
    for name, node in classes():
        assigned = set().union(*(_assigned(item) for item in node.body if isinstance(item, ast.FunctionDef)))
        if extra := assigned - inherited(node):
            late[name] = extra
    return late


def test_no_attribute_is_born_outside_of_the_construction() -> None:
    check_exceptions(late_attributes(), CLASSES_WITH_LATE_ATTRIBUTES, "__init__ defines every attribute")


def test_no_room_assigns_attributes_of_objects_of_other_rooms() -> None:
    """An attribute belongs to the rooms whose classes define one of that name; it is free if no class of the package does."""
    owners: dict[str, set[str]] = defaultdict(set)
    for name, node in classes():
        methods = (_assigned(item) for item in node.body if isinstance(item, ast.FunctionDef))
        for attribute in _born(node).union(*methods):
            owners[attribute].add(name.split(".")[1])
    assigned = {
        f"{module}: {ast.unparse(node)}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and not isinstance(node.ctx, ast.Load)
        and ast.unparse(node.value) not in ("self", "cls")
        if owners[node.attr] and module.split(".")[1] not in owners[node.attr]
    }
    check_exceptions(assigned, ASSIGNED_IN_OTHER_ROOMS, "a room assigns attributes of its own objects only")


def test_functions_and_modules_are_short() -> None:
    long_functions, long_modules = [], []
    for path in (*(TOP / "hpctrain").rglob("*.py"), *(TOP / "benchmarks").rglob("*.py")):
        text = path.read_text()
        if text.count("\n") > MOST_LINES_OF_A_MODULE:
            long_modules.append(path.name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long_functions.append(f"{path.name}:{node.name}")
    assert not long_functions
    assert not long_modules


def importers(package: str) -> list[str]:
    """The modules that import a package from outside, or parts of it."""
    return [module for module, tree in modules().items() if any(name.split(".")[0] == package for name in imports(module, tree))]


def test_one_module_imports_mpi4py() -> None:
    assert importers("mpi4py") == [ONLY_IMPORTER_OF_MPI4PY]


def test_one_module_imports_cupy() -> None:
    assert importers("cupy") == IMPORTERS_OF_CUPY
    assert importers("cupy_backends") == IMPORTERS_OF_CUPY[:1]


@pytest.mark.parametrize(
    ("folder", "apart"),
    [
        ("benchmarks", {"tests"}),
        ("hpctrain_testing", {"tests", "benchmarks"}),
        ("tests", {"benchmarks"}),  # except tests/benchmarks, which test the benchmarks
    ],
)
def test_tests_and_benchmarks_share_only_hpctrain_testing(folder: str, apart: set[str]) -> None:
    """hpctrain_testing can be installed alone, and tests and benchmarks change independently of each other."""
    mixing = []
    for path in sorted((TOP / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        if apart & {name.split(".")[0] for name in names} and not path.is_relative_to(TOP / "tests" / "benchmarks"):
            mixing.append(str(path.relative_to(TOP)))
    assert not mixing


def test_the_contracts_of_imports_lack_no_module() -> None:
    contracts = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    _, without_mpi, production = (set(contract.get("source_modules", ())) for contract in contracts[:3])
    all_modules = {module for module in modules() if module.count(".") == 1}
    assert production == all_modules - {"hpctrain.testing"}
    with_mpi = ("__main__", "api", "bench", "cli", "comm", "doctor", "job", "process", "report", "run")
    assert all_modules - without_mpi == {f"hpctrain.{name}" for name in with_mpi}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither when the program runs, nor for types alone, nor inside functions."""
    graph = {module: imports(module, tree) & modules().keys() for module, tree in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_names_of_public_classes_are_unique() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for name, node in classes():
        if not node.name.startswith("_"):
            owners[node.name].append(name)
    shared = {word: names for word, names in owners.items() if len(names) > 1}
    assert not shared
