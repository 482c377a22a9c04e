"""Damaged data files: each is refused with a sentence, or loads what was written; none hangs, none kills the process.

The cases run in a child process, so that a hang or a segmentation fault is a failed case and not the end of the tests. The
child is this module, run as a script.
"""

import collections
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.image_file import ImageFile
from hpctrain.data.readers import UnreadableError
from hpctrain.data.writer import write_data_file
from tests.support.sampling import amount

_NAMES = ("ant", "bée", "cow", "a class of a longer name", "e")
_LIMIT_SECONDS = 60  # of a start; a case takes about a millisecond


def damages(size, images):
    """All cases for a file of `size` bytes: (kind, start, value) with one byte changed, a range overwritten, or the end lost."""
    start, stop = images
    metadata = [*range(start), *range(stop, size)]
    changes = [1 << bit for bit in range(8)] + [0xFF]
    yield from (("change", place, value) for place in metadata for value in changes)
    yield from (("set", place, value) for place in metadata for value in (0, 1, 0xFF))
    yield from (("zero", place, length) for place in metadata[::3] for length in (2, 4, 8, 64, 512, 4096))
    yield from (("ones", place, length) for place in metadata[::7] for length in (2, 4, 8, 64))
    yield from (("truncate", place, 0) for place in (*metadata[::5], start, (start + stop) // 2, stop, size - 1))
    yield from (("change", place, 1) for place in range(start, stop, 97))


def damaged(content, kind, place, value):
    """A copy of the bytes with one of `damages`."""
    result = bytearray(content)
    if kind == "truncate":
        return result[:place]
    if kind == "change":
        result[place] ^= value
    elif kind == "set":
        result[place] = value
    else:
        end = min(len(result), place + value)
        result[place:end] = bytes([0 if kind == "zero" else 0xFF]) * (end - place)
    return result


def outcome(path, whole):
    """How opening a damaged file ends: "refused", "equal", "found by verify", or what is wrong."""
    try:
        file = ImageFile.open(path)
    except DataError as error:
        return "refused" if str(error).endswith(".") and str(path) in str(error) else f"no sentence: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    same = np.array_equal(file.labels, whole.labels) and file.class_names == whole.class_names
    if not same or file.mean.tobytes() != whole.mean.tobytes() or file.std.tobytes() != whole.std.tobytes():
        return "wrong labels, names, mean or deviation"
    try:
        if file.images.shape == whole.images.shape and np.array_equal(file.pixels[:], whole.pixels[:]):
            return "equal"
    except UnreadableError as error:  # a picture file that is not as it was written
        return "refused" if str(error).endswith(".") and str(path) in str(error) else f"no sentence: {error}"
    try:
        file.verify()
    except DataError:
        return "found by verify"
    return "wrong images"


def run_cases(path):
    """Child: reads cases as lines of JSON, writes the outcome of each as one."""
    whole, content = ImageFile.open(path), Path(path).read_bytes()
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "damaged.h5")
        for line in sys.stdin:
            target.write_bytes(damaged(content, *json.loads(line)))
            print(json.dumps(outcome(target, whole)), flush=True)


def outcomes(path, cases):
    """Case -> outcome; the case that hangs or ends the child has "hangs" or "ends with ...", and those after it have none."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    with tempfile.TemporaryFile("w+") as out:
        command, top = [sys.executable, "-m", "tests.data.test_damaged_files", str(path)], Path(__file__).parents[2]
        child = subprocess.Popen(command, cwd=top, stdin=subprocess.PIPE, stdout=out, text=True)
        try:
            child.communicate(lines, timeout=_LIMIT_SECONDS + len(cases) / 10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        out.seek(0)
        results = [json.loads(line) for line in out]
    if len(results) < len(cases):
        results.append("hangs" if child.returncode == -9 else f"ends with {child.returncode}")
    return dict(zip(cases, results, strict=False))


@pytest.mark.job
@pytest.mark.parametrize("kind", ["pixels", "pictures"])
def test_damaged_files_are_refused_or_load_what_was_written(tmp_path, make_encoded, kind):
    images, path = np.random.default_rng(0).integers(0, 256, (13, 7, 9, 3), np.uint8), tmp_path / "a.h5"
    write_data_file(path, 13, (7, 9, 3), _NAMES, [(images, np.arange(13) % 5)])
    path = {"pixels": path, "pictures": make_encoded()[0].path}[kind]
    extents = ImageFile.open(path).pixels.extents
    cases = list(damages(path.stat().st_size, (extents.first, extents.first + extents.size_bytes)))
    cases = random.Random(0).sample(cases, amount(200, 10_000))
    results = outcomes(path, cases)
    bad = {case: result for case, result in results.items() if result not in ("refused", "equal", "found by verify")}
    assert not bad, f"{len(bad)} of {len(cases)}: {dict(list(bad.items())[:10])}"
    # The file of pictures has unused pages, where damage does not matter.
    shares = collections.Counter(results.values())
    assert shares["refused"] > len(cases) * {"pixels": 0.8, "pictures": 0.35}[kind], f"the damage does not show: {shares}"


if __name__ == "__main__":
    run_cases(sys.argv[1])
