"""Steps whose events are written down by hand, in milliseconds, as a tracer would record them."""

from __future__ import annotations

from hpctrain.trace.time_table import TimeTable, tabulate
from hpctrain.trace.tracer import Category, Events, Tracer

MS = 1_000_000


class Script:
    """Records events at given milliseconds."""

    def __init__(self) -> None:
        self.tracer = Tracer(200)

    def __call__(self, category: Category, name: str, start: float, stop: float, number: int = 0, track: str = "") -> None:
        self.tracer.add(category, name, round(start * MS), round(stop * MS), track, number)

    def events(self) -> Events:
        """All that was recorded."""
        return self.tracer.events()


def record_step(at: float, script: Script) -> None:
    """10 ms: loading 1, a forward with a wait of 2 in its hook, an update in that wait, backward, nothing for 0.5."""
    script(Category.LOADING, "data loading", at, at + 1)
    script(Category.UPDATE, "conv.weight", at + 2, at + 2.5)  # in the wait
    script(Category.WAIT, "conv.weight", at + 1.5, at + 3.5, 7, "column")
    script(Category.AVERAGING, "hooks", at + 1, at + 4)
    script(Category.FORWARD, "conv", at + 4, at + 6)
    script(Category.FORWARD, "fc", at + 6, at + 7)
    script(Category.PARAMETERS, "fc", at + 7, at + 8)
    script(Category.INPUT, "fc", at + 8, at + 8.5)
    script(Category.COMMUNICATION, "fc.weight", at + 8, at + 9, 8, "column")  # 8 .. 9, nobody waits
    script(Category.COMMUNICATION, "conv.weight", at - 1, at + 3.5, 7, "column")  # begun in the step before
    script(Category.PARAMETERS, "conv", at + 8.5, at + 9.5)
    script(Category.STEP, "step", at, at + 10)


def recorded_table(steps: int = 4) -> TimeTable:
    """The table of so many steps, and of one operation for a step that is not recorded."""
    script = Script()
    for number in range(steps):
        record_step(100 + 10 * number, script)
    end = 100 + 10 * steps
    script(Category.COMMUNICATION, "conv.weight", end - 1, end + 3.5, 7, "column")  # for a step that is not recorded
    table = tabulate(script.events())
    assert table is not None
    return table
