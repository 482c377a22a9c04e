"""`hpctrain data check`: what is wrong or strange in a data file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpctrain.cli.arguments import FilePath
from hpctrain.cli.progress import progress
from hpctrain.core.text import echo, echo_block

# NumPy and HDF5 are imported inside the command: the command line itself must start fast, and set threads before NumPy is there.

_DAMAGED = 2


@click.command()
@click.argument("file", type=FilePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.option("--strict", is_flag=True, help="Leave with exit code 2 for duplicates and empty classes, too.")
@click.option("--threads", type=click.IntRange(1), help="Number of threads that decode images; by default one per core.")
def check(file: Path, as_json: bool, strict: bool, threads: int | None) -> None:
    """Search a data file for damage, duplicates and more.

    Every sample is read and compared with its checksum, and picture files are decoded. Damage is a sample that changed or cannot
    be read or decoded, a label outside the classes, or anything else that is not as it was written; the exit code is 2 then.
    Duplicates, within a class and across classes, and classes without a sample are told, and change the exit code with --strict
    only.
    """
    from hpctrain.data.check import check_file
    from hpctrain.data.convert.common import default_threads
    from hpctrain.data.image_file import read_contents

    with progress(f"checking {file.name}", len(read_contents(file).labels)) as advance:
        checked = check_file(file, default_threads() if threads is None else threads, advance)
    if as_json:
        content = {"file": str(file), "images": checked.images, "classes": checked.classes, "damaged": checked.damaged}
        echo_block(json.dumps({**content, "findings": [finding.to_json() for finding in checked.findings]}, indent=1))
    else:
        for finding in checked.findings:
            echo(f"{'damage' if finding.damage else 'note'}: {finding.sentence}.")
        outcome = "damaged" if checked.damaged else "as it was written"
        echo(f"{file}: {checked.images} images of {checked.classes} classes, {outcome}")
    if checked.damaged or (strict and checked.findings):
        raise SystemExit(_DAMAGED)
