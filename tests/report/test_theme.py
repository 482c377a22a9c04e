import re

import pytest

from hpctrain.report import theme


def _luminance(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines define it."""
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("values", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_letters_and_lines_are_seen_on_the_ground(values: dict[str, str]) -> None:
    """Letters at a ratio of 7 at least, and lines and bars at 2, most of them at 3."""

    def ratio(name: str) -> float:
        lighter, darker = sorted((_luminance(values[name]), _luminance(values["paper"])), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    assert ratio("ink") >= 7
    assert all(ratio(theme.of_run(run)) >= 3 for run in range(theme.RUN_COLOURS))
    assert all(ratio(name) >= 2 for name in ("forward", "backward", "update", "waiting", "messages"))


def test_every_name_has_a_marker_and_both_meanings() -> None:
    text = " ".join(theme.marker(name) for name in theme.LIGHT)
    assert re.findall(r"var\(--(\w+)\)", theme.with_variables(text)) == list(theme.LIGHT)
    assert theme.with_values(text).split() == list(theme.LIGHT.values())
    assert theme.LIGHT.keys() == theme.DARK.keys()
    assert theme.with_variables("#123456") == "#123456"


def test_runs_beyond_the_last_colour_begin_again() -> None:
    assert theme.of_run(theme.RUN_COLOURS + 1) == theme.of_run(1)


def test_declarations_are_of_variables() -> None:
    assert theme.css({"ink": "#000000", "faint": "#ffffff"}) == "--ink: #000000; --faint: #ffffff;"
