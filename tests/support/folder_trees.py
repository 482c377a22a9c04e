"""Folders of pictures of real users: links, loops, pipes, devices, other formats, unreadable entries, names in any script."""

from __future__ import annotations

import io
import os
import random
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("ant", "größe", unicodedata.normalize("NFD", "Füße"), "猫", "кот", "with space", "été", "lion", "n01440764", "🐝")
_SMALL = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8))


def picture(kind: str, image: Image.Image = _SMALL) -> bytes:
    """Return the content of a picture file in a format."""
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG that claims a size, with these chunks (kind, content) and without pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), *chunks, (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


GOOD = {
    "jpg": picture("JPEG"), "JPG": picture("JPEG"), "png": picture("PNG"), "webp": picture("WEBP"), "bmp": picture("BMP"),
    "tif": picture("TIFF"), "gif": picture("GIF"), "ppm": picture("PPM"), "jpeg": picture("PNG"),
    "PNG": picture("PNG", Image.fromarray(np.arange(30, dtype=np.uint16).reshape(5, 6) * 2000)),
}  # fmt: skip


class Folder:
    """A random folder. Pictures that can be decoded, and nothing else, have names that begin with "pic-".

    Attributes:
        path: of the folder, which has a directory for each class. closed: places that were closed to all but root.
    """

    def __init__(self, place: Path, seed: int) -> None:
        self.path, self._store = place / "tree", place / "store"
        self.closed: list[Path] = []
        self._random = random.Random(seed)
        self._count = 0
        self._store.mkdir()
        self.path.mkdir()
        for name in self._random.sample(NAMES, self._random.randint(1, 4)):
            (self.path / name).mkdir()
            self._write(self.path / name / "pic-first.png", GOOD["png"])
            self._fill(self.path / name, depth=2)
        for name in ("README", "pic.png", ".cache", "__MACOSX"):
            if self._random.random() < 0.3:
                self._strange(self.path, name)
        if self._random.random() < 0.15:
            (self.path / "empty").mkdir()
        for path in self.closed:
            path.chmod(self._random.choice((0o000, 0o444 if path.is_dir() else 0o200)))

    def _fill(self, directory: Path, depth: int) -> None:
        for _ in range(self._random.randint(1, 6)):
            self._count += 1
            kind = self._random.choice(("picture", "picture", "broken", "other", "link", "link", "hidden", "directory", "closed"))
            getattr(self, f"_add_{kind}")(directory, depth)

    def _write(self, path: Path, content: bytes) -> Path:
        path.write_bytes(content)
        return path

    def _add_picture(self, directory: Path, depth: int) -> None:
        kind = self._random.choice(sorted(GOOD))
        self._write(directory / f"pic-{self._count}.{kind}", GOOD[kind])

    def _add_broken(self, directory: Path, depth: int) -> None:
        path = directory / f"bad-{self._count}.{self._random.choice(('png', 'jpg', 'webp', 'tif'))}"
        action = self._random.choice(("cut", "empty", "claim", "sparse", "pipe", "heic"))
        if action == "pipe":
            os.mkfifo(path)
        elif action == "sparse":
            with path.open("wb") as file:
                file.truncate(self._random.choice((10 << 30, 1 << 40)))
        else:
            content = {"cut": GOOD["jpg"][:90], "empty": b"", "claim": png(60000, 60000), "heic": b"\0\0\0\x18ftypheic"}[action]
            self._write(path.with_suffix(".heic") if action == "heic" else path, content)

    def _add_other(self, directory: Path, depth: int) -> None:
        name = self._random.choice(("notes.txt", "Thumbs.db", "labels.csv", "a.jpg.part", "none", "a\nb.txt"))
        self._strange(directory, f"{self._count}{name}")

    def _strange(self, directory: Path, name: str) -> None:
        path = directory / name
        if name in (".cache", "__MACOSX"):
            path.mkdir()
            self._write(path / "pic-hidden.png", GOOD["png"])
        elif self._random.random() < 0.2 and not path.suffix:
            os.mkfifo(path)
        else:
            self._write(path, b"text")

    def _add_hidden(self, directory: Path, depth: int) -> None:
        if self._random.random() < 0.5:
            self._write(directory / f".pic-{self._count}.png", GOOD["png"])
        else:
            (directory / f".d{self._count}").mkdir()
            self._write(directory / f".d{self._count}" / "pic-hidden.png", GOOD["png"])

    def _add_directory(self, directory: Path, depth: int) -> None:
        path = directory / f"d{self._count}"
        path.mkdir()
        if depth:
            self._fill(path, depth - 1)

    def _add_closed(self, directory: Path, depth: int) -> None:
        if self._random.random() < 0.5:
            self.closed.append(self._write(directory / f"bad-{self._count}.png", GOOD["png"]))
        else:
            path = directory / f"bad-{self._count}"
            path.mkdir()
            self._write(path / "bad-inside.png", GOOD["png"])
            self.closed.append(path)

    def _add_link(self, directory: Path, depth: int) -> None:
        stored = self._store / f"s{self._count}"
        kind = self._random.choice(("picture", "directory", "twice", "up", "here", "root", "nowhere", "itself", "zero"))
        if kind == "picture":
            (directory / f"pic-{self._count}.jpg").symlink_to(self._write(stored, GOOD["jpg"]))
        elif kind in ("directory", "twice"):
            stored.mkdir()
            self._write(stored / "pic-stored.png", GOOD["png"])
            (stored / "back").symlink_to(directory)
            for number in range(1 + (kind == "twice")):
                (directory / f"l{self._count}-{number}").symlink_to(stored)
        elif kind in ("up", "here", "root"):
            (directory / f"l{self._count}").symlink_to({"up": "..", "here": ".", "root": "/"}[kind])
        else:
            name = f"bad-{self._count}.png" if self._random.random() < 0.5 or kind == "zero" else f"bad-{self._count}"
            (directory / name).symlink_to({"nowhere": "nowhere", "itself": name, "zero": "/dev/zero"}[kind])

    def entries(self) -> tuple[dict[str, int], set[str]]:
        """Return (number of pictures by class, paths of all other entries), found by real paths, without the code under test.

        A path is the real path of a directory and a name in it. Directories that are searched are not among them.
        """
        pictures: dict[str, int] = {}
        others: set[str] = set()
        above = {str(path) for path in (self.path.resolve(), *self.path.resolve().parents)}
        for top in sorted(self.path.iterdir()):
            if not top.is_dir() or top.name in (".cache", "__MACOSX"):
                others.add(str(self.path.resolve() / top.name))
                continue
            name = unicodedata.normalize("NFC", top.name)
            pictures[name] = 0
            done, pending = set(above), [str(top.resolve())]
            while pending:
                directory = pending.pop()
                if directory in done:
                    continue
                done.add(directory)
                for entry in os.listdir(directory):
                    path = Path(directory, entry)
                    if path in self.closed:
                        listed = path.is_dir() and path.stat().st_mode & 0o444  # names can be read, files cannot
                        others.add(str(path / "bad-inside.png" if listed else path))
                    elif not entry.startswith(".") and not entry.startswith("bad-") and path.is_dir():
                        pending.append(str(path.resolve()))
                    elif entry.startswith("pic-"):
                        pictures[name] += 1
                    else:
                        others.add(str(path))
        return pictures, others
