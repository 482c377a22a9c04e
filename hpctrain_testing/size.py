"""Compare the size of each room of the repository with its budget: `python -m hpctrain_testing.size`, in the root of a checkout.

The table `[tool.hpctrain.rooms]` of pyproject.toml lists the rooms with their paths and budgets in lines. A room above its budget
also has a limit, its size at the last change that made it smaller. A limit falls with the room and never rises.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROJECT = Path("pyproject.toml")
PACKAGE = "package"  # row of the table that sums the rooms of the package
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Room:
    """A row of the table: the files below `paths`, and their maximum numbers of lines; 0: no budget, or no limit."""

    paths: tuple[str, ...]
    budget: int = 0
    limit: int = 0
    code_budget: int = 0
    code_limit: int = 0

    def holds(self, path: str) -> bool:
        """Return whether the file belongs to the room."""
        return not {path, *map(str, PurePosixPath(path).parents)}.isdisjoint(self.paths)


def lines(path: str, text: str) -> int:
    """Return the number of lines of a file."""
    return text.count("\n")


def code_lines(path: str, text: str) -> int:
    """Return the number of lines without blank lines, and in a module without comments and docstrings."""
    documented, strings = set[int](), set[int]()
    for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    stripped = enumerate((line.strip() for line in text.splitlines()), 1)
    return sum(
        bool(line) and number not in documented and (number in strings or not (line.startswith("#") and path.endswith(".py")))
        for number, line in stripped
    )


def sums(rooms: Mapping[str, Room], files: Mapping[str, str], count: Callable[[str, str], int]) -> dict[str, int]:
    """Return the sum of `count(path, text)` over the files of each room. `files` maps paths from the root to texts."""
    counts = {path: count(path, text) for path, text in files.items()}
    return {name: sum(number for path, number in counts.items() if room.holds(path)) for name, room in rooms.items()}


def _counted(path: str) -> bool:
    """Return whether the file's lines count: Python, and the pages of docs/."""
    return path.endswith(".py") or (path.startswith("docs/") and path.endswith(".md"))


def _here() -> dict[str, str]:
    """Return the files of the working tree that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    paths = sorted(set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()))
    return {path: Path(path).read_text() for path in paths if _counted(path) and Path(path).is_file()}


def _at(commit: str) -> dict[str, str] | None:
    """Return the files of a commit, or None if git does not have it."""
    archive = subprocess.run(["git", "archive", commit], capture_output=True)
    if archive.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        members = [member for member in tar if member.isfile() and _counted(member.name)]
        return {member.name: tar.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


def unlisted(rooms: Mapping[str, Room], files: Iterable[str]) -> list[str]:
    """Return the modules of the package that no other room contains."""
    inside = [path for path in files if rooms[PACKAGE].holds(path)]
    return [path for path in inside if not any(room.holds(path) for name, room in rooms.items() if name != PACKAGE)]


def faults(rooms: Mapping[str, Room], found: Mapping[str, int], code: Mapping[str, int]) -> list[str]:
    """Return a sentence for each room that exceeds its limit, and for each limit that must fall."""
    sentences = []
    for name, room in rooms.items():
        for size, unit, budget, limit in (
            (found[name], "lines", room.budget, room.limit),
            (code[name], "lines of code", room.code_budget, room.code_limit),
        ):
            most = max(budget, limit)
            if most and size > most:
                sentences.append(f"{name} has {size:,} {unit}, but may have {most:,}: remove {size - most:,}.")
            elif limit > max(size, budget):
                sentences.append(f"{name} has {size:,} {unit} and the limit {limit:,}: `make size LOWER=1` lowers the limit.")
    return sentences


def lowered(project: str, rooms: Mapping[str, Room], found: Mapping[str, int], code: Mapping[str, int]) -> str:
    """Return the text of pyproject.toml with limits lowered to the size of their rooms, and removed if the budget is reached."""
    for name, room in rooms.items():
        for key, size, budget, limit in (
            ("limit", found[name], room.budget, room.limit),
            ("code_limit", code[name], room.code_budget, room.code_limit),
        ):
            if limit > max(size, budget):
                now = f", {key} = {size}" if size > budget else ""
                project = re.sub(rf'(?m)^("{re.escape(name)}" = .*), {key} = {limit}\b', rf"\g<1>{now}", project, count=1)
    return project


def table(rooms: Mapping[str, Room], found: Mapping[str, int], code: Mapping[str, int], before: Mapping[str, int]) -> str:
    """Return a row for each room: lines, budget, lines above it, lines of code, and lines added since the other commit."""
    rows = [f"{'room':38}{'lines':>8}{'budget':>8}{'over':>8}{'code':>8}{'added':>8}"]
    for name, room in rooms.items():
        over = max(0, found[name] - room.budget) if room.budget else 0
        added = found[name] - before.get(name, found[name])
        numbers = "".join(f"{number:>8,}" if number else " " * 8 for number in (found[name], room.budget, over, code[name]))
        rows.append(f"{name:38}{numbers}{f'{added:+,}' if added else '':>8}".rstrip())
    return "\n".join(rows)


def main() -> None:
    """Print the table, and exit with 1 if a room exceeds its limit. With `--lower`, lower the limits first."""
    parser = argparse.ArgumentParser(description="Compare the size of each room with its budget.")
    parser.add_argument("--base", default="HEAD", help="commit to compare the working tree with (HEAD)")
    parser.add_argument("--lower", action="store_true", help="write the limits that fall to pyproject.toml")
    options = parser.parse_args()
    project, files = PROJECT.read_text(), _here()
    rooms = _rooms(project)
    found, code, old = sums(rooms, files, lines), sums(rooms, files, code_lines), _at(options.base)
    print(table(rooms, found, code, {} if old is None else sums(rooms, old, lines)))
    if options.lower:
        project = lowered(project, rooms, found, code)
        PROJECT.write_text(project)
    sentences = faults(_rooms(project), found, code)
    if alone := unlisted(rooms, files):
        sentences.append(f"{', '.join(alone)}: in no room of [tool.hpctrain.rooms] in {PROJECT}.")
    if sentences:
        sys.exit("\n".join(sentences))


def _rooms(project: str) -> dict[str, Room]:
    rows = tomllib.loads(project)["tool"]["hpctrain"]["rooms"]
    return {name: Room(**(row | {"paths": tuple(row["paths"])})) for name, row in rows.items()}


if __name__ == "__main__":
    main()
