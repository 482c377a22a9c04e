"""The comparison of runs for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table

from hpctrain.report.comparison import Comparison
from hpctrain.report.differences import ComparedSetting
from hpctrain.report.run_record import texts


def lines(comparison: Comparison) -> Iterator[RenderableType]:
    """The tables and sentences, from above to below; runs are numbered, as their names are long."""
    for number, name in enumerate(comparison.names, 1):
        yield f"{number}: {name}"
    yield ""
    results = _table(comparison.names)
    for heading, values in texts(comparison.summaries):
        results.add_row(heading, *values)
    yield results
    for title, settings in (("configuration", comparison.configuration), ("versions", comparison.versions)):
        yield ""
        if settings:
            yield f"Differences of {title}:"
            yield Padding(_differences(settings, comparison.names), (0, 0, 0, 2))
        else:
            yield f"No differences of {title}."
    yield ""
    for bits in comparison.bits:
        yield bits.sentence(comparison.names)


def _differences(settings: Sequence[ComparedSetting], names: Sequence[str]) -> Table:
    table = _table(names)
    for setting in settings:
        table.add_row(setting.key, *setting.values)
    return table


def _table(names: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    table.add_column("", overflow="fold")
    for number, _ in enumerate(names, 1):
        table.add_column(str(number), overflow="fold")
    return table
