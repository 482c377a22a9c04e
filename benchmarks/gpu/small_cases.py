"""Every kernel of our own once, at small sizes: the program that a sanitizer watches.

compute-sanitizer python -m benchmarks.gpu.small_cases --device cuda [--libraries]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.gpu.arithmetic_cases import arithmetic_results
from benchmarks.gpu.cases import cases
from benchmarks.gpu.kernels import NO_OPERATOR, kernel_set, results
from benchmarks.gpu.settings import Settings, add_arguments
from hpctrain.core.errors import BackendError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--libraries", action="store_true", help="also convolutions and matrix products of cuDNN and cuBLAS")
    chosen = parser.parse_args(arguments)
    settings = Settings(chosen.device, chosen.out.absolute())
    device, count = settings.make_device(), 0
    for precision in ("float32", "bfloat16"):
        kernels = kernel_set(device, precision)
        arithmetic_results(kernels, precision)
        for case in cases(small=True):
            if chosen.libraries or not case.library:
                try:
                    results(kernels, precision, case)
                except BackendError as error:
                    if NO_OPERATOR not in str(error):
                        raise
                    continue
                count += 1
    print(f"{count} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
