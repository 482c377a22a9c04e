"""Where a program stands, as messages name it."""

from __future__ import annotations

import inspect

from hpctrain.virtual import rank, run
from hpctrain.virtual.rank import SourceLine, source_line
from tests.support.source_lines import line


def test_a_line_is_the_one_of_the_caller_outside_of_the_communication() -> None:
    assert str(source_line()).endswith(line())
    stood_at: list[str] = []

    class Handle:
        def test(self) -> bool:
            frame = inspect.currentframe()
            assert frame is not None
            assert frame.f_back is not None
            assert frame.f_back.f_code.co_filename == run.__file__
            stood_at.append(str(source_line(frame.f_back)))
            return True

    run.wait(Handle())  # type: ignore[arg-type]
    assert stood_at[0].endswith(line(-1))


def test_a_line_is_short_where_the_file_lies_below_the_working_directory() -> None:
    here = SourceLine(rank.__file__, 7)
    assert str(here).endswith("rank.py:7")
    assert str(SourceLine("/elsewhere/program.py", 3)) == "/elsewhere/program.py:3"
