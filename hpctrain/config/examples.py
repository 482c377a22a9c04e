"""The configurations, machine models and job scripts that are installed with hpctrain, for users without its repository."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from hpctrain.core.errors import ConfigError
from hpctrain.core.files import read_bytes
from hpctrain.core.text import choices

# Links to the folders of these names at the top of the repository; a wheel contains the files themselves.
_ROOT = Path(__file__).parents[1] / "examples"
_PATTERNS = ("configs/*.yaml", "configs/machines/*.yaml", "jobs/*.sbatch", "jobs/*.pbs", "jobs/*.sh", "jobs/*.def")


def names() -> list[str]:
    """Return the paths of all examples below the top of the repository, such as "configs/quickstart.yaml"."""
    return sorted(path.relative_to(_ROOT).as_posix() for pattern in _PATTERNS for path in _ROOT.glob(pattern))


def path_of(name: str) -> Path:
    """Return the file of an example.

    Args:
        name: path as `names` returns it, or its last part with or without the suffix.

    Raises:
        ConfigError: there is no such example; the message names the nearest one.
    """
    by_name = {key: full for full in names() for key in (full, Path(full).name, Path(full).stem)}
    if name in by_name:
        return _ROOT / by_name[name]
    raise ConfigError(f"There is no example {name!r}; {choices(name, (Path(full).stem for full in names()))}.")


def purpose(name: str) -> str:
    """Return the first clause of an example's first comment."""
    lines = (_ROOT / name).read_text().splitlines()
    comment = itertools.takewhile(_is_text, itertools.dropwhile(lambda line: not _is_text(line), lines))
    return re.split(r"[.:](?: |$)", " ".join(line.lstrip("# ") for line in comment))[0]


def _is_text(line: str) -> bool:
    return line.startswith("# ")


def copy(wanted: Sequence[str], directory: Path) -> dict[Path, bool]:
    """Copy examples to the same relative paths below `directory`, and return by path whether its file was created.

    Files that already equal their example are not written. Without names, copy all.

    Raises:
        ConfigError: an example does not exist, or another file is in its place. No file is copied then.
    """
    sources = list(dict.fromkeys(map(path_of, wanted))) or [_ROOT / name for name in names()]
    targets = [directory / source.relative_to(_ROOT) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        if target.exists() and read_bytes(target) != source.read_bytes():
            raise ConfigError(f"{target} already exists and differs from the example; rename it, or copy to another directory.")
    is_new: dict[Path, bool] = {}
    for source, target in zip(sources, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        is_new[target] = not target.exists()
        if is_new[target]:
            with open(target, "xb") as file:  # does not overwrite a file that was created in the meantime
                file.write(source.read_bytes())
    return is_new
