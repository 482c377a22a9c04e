"""Print how far one training step lies from PyTorch's at full image size: float64 against float64, and float32 against both."""

from __future__ import annotations

import argparse
import sys

from hpctrain.models import catalogue
from hpctrain_testing.torch_parity import MODELS, Comparison, compare, gradient_median

_LIMIT_FLOAT64 = 1e-8
_LIMIT_RATIO = 2.0
_COLUMNS = "{:<16} {:>6} {:>5}  {:>8} {:<36} {:>12} {:>13} {:>6}  {}"
_HEADER = ("model", "pixels", "seed", "float64", "(its worst tensor)", "ours float32", "torch float32", "ratio", "")


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where every model is within its limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--classes", type=int, default=1000)
    chosen = parser.parse_args(arguments)
    print(_COLUMNS.format(*_HEADER))
    passed = [_report(name, chosen.samples, chosen.classes, chosen.seeds) for name in chosen.models]
    return 0 if all(passed) else 1


def _report(name: str, samples: int, classes: int, seeds: int) -> bool:
    """Print a line per seed and one for all of them, which is what the limits are for."""
    pixels = catalogue.image_shape(name)[0]
    done: list[Comparison] = []
    for seed in range(seeds):
        done.append(compare(name, pixels=pixels, samples=samples, classes=classes, seed=seed))
        _print(name, pixels, str(seed), done[-1:])
    return _print(name, pixels, "all", done)


def _print(name: str, pixels: int, seeds: str, done: list[Comparison]) -> bool:
    distance, worst = max(one.worst for one in done)
    ours, theirs = (gradient_median(*one) for one in ([d.float32 for d in done], [d.torch_float32 for d in done]))
    passed = distance <= _LIMIT_FLOAT64 and ours <= _LIMIT_RATIO * theirs
    verdict = ("ok" if passed else "TOO FAR") if seeds == "all" else ""
    numbers = (f"{distance:.1e}", worst, f"{ours:.2e}", f"{theirs:.2e}", f"{ours / theirs:.2f}")
    print(_COLUMNS.format(name, pixels, seeds, *numbers, verdict), flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
