"""Read the newest checkpoint of a directory."""

from pathlib import Path

from hpctrain.core.errors import CheckpointError
from hpctrain.storage.checkpoint import CheckpointContent, by_age, read


def read_newest(directory: Path) -> tuple[Path, CheckpointContent] | None:
    """Return the path and content of the last written checkpoint with valid checksums; None if there is none."""
    for _, path in reversed(by_age(directory)):
        try:
            return path, read(path)
        except CheckpointError:
            pass
    return None
