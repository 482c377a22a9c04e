"""The line of the program behind a frame: its own, not that of a package that posts for it; looked up once."""

from __future__ import annotations

import sys
from pathlib import Path

from hpctrain.comm.single import SingleCommunicator
from hpctrain.flight import source_lines
from hpctrain.flight.source_lines import SourceLines
from tests.support.source_lines import line

HERE = Path(__file__).parent


class _Names:
    """Gives each text a number, and counts how often it was asked."""

    def __init__(self) -> None:
        self.texts = [""]

    def add(self, text: str) -> int:
        self.texts.append(text)
        return len(self.texts) - 1


def test_the_line_of_a_call_is_looked_up_once() -> None:
    names = _Names()
    lines = SourceLines(names.add)
    found, at = [], line(2)
    for _ in range(3):
        found.append(lines.place(sys._getframe()))
    assert (found, names.texts) == ([1, 1, 1], ["", f"{HERE}/{at}"])


def test_lines_of_one_function_are_different_places() -> None:
    names = _Names()
    lines = SourceLines(names.add)
    first = lines.place(sys._getframe())
    second = lines.place(sys._getframe())
    assert first != second
    assert names.texts[second] == f"{HERE}/{line(-2)}"


def test_code_of_the_packages_that_post_for_others_is_passed_over() -> None:
    names = _Names()
    lines = SourceLines(names.add)
    program = compile("def call(function):\n    return function()\n", SingleCommunicator.__init__.__code__.co_filename, "exec")
    inside: dict[str, object] = {}
    exec(program, inside)
    call = inside["call"]
    assert callable(call)
    place, at = call(lambda: lines.place(sys._getframe(1))), line()
    assert names.texts[place] == f"{HERE}/{at}"
    assert lines.place(None) == 0


def test_a_file_of_the_package_is_named_from_there() -> None:
    names = _Names()
    package = Path(source_lines.__file__).parents[1]
    namespace: dict[str, object] = {"lines": SourceLines(names.add), "sys": sys}
    exec(compile("\n\nplace = lines.place(sys._getframe())", str(package / "train" / "evaluator.py"), "exec"), namespace)
    assert names.texts[1] == "train/evaluator.py:3"


def test_code_that_is_made_without_end_fills_no_record() -> None:
    names = _Names()
    namespace: dict[str, object] = {"lines": SourceLines(names.add), "sys": sys}
    for number in range(source_lines._MOST_PLACES + 50):
        exec(compile("place = lines.place(sys._getframe())", f"made-{number}.py", "exec"), namespace)
    assert len(names.texts) == source_lines._MOST_PLACES + 1
    assert namespace["place"] == 0
