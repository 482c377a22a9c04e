"""Sizes of rooms: which lines are code, and that a limit falls with its room and never rises."""

import tomllib

import pytest

from hpctrain_testing.size import Room, code_lines, faults, lowered, sums, unlisted

MODULE = '''"""Docstring
of two lines."""

# A comment.
TEXT = """
# a line of a string
"""


class A:
    """Docstring."""

    def f(self):  # code
        """Docstring."""
        return 1
'''


def test_code_is_what_is_neither_blank_nor_comment_nor_docstring() -> None:
    assert (code_lines("a.py", MODULE), code_lines("a.md", "# Title\n\ntext\n")) == (6, 2)


PROJECT = """
[tool.hpctrain.rooms]
"a, b" = { paths = ["pkg/a", "pkg/b.py"], budget = 3, limit = 9 }
"package" = { paths = ["pkg"], budget = 10, limit = 12, code_budget = 4, code_limit = 8 }
"""


@pytest.mark.parametrize(
    ("size", "limit", "fault"),
    [(10, 9, "may have 9"), (9, 9, ""), (5, 5, "lowers the limit"), (3, None, "lowers the limit"), (2, None, "lowers the limit")],
)
def test_a_limit_follows_its_room_down_to_the_budget(size: int, limit: int | None, fault: str) -> None:
    table = tomllib.loads(PROJECT)["tool"]["hpctrain"]["rooms"]
    rooms = {name: Room(**row) for name, row in table.items()}
    found, code = {"a, b": size, "package": 12}, {"a, b": size, "package": 8}
    sentences = faults(rooms, found, code)
    assert len(sentences) == bool(fault)
    assert fault in "".join(sentences)
    now = tomllib.loads(lowered(PROJECT, rooms, found, code))["tool"]["hpctrain"]["rooms"]
    assert now["a, b"].get("limit") == limit
    assert now["package"] == table["package"]


def test_files_belong_to_rooms_by_their_paths() -> None:
    rooms = {"a, b": Room(("pkg/a", "pkg/b.py")), "package": Room(("pkg",))}
    files = {"pkg/a/x.py": "1\n", "pkg/b.py": "1\n2\n", "pkg/b/y.py": "1\n", "pkga/z.py": "1\n"}
    assert sums(rooms, files, lambda _, text: text.count("\n")) == {"a, b": 3, "package": 4}
    assert unlisted(rooms, files) == ["pkg/b/y.py"]
