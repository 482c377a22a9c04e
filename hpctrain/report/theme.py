"""Colours of figures: names that a page gives a meaning for light and for dark, and values for pictures."""

from __future__ import annotations

import re

#: by name of the page's variable, what pictures on white have
LIGHT = {
    "ink": "#1f2933",
    "faint": "#d5dbe1",
    "paper": "#ffffff",
    "forward": "#3f7fbf",
    "backward": "#17406d",
    "update": "#8a63b8",
    "waiting": "#d8432f",
    "messages": "#e0962a",
    "run0": "#1f6fb4",
    "run1": "#c8501e",
    "run2": "#2c8a57",
    "run3": "#8a4fb0",
    "run4": "#b03a5b",
    "run5": "#5b6b1f",
    "run6": "#1d8a99",
    "run7": "#7a5230",
}
#: the same on a dark ground
DARK = LIGHT | {
    "ink": "#e4e9ee",
    "faint": "#3a444e",
    "paper": "#14191f",
    "forward": "#6fa8dc",
    "backward": "#3a73ad",
    "update": "#b597dd",
    "waiting": "#f0705d",
    "messages": "#eeb45c",
    "run0": "#62aeea",
    "run1": "#f08a56",
    "run2": "#5fc48d",
    "run3": "#c391e8",
    "run4": "#ea7795",
    "run5": "#b3c45a",
    "run6": "#58c7d6",
    "run7": "#c99a70",
}
RUN_COLOURS = 8
#: stand for the names in a figure until it is written: no colour that anything else would have
_MARKERS = {name: f"#0f{number:02x}f0" for number, name in enumerate(LIGHT)}
_HEX = re.compile(r"#0f[0-9a-f]{2}f0")


def marker(name: str) -> str:
    """The colour that stands for a name in a figure."""
    return _MARKERS[name]


def of_run(run: int) -> str:
    """The name of a run's colour; there are eight, one after another."""
    return f"run{run % RUN_COLOURS}"


def with_variables(svg: str) -> str:
    """An SVG whose markers are the page's variables."""
    names = {colour: name for name, colour in _MARKERS.items()}
    return _HEX.sub(lambda match: f"var(--{names[match[0]]})", svg)


def css(values: dict[str, str]) -> str:
    """The declarations of the variables."""
    return " ".join(f"--{name}: {value};" for name, value in values.items())
