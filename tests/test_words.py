"""One meaning for each word: rows and columns are of arrays, images and tables, never of ranks, and retired names stay away."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "hpctrain").rglob("*.py"))
IDS = [str(path.relative_to(ROOT / "hpctrain")) for path in SOURCES]

#: modules and packages that speak of rows and columns -> of what
OF_ARRAYS = {
    "api.py": "the arguments rows and cols, named as the keys",
    "experiment/job.py": "the arguments rows and tiles, named as the keys",
    "averaging/slices.py": "of a weight",
    "averaging/sufficient_factors.py": "of a weight, of inputs and errors",
    "backend/": "of images and matrices",
    "cli/evaluation_tables.py": "of the terminal",
    "cli/listing.py": "of the terminal",
    "cli/plan_tables.py": "of the terminal; keys of the JSON output",
    "cli/planner_tables.py": "of tables",
    "cli/prediction_tables.py": "of the terminal and of tables",
    "cli/text_curve.py": "of the terminal",
    "cli/trace.py": "of a table",
    "comm/progress_mode.py": "of a matrix product",
    "config/schema.py": "the keys grid.rows and grid.cols",
    "data/augmentations/": "of images",
    "experiment/candidate_keys.py": "the keys grid.rows and grid.cols",
    "experiment/grid.py": "of images",
    "experiment/trace_report.py": "of a table",
    "models/": "of images",
    "planner/formulas.py": "of images; the arguments rows and cols, named as the keys",
    "nn/layers/": "of images and weights",
    "nn/windows.py": "of windows",
    "parallel/interior.py": "of images",
    "parallel/partition_graph.py": "of images",
    "parallel/plan_report.py": "of images",
    "parallel/plan_reporter.py": "of images",
    "parallel/receptive_field.py": "of images",
    "trace/": "of tables",
    "train/metrics.py": "of the terminal",
}
#: rows and cols of the configuration by their names: `grid.rows`, `rows`, c * rows + r, rows: the ranks ..., a key of a mapping
KEYS = re.compile(
    r"grid\.(rows|cols)\b|`(rows|cols)`|\* rows \+|^\s+(rows?|row, col): |\brows or cols\b|^(rows|cols|-row)$", re.MULTILINE
)
ROWS_OR_COLUMNS = re.compile(r"\b(rows?|columns?|cols?)\b", re.IGNORECASE)

#: ways to call a group of ranks a row or column, wrong everywhere
OF_RANKS = re.compile(
    r"""\b(ranks?|samples?|groups?|communicators?|positions?)\s+(of|along|down|across|over)\s+
        ((a|the|its|each|every|one|this|whole|first)\s+)*(rows?|columns?)\b(?!\.)
    | \b(row|column)\s+(communicators?|groups?|collectives?|traffic|axis|ranks?|messages?|samples)\b
    | \b(rows?|columns?)\s+of\s+(the|a)\s+(process\s+)?grid\b | \bgrid\s+without\s+rows\b | \b(ROW|COL|COLUMN)\b""",
    re.VERBOSE,
)
#: names that had a second meaning, or none -> what they became
RETIRED = {
    "RowUse": "Parallelism",
    "RowAxis": "SplitGroup",
    "row_axis": "split_group",
    "GridPlan": "ParallelPlan",
    "grid_plan": "parallel_plan",
    "MoveSpec": "RedistributeSpec",
    "SumSpec": "ReduceScatterSpec",
    "Placement": "OperatorSharding",
    "DistributedGraph": "PartitionedGraph",
    "raise_alike": "raise_on_all_ranks",
    "SmallMessage": "StepReduction",
    "FactorExchange": "SufficientFactorExchange",
    "takes_factors": "takes_sufficient_factors",
    "rebuilds_output": "recomputes_output",
    "rebuild_output": "recompute_output",
    "Hiding": "OverlapMeasurement",
    "nudge": "progress_once",
    "Gate": "LocalEvent",
    "speaks": "contributes",
    "window_reach": "window_receptive_field",
    "column_counts": "split_counts",
    "column_count": "group_count",
    "part_of": "share_of",
}

#: words of the text, comments included, that make a reader stop -> others
STUMBLING = {
    r"anew": "again",
    r"likewise": "the thing itself, once more",
    r"for ever": "without end",
    r"whoever": "a noun: the rank that, the caller",
    r"ways? of progress": "progress mode",
    r"between (two )?looks": "between polls",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring and string literal; the parts of an f-string are literals too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_rows_and_columns_are_of_arrays(path: Path) -> None:
    name = str(path.relative_to(ROOT / "hpctrain"))
    allowed = any(name.startswith(prefix) for prefix in OF_ARRAYS)
    for line, text in texts(path):
        match = None if allowed else ROWS_OR_COLUMNS.search(KEYS.sub("", text))
        assert match is None, (
            f"{path}, line {line}: say of what array, image or table the {match[0]} is, or name the group of ranks"
        )


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_no_group_of_ranks_is_a_row_or_column(path: Path) -> None:
    for line, text in texts(path):
        match = OF_RANKS.search(text)
        assert match is None, f"{path}, line {line}: {match[0]!r}; say split group (Pr ranks) or data group (Pc ranks)"


def test_no_page_test_or_benchmark_calls_a_group_of_ranks_so() -> None:
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    programs = [path for top in ("tests", "benchmarks") for path in sorted((ROOT / top).rglob("*.py")) if path != Path(__file__)]
    for path in (*pages, *programs):
        match = OF_RANKS.search(re.sub(r"\s*\n(?!\n)\s*", " ", path.read_text(encoding="utf-8")))
        assert match is None, f"{path}: {match[0]!r}; say split group (Pr ranks) or data group (Pc ranks)"


def test_every_exception_is_needed() -> None:
    for prefix in OF_ARRAYS:
        found = [text for path, name in zip(SOURCES, IDS, strict=True) if name.startswith(prefix) for _, text in texts(path)]
        assert any(ROWS_OR_COLUMNS.search(KEYS.sub("", text)) for text in found), prefix


@pytest.mark.parametrize(
    "text",
    [
        "The ranks of a column share samples.",
        "messages of the row communicator",
        "split over the rows of the grid",
        "the ROW axis",
    ],
)
def test_the_rule_knows_what_it_forbids(text: str) -> None:
    assert OF_RANKS.search(text)


@pytest.mark.parametrize(
    "text", ["samples and rows of an image", "output rows [o0, o1)", "a row of the table", "grid.rows ranks"]
)
def test_the_rule_knows_what_it_allows(text: str) -> None:
    assert not OF_RANKS.search(text)


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and identifier of every name in the code."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


@pytest.mark.parametrize("top", ["hpctrain", "benchmarks", "tests"])
def test_retired_names_stay_away(top: str) -> None:
    used = [
        f"{path}, line {line}: {name} is {RETIRED[name.lstrip('_')]} now"
        for path in sorted((ROOT / top).rglob("*.py"))
        for line, name in names(path)
        if name.lstrip("_") in RETIRED
    ]
    assert not used, "\n".join(used)


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_text_is_plain_english(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for pattern, instead in STUMBLING.items():
        match = re.search(rf"\b({pattern})\b", text, re.IGNORECASE)
        assert match is None, f"{path}, line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}; write {instead}"
