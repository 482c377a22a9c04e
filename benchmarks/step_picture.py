"""A picture of one step under several averagers: when a rank computes, when messages travel, and when it waits for them.

    python -m benchmarks.step_picture --out docs/images/step.svg        # simulated, as docs/index.md and README.md show it
    python -m benchmarks.step_picture --out step.svg blocking=runs/a/trace.json sharded=runs/b/trace.json   # traces of runs

The picture brings its own light ground, so that it is readable on pages of any colour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from hpctrain.trace.chrome import Interval, joined, last_steps

# Lines of 640 units with letters of 15 are still read where a page is 400 pixels wide.
_WIDTH, _LEFT, _RIGHT = 640, 96, 18
_LANE, _PANEL, _TOP = 26, 108, 38
_COLOURS = {
    "forward": "#3f7fbf",
    "backward": "#17406d",
    "update": "#8a63b8",
    "waiting": "#d8432f",
    "gradients": "#e0962a",
    "parameters": "#3c9d6b",
}
_PROGRAM = ("forward", "backward", "update", "waiting")
_MESSAGES = ("gradients", "parameters")
_SIMULATED = ("blocking", "sharded")
_CONFIG = ("configs/imagenet-vgg16.yaml", "batch=16")
_MACHINE = ("--machine", "cpu-cluster", "--bandwidth", "0.1", "--ranks", "32")
_TITLE = "A step of VGG-16 on 32 ranks, 20 Gb/s per node, simulated"


@dataclass(frozen=True)
class StepPicture:
    """One step of a rank. seconds: its length; lanes: by kind, the intervals of it in seconds from its begin, apart, in order."""

    seconds: float
    lanes: Mapping[str, tuple[Interval, ...]]

    @property
    def waiting_seconds(self) -> float:
        """The exposed time."""
        return sum(end - begin for begin, end in self.lanes["waiting"])


def step_picture_lanes(trace: Mapping[str, Any]) -> StepPicture:
    """The last whole step of the first process in a trace.

    Raises:
        ValueError: there is no step in it.
    """
    steps = last_steps(trace)
    if not steps:
        raise ValueError("The trace has no step; record at least two, as the first one is left out.")
    first = steps[0]
    begin = first.begin_seconds
    lanes = {kind: first.lanes[kind] for kind in _PROGRAM}
    for kind in _MESSAGES:
        lanes[kind] = tuple(joined(sorted(span for track, spans in first.tracks.items() if kind in track for span in spans)))
    from_begin = {kind: tuple((start - begin, end - begin) for start, end in spans) for kind, spans in lanes.items()}
    return StepPicture(first.seconds, from_begin)


def picture(title: str, steps: Mapping[str, StepPicture]) -> str:
    """The picture as SVG, a panel for each averager, all on one scale of time."""
    scale = (_WIDTH - _LEFT - _RIGHT) / max(step.seconds for step in steps.values())
    height = _TOP + _PANEL * len(steps) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="15" fill="#1f2933">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#f6f8fa"/>',
        _text(14, 25, title, weight="bold"),
    ]
    for index, (name, step) in enumerate(steps.items()):
        parts += _panel(name, step, _TOP + index * _PANEL, scale)
    return "\n".join([*parts, *_legend(height - 16), "</svg>", ""])


def _panel(name: str, step: StepPicture, top: float, scale: float) -> list[str]:
    """Two lanes with their heading: the rank above, its messages below."""
    share = step.waiting_seconds / step.seconds
    heading = f"averager {name}: {step.seconds:.2f} s, of which {step.waiting_seconds:.2f} s waiting ({share:.0%})"
    program, network = top + 28, top + 28 + _LANE + 6
    parts = [_text(14, top + 18, heading), _text(14, program + 18, "computes"), _text(14, network + 18, "sends")]
    end = _LEFT + step.seconds * scale
    for lane in (program, network):
        parts.append(f'<rect x="{_LEFT}" y="{lane:g}" width="{end - _LEFT:.1f}" height="{_LANE}" fill="#dfe5ea"/>')
    for kind in _PROGRAM:
        parts += _bars(step.lanes[kind], kind, program, _LANE, scale)
    for row, kind in enumerate(_MESSAGES):
        parts += _bars(step.lanes[kind], kind, network + row * _LANE / 2, _LANE / 2, scale)
    return parts


def _bars(intervals: Iterable[Interval], kind: str, top: float, height: float, scale: float) -> list[str]:
    return [
        f'<rect x="{_LEFT + first * scale:.2f}" y="{top:g}" width="{(last - first) * scale:.2f}" height="{height:g}" '
        f'fill="{_COLOURS[kind]}"/>'
        for first, last in intervals
    ]


def _legend(base: float) -> list[str]:
    parts: list[str] = []
    left = 14
    for kind in _COLOURS:
        parts.append(f'<rect x="{left}" y="{base - 12:g}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        parts.append(_text(left + 20, base, kind))
        left += 36 + 8 * len(kind)
    return parts


def _text(left: float, base: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{left:g}" y="{base:g}" font-weight="{weight}">{escape(text)}</text>'


def simulated(averager: str) -> StepPicture:
    """The step of a job with this averager, by `hpctrain plan simulate`."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        command = [sys.executable, "-m", "hpctrain", "plan", "simulate", *_CONFIG, *_MACHINE]
        subprocess.run([*command, "--averager", averager, "--trace", str(trace)], check=True, capture_output=True)
        return step_picture_lanes(json.loads(trace.read_text()))


def _traced(argument: str) -> tuple[str, StepPicture]:
    name, _, path = argument.partition("=")
    return name, step_picture_lanes(json.loads(Path(path).read_text()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="NAME=TRACE", help="Traces of runs; without any the step is simulated.")
    parser.add_argument("--out", type=Path, required=True, help="File for the picture.")
    parser.add_argument("--title", default=_TITLE, help="Line above the picture.")
    options = parser.parse_args(arguments)
    steps = dict(map(_traced, options.traces)) or {name: simulated(name) for name in _SIMULATED}
    options.out.write_text(picture(options.title, steps), encoding="utf-8")


if __name__ == "__main__":
    main()
